"""Compare runs side by side. The address contains the selected runs, so a link shows the same page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from django.http import HttpRequest, HttpResponse, QueryDict
from django.views.decorators.gzip import gzip_page

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.pages import glossary
from fp8scope_dashboard.pages.access import in_project, page
from fp8scope_dashboard.pages.charts.answers import empty_answer, figure_answer
from fp8scope_dashboard.pages.charts.arms import Arm, ArmReader, Arms, ComparedArms
from fp8scope_dashboard.pages.charts.curves import curves_figure
from fp8scope_dashboard.pages.charts.ranges import loss_range
from fp8scope_dashboard.pages.charts.series import AXIS_TITLES, Options, loss_curves
from fp8scope_dashboard.pages.compare.delta_figure import DeltaCurve, delta_figure
from fp8scope_dashboard.pages.compare.runs import MOST_CHOSEN, Chosen, chosen_runs, suggested_runs
from fp8scope_dashboard.pages.configuration_differences import differences_of
from fp8scope_dashboard.pages.formatting import count as count_text
from fp8scope_dashboard.pages.formatting import difference, number
from fp8scope_dashboard.pages.progress import progress_context
from fp8scope_dashboard.pages.run.quantities import cost_line
from fp8scope_dashboard.pages.run.summary import HOW_TO_SET_BASELINE, Verdict, baseline_groups, verdict_of
from fp8scope_dashboard.pages.tensors.difference_map import difference_figure
from fp8scope_dashboard.pages.tensors.differences import (
    common_statistics,
    difference_map,
    most_different_statistic,
)
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.runs.search import MAX_LENGTH, read, search, vocabulary_of
from fp8scope_dashboard.text.numbers import count

# Runs that the chooser offers; a search finds others.
MOST_OFFERED: Final = 40
# Beyond this many runs, lines are thin and not smoothed, and each has fewer points.
FEW_RUNS: Final = 12
# Points of all lines together.
MOST_POINTS: Final = 24_000
LEAST_POINTS: Final = 100
# With more verdicts, each takes a line of a table.
MOST_CARDS: Final = 6
MOST_DELTAS: Final = 24
# Own differences of more runs of a group are folded.
MAX_OWN: Final = 15
# Runs that can be chosen for the map of tensors.
MOST_PAIRS: Final = 60


@dataclass(frozen=True)
class Offer:
    """The runs of one arm, each with a check box."""

    arm: Arm
    runs: list[Run]


@dataclass(frozen=True)
class Card:
    """The verdict on one selected run; `costs` is its speed, memory and tokens in one line.

    `seeds` are the cards of all chosen runs of its group, if there are several.
    """

    run: Run
    arm: Arm
    verdict: Verdict
    result: dict[str, Any]
    costs: str
    seeds: list[Card] = field(default_factory=list)

    @property
    def own_range(self) -> str:
        """A line that stands for the own differences of many runs; empty if they are few."""
        own = [card.verdict.own for card in self.seeds if card.verdict.own is not None]
        if len(self.seeds) <= MAX_OWN or not own:
            return ""
        low, high = (difference(end, self.verdict.unit, signed=True) for end in (min(own), max(own)))
        return f"{count(len(self.seeds), 'run')}: own differences from {low} to {high}"

    @property
    def shows_costs(self) -> bool:
        """Whether speed, memory and tokens have a line: the headline has them too, but not the memory."""
        quantities = self.result.get("quantities") or {}
        has_memory = (quantities.get("memory") or {}).get("ratio") is not None
        return has_memory or bool(self.costs and not quantities.get("headline"))

    @property
    def is_group(self) -> bool:
        """Whether the verdict is that of a group of several runs."""
        return bool(self.seeds) or self.verdict.is_of_group


@in_project()
def compare(request: HttpRequest, project: Project) -> HttpResponse:
    """Selected runs: losses, deltas, verdicts, and what differs in their tensors and configurations."""
    chosen = _chosen(project, request.GET)
    arms = ComparedArms(Arms(project), chosen.runs)
    baselines = baseline_groups(project.pk)
    cards = [
        Card(run, arms.of(run), verdict_of(run, baselines), result, cost_line(result.get("quantities") or {}))
        for run in chosen.runs
        if run.baseline
        for result in [_result(run)]
    ]
    folded = _folded(cards)
    tensors = _with_tensors(chosen.runs)
    pair = _pair(tensors, request.GET)
    context = {
        "chosen": chosen,
        "cards": folded,
        "as_table": len(folded) > MOST_CARDS,
        "query": chosen.query.urlencode(),
        "listed_query": replace(chosen, search="").query.urlencode(),
        "most_chosen": MOST_CHOSEN,
        "is_many": len(chosen.runs) > FEW_RUNS,
        "delta_unit": "nats" if _in_nats([card.result for card in cards]) else "relative",
        "deltas_left_out": max(0, len([card for card in folded if card.result.get("curve")]) - MOST_DELTAS),
        **_entries(chosen, everything=False),
        "tensor_runs": tensors,
        "pair": pair,
        "statistics": common_statistics(*pair) if pair else [],
        **progress_context(run.id for run in chosen.runs),
    }
    if request.headers.get("HX-Target") == "compared":
        return page(request, project, "compare", "pages/compare/_compared.html", context)
    choices = _choices(project, chosen, arms, request.GET.get("find", ""))
    return page(request, project, "compare", "pages/compare/compare.html", {**context, **choices})


def _folded(cards: list[Card]) -> list[Card]:
    """One card for each seed group and baseline, with all of its chosen runs as `seeds`; the largest own
    difference first.

    The verdict is that of the run which was compared furthest: those of the others are of the same group.
    """
    groups: dict[tuple[str, str], list[Card]] = {}
    for card in cards:
        groups.setdefault((card.run.group or str(card.run.pk), card.run.baseline), []).append(card)
    folded = []
    for members in groups.values():
        furthest = max(members, key=lambda card: card.result.get("window") or [0.0, 0.0])
        listed = sorted(members, key=_own_size, reverse=True) if len(members) > 1 else []
        folded.append(replace(furthest, seeds=listed))
    return folded


def _own_size(card: Card) -> float:
    """What runs of a group are ordered by: those without a finite loss first."""
    if card.verdict.own is None:
        return math.inf if card.verdict.has_left else -math.inf
    return abs(card.verdict.own)


@in_project()
def compare_find(request: HttpRequest, project: Project) -> HttpResponse:
    """The runs that a search in the chooser finds, beside the chosen ones."""
    chosen = chosen_runs(project, request.GET)
    context = _choices(project, chosen, Arms(project), request.GET.get("find", ""))
    return page(request, project, "compare", "pages/reports/_choices.html", {**context, "chosen": chosen})


@in_project()
def compare_configuration(request: HttpRequest, project: Project) -> HttpResponse:
    """The table of configurations; with `everything=1` also entries in which the runs agree."""
    chosen = _chosen(project, request.GET)
    context = {
        "chosen": chosen,
        "query": chosen.query.urlencode(),
        **_entries(chosen, everything=request.GET.get("everything") == "1"),
    }
    whole = request.headers.get("HX-Target") != "configuration"
    template = "pages/compare/configuration.html" if whole else "pages/compare/_configuration.html"
    return page(request, project, "compare", template, context)


def _entries(chosen: Chosen, *, everything: bool) -> dict[str, Any]:
    """The table of configurations, and the query of that with all entries or with those that differ."""
    other = chosen.query
    if not everything:
        other["everything"] = "1"
    return {
        "differences": differences_of(chosen.runs, everything=everything),
        "other_entries": other.urlencode(),
    }


def _choices(project: Project, chosen: Chosen, arms: ArmReader, text: str) -> dict[str, Any]:
    """The chosen runs, and those that a search finds; without a search the newest."""
    query = read(text, vocabulary_of(project))
    ids = {run.id for run in chosen.runs}
    runs = search(Run.objects.filter(project=project), query)
    newest = runs.only("id", "name", "group", "precision", "seed", "state", "created_at", "project_id")
    offered = list(newest.order_by("-created_at", "id")[: MOST_OFFERED + len(ids)])
    others = [run for run in offered if run.id not in ids][:MOST_OFFERED]
    return {
        "find": query.text,
        "find_problems": query.problems,
        "longest_search": MAX_LENGTH,
        "found": runs.count(),
        "chosen_offers": _offers(chosen.runs, arms),
        "offers": _offers(others, arms),
        "has_runs": bool(offered) or bool(query.text) or bool(chosen.runs),
    }


@gzip_page
@in_project()
def compare_figure(request: HttpRequest, project: Project, name: str) -> HttpResponse:
    """`loss` or `delta` of the runs in the address, or the map of the `tensors` of two of them."""
    options = Options.of(request.GET)
    runs = chosen_runs(project, request.GET, compared=name == "delta").runs
    if name == "tensors":
        return _tensors(runs, request.GET, options)
    return _loss(project, runs, options) if name == "loss" else _delta(project, runs, options)


def _loss(project: Project, runs: Sequence[Run], options: Options) -> HttpResponse:
    quiet = [run.id for run in runs if run.precision == "bf16"] if len(runs) > 1 else []
    points = None
    if len(runs) > FEW_RUNS:
        quiet, options = [run.id for run in runs], replace(options, smooth=False)
        points = max(LEAST_POINTS, MOST_POINTS // len(runs))
    arms = ComparedArms(Arms(project), runs)
    curves = loss_curves(runs, arms, options, quiet=quiet, points=points)
    if not curves:
        return empty_answer("Select runs to compare their losses.")
    drawn = curves_figure(
        curves,
        options.theme,
        y_range=None if options.zoomed else loss_range([curve.y for curve in curves]),
        log=options.log,
        compact=options.compact,
        height=400,
        x_title=AXIS_TITLES[options.axis],
        y_title="loss",
    )
    listed = ", ".join(curve.name for curve in curves[:FEW_RUNS])
    more = f" and {len(curves) - FEW_RUNS} more" if len(curves) > FEW_RUNS else ""
    return figure_answer(drawn, f"Losses of {listed}{more}.")


def _delta(project: Project, runs: Sequence[Run], options: Options) -> HttpResponse:
    arms = ComparedArms(Arms(project), runs)
    curves, margins = [], [project.margin]
    results = [(run, result) for run in runs if (result := _result(run)).get("curve", {}).get("x")]
    nats = _in_nats([result for _, result in results])
    results = [(run, result) for run, result in results if (result.get("unit") == "nats") == nats]
    # Nor have steps and tokens: those of most runs are drawn.
    axes = Counter(str(result["curve"].get("x_name", "steps")) for _, result in results)
    x_name = axes.most_common(1)[0][0] if axes else "steps"
    others = axes.total() - axes[x_name]
    results = [(run, result) for run, result in results if result["curve"].get("x_name", "steps") == x_name]
    for run, result in _one_of_each_group(results)[-MOST_DELTAS:]:
        curve = result["curve"]
        margins.append(float(result.get("margin") or project.margin))
        drawn_as = _delta_curve(run, arms, result, curve)
        runs_of_group = len((result.get("group") or {}).get("runs", ()))
        curves.append(replace(drawn_as, name=arms.of(run).label) if runs_of_group > 1 else drawn_as)
    if not curves:
        return empty_answer(f"The delta needs an FP8 run with a baseline: {HOW_TO_SET_BASELINE}.")
    title = f"{x_name} ({count(others, 'run')} without {x_name}: not shown)" if others else x_name
    drawn = delta_figure(
        curves, margins[-1], options.theme, compact=options.compact, x_title=title, nats=nats
    )
    unit = "nats" if nats else "relative"
    last = "; ".join(f"{curve.name} {difference(curve.delta[-1], unit, signed=True)}" for curve in curves)
    return figure_answer(drawn, f"Difference to BF16 at the end: {last}.")


def _one_of_each_group(results: Sequence[tuple[Run, dict[str, Any]]]) -> list[tuple[Run, dict[str, Any]]]:
    """The result of the furthest run of each seed group: the curve is that of the group."""
    furthest: dict[tuple[str, str], tuple[Run, dict[str, Any]]] = {}
    for run, result in results:
        key = (run.group or str(run.pk), run.baseline)
        before = furthest.get(key)
        if before is None or result["curve"]["x"][-1] > before[1]["curve"]["x"][-1]:
            furthest[key] = (run, result)
    return list(furthest.values())


def _in_nats(results: Sequence[dict[str, Any]]) -> bool:
    """Whether differences are drawn as numbers: they and those in per cent have no common axis.

    Numbers, for losses near 0, are drawn if there is nothing else.
    """
    drawn = [result for result in results if result.get("curve", {}).get("x")]
    return bool(drawn) and all(result.get("unit") == "nats" for result in drawn)


def _delta_curve(run: Run, arms: ArmReader, result: dict[str, Any], curve: dict[str, Any]) -> DeltaCurve:
    x, delta, low, high = (np.asarray(curve[key], np.float64) for key in ("x", "delta", "low", "high"))
    window = result.get("window")
    return DeltaCurve(
        run.name,
        arms.of(run).slot,
        x,
        delta,
        low,
        high,
        tolerance=result.get("tolerance"),
        window=(window[0], window[1]) if window else None,
    )


def _tensors(runs: Sequence[Run], query: QueryDict, options: Options) -> HttpResponse:
    pair = _pair(_with_tensors(runs), query)
    if pair is None:
        return empty_answer(
            "The map needs two runs with statistics of tensors: FP8 runs, or BF16 runs in shadow mode."
        )
    a, b = pair
    known = common_statistics(a, b)
    if not known:
        return empty_answer(f"{a.name} and {b.name} have no statistic in common.")
    statistic = query.get("statistic", "")
    if statistic not in known:
        statistic = most_different_statistic(a, b, known, first=options.first, last=options.last)
    compared = difference_map(a, b, statistic, first=options.first, last=options.last)
    if compared is None:
        return empty_answer(f"{a.name} and {b.name} have no tensor and step in common with this statistic.")
    if not compared.names:
        return empty_answer(f"{count_text(compared.compared)} tensors are equal in both runs.")
    drawn = difference_figure(
        compared.names,
        compared.step_edges,
        compared.values,
        statistic,
        options.theme,
        is_rate=compared.is_rate,
        runs=(a.name, b.name),
        compact=options.compact,
    )
    row = compared.values[0]
    column = int(np.nanargmax(np.abs(row)))
    size = f"{number(row[column])}" if compared.is_rate else f"a factor of 2^{number(row[column], 3)}"
    more = compared.different - len(compared.names)
    summary = (
        f"{b.name} against {a.name}: {compared.names[0]} differs most, by {size} near step "
        f"{count_text(int(compared.step_edges[column]))}. {count_text(compared.different)} of "
        f"{count_text(compared.compared)} tensors differ in {glossary.title(statistic)}"
        + (f"; the {len(compared.names)} that differ most are shown." if more else ".")
    )
    return figure_answer(drawn, summary)


def _with_tensors(runs: Sequence[Run]) -> list[Run]:
    """The runs that have statistics of tensors, the newest MOST_PAIRS."""
    return [run for run in runs if run.statistics][-MOST_PAIRS:]


def _pair(runs: Sequence[Run], query: QueryDict) -> tuple[Run, Run] | None:
    """The runs `a` and `b` of the address; by default the newest run and another of its precision."""
    if len(runs) < 2:
        return None
    known = {str(run.id): run for run in runs}
    b = known.get(query.get("b", ""), runs[-1])
    others = sorted((run for run in runs if run != b), key=lambda run: run.precision != b.precision)
    a = known.get(query.get("a", ""), others[0])
    return (others[0], b) if a == b else (a, b)


def _chosen(project: Project, query: QueryDict) -> Chosen:
    """The runs in the address; without any, a suggestion."""
    chosen = chosen_runs(project, query)
    return chosen if chosen.runs or chosen.search else suggested_runs(project)


def _offers(runs: Sequence[Run], arms: ArmReader) -> list[Offer]:
    offers: dict[str, Offer] = {}
    for run in runs:
        arm = arms.of(run)
        key = arm.label if arm.group else "Ungrouped"
        offers.setdefault(key, Offer(arm if arm.group else Arm("Ungrouped", "other", ""), [])).runs.append(
            run
        )
    return list(offers.values())


def _result(run: Run) -> dict[str, Any]:
    comparison = getattr(run, "comparison", None)
    return dict(comparison.result) if comparison is not None else {}
