"""Compare runs side by side. The address contains the selected runs, so a link shows the same page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from django.http import HttpRequest, HttpResponse, QueryDict

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.media.queries import runs_with_media
from fp8scope_dashboard.pages.access import in_project, page
from fp8scope_dashboard.pages.charts.addresses import figure_view
from fp8scope_dashboard.pages.charts.arms import Arm, ArmReader, Arms, ComparedArms
from fp8scope_dashboard.pages.compare.figures import MAX_DELTAS, in_nats
from fp8scope_dashboard.pages.compare.figures import compare_figure as drawn_figure
from fp8scope_dashboard.pages.compare.memory import MemoryAccount, accounts_of
from fp8scope_dashboard.pages.compare.runs import (
    FEW_RUNS,
    MAX_CHOSEN,
    ComparedRuns,
    chosen_runs,
    result_of,
    runs_with_tensors,
    suggested_runs,
    tensor_pair,
)
from fp8scope_dashboard.pages.configuration_differences import differences_of
from fp8scope_dashboard.pages.formatting import difference
from fp8scope_dashboard.pages.progress import progress_context
from fp8scope_dashboard.pages.run.quantities import cost_line
from fp8scope_dashboard.pages.run.summary import ShownVerdict, baseline_groups, verdict_of
from fp8scope_dashboard.pages.tensors.differences import (
    common_statistics,
)
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.runs.search import MAX_LENGTH, read, search, vocabulary_of
from fp8scope_dashboard.text.numbers import count

# Runs that the chooser offers; a search finds others.
MAX_OFFERED: Final = 40
# With more verdicts, each takes a line of a table.
MAX_CARDS: Final = 6
# Own differences of more runs of a group are folded.
MAX_OWN: Final = 15


@dataclass(frozen=True)
class Offer:
    """The runs of one arm, each with a check box."""

    arm: Arm
    runs: list[Run]


@dataclass(frozen=True, kw_only=True)
class Card:
    """The verdict on one selected run; `costs` is its speed, memory and tokens in one line.

    `seeds` are the cards of all chosen runs of its group, if the verdict is on a group. `memory` is None if
    one of the sides has not sent what its memory is for.
    """

    run: Run
    arm: Arm
    verdict: ShownVerdict
    result: dict[str, Any]
    costs: str
    seeds: list[Card] = field(default_factory=list)
    memory: MemoryAccount | None = None

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
        """Return whether speed, memory and tokens have a line: the headline has them too, if there is one."""
        quantities = self.result.get("quantities") or {}
        return bool(self.costs and not quantities.get("headline"))

    @property
    def is_group(self) -> bool:
        """Return whether the verdict is that of a group of several runs."""
        return bool(self.seeds) or self.verdict.is_of_group


@in_project()
def compare(request: HttpRequest, project: Project) -> HttpResponse:
    """Selected runs: losses, deltas, verdicts, and what differs in their tensors and configurations."""
    chosen = _chosen(project, request.GET)
    arms = ComparedArms(Arms(project), chosen.runs)
    baselines = baseline_groups(project.pk)
    cards = [
        Card(
            run=run,
            arm=arms.of(run),
            verdict=verdict_of(run, baselines),
            result=result,
            costs=cost_line(result.get("quantities") or {}),
        )
        for run in chosen.runs
        if run.baseline
        for result in [result_of(run)]
    ]
    folded = _folded(cards)
    if len(folded) <= MAX_CARDS:
        accounts = accounts_of(project, [card.run for card in folded])
        folded = [replace(card, memory=accounts.get(card.run.pk)) for card in folded]
    tensors = runs_with_tensors(chosen.runs)
    pair = tensor_pair(tensors, request.GET)
    context = {
        "chosen": chosen,
        "cards": folded,
        "as_table": len(folded) > MAX_CARDS,
        "query": chosen.query.urlencode(),
        "listed_query": replace(chosen, search="").query.urlencode(),
        "most_chosen": MAX_CHOSEN,
        "is_many": len(chosen.runs) > FEW_RUNS,
        "delta_unit": "nats" if in_nats([card.result for card in cards]) else "relative",
        "deltas_left_out": max(0, len([card for card in folded if card.result.get("curve")]) - MAX_DELTAS),
        **_entries(chosen, everything=False),
        "tensor_runs": tensors,
        "pair": pair,
        "statistics": common_statistics(*pair) if pair else [],
        "has_media": bool(runs_with_media(chosen.runs)),
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
        is_group = len(members) > 1 or members[0].verdict.is_of_group
        listed = sorted(members, key=_own_size, reverse=True) if is_group else []
        folded.append(replace(furthest, seeds=listed))
    return folded


def _own_size(card: Card) -> float:
    """Return what runs of a group are ordered by: those without a finite loss first."""
    if card.verdict.own is None:
        return math.inf if card.verdict.has_left else -math.inf
    return abs(card.verdict.own)


@in_project()
def compare_find(request: HttpRequest, project: Project) -> HttpResponse:
    """The runs that a search in the chooser finds, beside the chosen ones."""
    chosen = chosen_runs(project, request.GET)
    context = _choices(project, chosen, Arms(project), request.GET.get("find", ""))
    return page(request, project, "compare", "pages/reports/_run_offers.html", {**context, "chosen": chosen})


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


def _entries(chosen: ComparedRuns, *, everything: bool) -> dict[str, Any]:
    """The table of configurations, and the query of that with all entries or with those that differ."""
    other = chosen.query
    if not everything:
        other["everything"] = "1"
    return {
        "differences": differences_of(chosen.runs, everything=everything),
        "other_entries": other.urlencode(),
    }


def _choices(project: Project, chosen: ComparedRuns, arms: ArmReader, text: str) -> dict[str, Any]:
    """The chosen runs, and those that a search finds; without a search the newest."""
    query = read(text, vocabulary_of(project))
    ids = {run.id for run in chosen.runs}
    runs = search(Run.objects.filter(project=project), query)
    newest = runs.only("id", "name", "group", "precision", "seed", "state", "created_at", "project_id")
    offered = list(newest.order_by("-created_at", "id")[: MAX_OFFERED + len(ids)])
    others = [run for run in offered if run.id not in ids][:MAX_OFFERED]
    return {
        "find": query.text,
        "find_problems": query.problems,
        "longest_search": MAX_LENGTH,
        "found": runs.count(),
        "chosen_offers": _offers(chosen.runs, arms),
        "offers": _offers(others, arms),
        "has_runs": bool(offered) or bool(query.text) or bool(chosen.runs),
    }


compare_figure = figure_view(drawn_figure)


def _chosen(project: Project, query: QueryDict) -> ComparedRuns:
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
