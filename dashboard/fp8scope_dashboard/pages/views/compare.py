"""Compare runs side by side. The address contains the selected runs, so a link shows the same page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import numpy as np
from django.db.models import Q
from django.http import HttpRequest, HttpResponse, QueryDict
from django.views.decorators.gzip import gzip_page

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis import lineage
from fp8scope_dashboard.analysis.models import Comparison
from fp8scope_dashboard.pages.access import in_project, page
from fp8scope_dashboard.pages.comparison_groups import Arm, Arms
from fp8scope_dashboard.pages.figures.comparisons import DeltaCurve, delta_figure
from fp8scope_dashboard.pages.figures.curves import curves_figure
from fp8scope_dashboard.pages.figures.ranges import loss_range
from fp8scope_dashboard.pages.formatting import difference
from fp8scope_dashboard.pages.series_loading import AXIS_TITLES, Options, loss_curves
from fp8scope_dashboard.pages.summary import HOW_TO_SET_BASELINE, Verdict, baseline_groups, verdict_of
from fp8scope_dashboard.pages.views.figure_answers import empty_answer, figure_answer
from fp8scope_dashboard.pages.views.progress import progress_context
from fp8scope_dashboard.runs.models import Run

# The most runs in one chart, and in the list of runs.
MOST_CHOSEN = 12
MOST_OFFERED = 200


@dataclass(frozen=True)
class Offer:
    """The runs of one arm, each with a check box."""

    arm: Arm
    runs: list[Run]


@dataclass(frozen=True)
class Card:
    """The verdict on one selected run."""

    run: Run
    arm: Arm
    verdict: Verdict
    result: dict[str, Any]


@in_project()
def compare(request: HttpRequest, project: Project) -> HttpResponse:
    """Selected runs: their losses and deltas in one chart each, and their verdicts."""
    arms = Arms(project)
    offered = list(Run.objects.filter(project=project).select_related("comparison")[:MOST_OFFERED])
    chosen = _chosen(project, request.GET) or _suggested(project)
    ids = {run.id for run in chosen}
    # A link may contain runs that are older than those of the list.
    offered_ids = {run.id for run in offered}
    offered += [run for run in chosen if run.id not in offered_ids]
    baselines = baseline_groups(project.pk)
    cards = [
        Card(run, arms.of(run), verdict_of(run, baselines), _result(run)) for run in chosen if run.baseline
    ]
    query = QueryDict(mutable=True)
    query.setlist("runs", [str(run.id) for run in chosen])
    context = {
        "offers": _offers(offered, arms),
        "chosen": chosen,
        "chosen_ids": ids,
        "cards": cards,
        "query": query.urlencode(),
        "most_chosen": MOST_CHOSEN,
        **progress_context(ids),
    }
    template = (
        "pages/_compared.html" if request.headers.get("HX-Target") == "compared" else "pages/compare.html"
    )
    return page(request, project, "compare", template, context)


@gzip_page
@in_project()
def compare_figure(request: HttpRequest, project: Project, name: str) -> HttpResponse:
    """`loss` or `delta` of the runs in the address."""
    options = Options.of(request.GET)
    runs = _chosen(project, request.GET)
    return _loss(project, runs, options) if name == "loss" else _delta(project, runs, options)


def _loss(project: Project, runs: Sequence[Run], options: Options) -> HttpResponse:
    quiet = [run.id for run in runs if run.precision == "bf16"] if len(runs) > 1 else []
    curves = loss_curves(runs, Arms(project), options, quiet=quiet)
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
    return figure_answer(drawn, f"Losses of {', '.join(curve.name for curve in curves)}.")


def _delta(project: Project, runs: Sequence[Run], options: Options) -> HttpResponse:
    arms = Arms(project)
    curves, margins, x_name = [], [project.margin], "steps"
    results = [(run, result) for run in runs if (result := _result(run)).get("curve", {}).get("x")]
    # Differences in per cent and in nats have no common axis: those in nats are drawn if there are no others.
    nats = bool(results) and all(result.get("unit") == "nats" for _, result in results)
    for run, result in results:
        if (result.get("unit") == "nats") != nats:
            continue
        curve = result["curve"]
        x_name = curve.get("x_name", x_name)
        margins.append(float(result.get("margin") or project.margin))
        curves.append(_delta_curve(run, arms, result, curve))
    if not curves:
        return empty_answer(f"The delta needs an FP8 run with a baseline: {HOW_TO_SET_BASELINE}.")
    drawn = delta_figure(
        curves, margins[-1], options.theme, compact=options.compact, x_title=x_name, nats=nats
    )
    unit = "nats" if nats else "relative"
    last = "; ".join(f"{curve.name} {difference(curve.delta[-1], unit, signed=True)}" for curve in curves)
    return figure_answer(drawn, f"Difference to BF16 at the end: {last}.")


def _delta_curve(run: Run, arms: Arms, result: dict[str, Any], curve: dict[str, Any]) -> DeltaCurve:
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


def _chosen(project: Project, query: QueryDict) -> list[Run]:
    """The runs in the address, oldest first; ids of other projects' runs are ignored."""
    ids = set()
    for text in query.getlist("runs")[: 4 * MOST_CHOSEN]:
        try:
            ids.add(UUID(text))
        except ValueError:
            continue
    runs = Run.objects.filter(project=project, pk__in=ids).select_related("comparison", "project")
    return list(runs.order_by("created_at", "id")[:MOST_CHOSEN])


def _suggested(project: Project) -> list[Run]:
    """The newest run with a verdict, the runs with the same baseline, and that baseline."""
    runs = Run.objects.filter(project=project).select_related("comparison", "project")
    newest = Comparison.objects.filter(run__project=project).order_by("-run__created_at").first()
    if newest is None:
        return list(reversed(runs.order_by("-created_at", "id")[:MOST_CHOSEN]))
    involved = lineage.arm_named([newest.baseline]) | Q(baseline=newest.baseline)
    latest = list(runs.filter(involved).order_by("-created_at", "id")[:MOST_CHOSEN])
    return sorted(latest, key=lambda run: (run.created_at, run.id))


def _offers(runs: Sequence[Run], arms: Arms) -> list[Offer]:
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
