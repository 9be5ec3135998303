"""The chart of runs that are chosen in the list."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from django.http import HttpRequest, HttpResponse

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.pages.access import in_project
from fp8scope_dashboard.pages.address_values import uuids_in
from fp8scope_dashboard.pages.charts.answers import empty_answer, figure_answer
from fp8scope_dashboard.pages.charts.curves import curves_figure
from fp8scope_dashboard.pages.charts.ranges import loss_range
from fp8scope_dashboard.pages.charts.run_colours import RunArms
from fp8scope_dashboard.pages.charts.series import AXIS_TITLES, Options, scalar_curves
from fp8scope_dashboard.runs.models import Run

MOST_CURVES: Final = 30
# Beyond this number, lines are not smoothed: a faint line for each run would hide the others.
MOST_SMOOTHED: Final = 12
NAME_LENGTH: Final = 200
NAMED_IN_SUMMARY: Final = 3


@in_project()
def runs_figure(request: HttpRequest, project: Project) -> HttpResponse:
    """The curves of a metric of the runs of the address."""
    ids = uuids_in(request.GET.get("runs", "").split(","), MOST_CURVES)
    metric = request.GET.get("metric", "").strip().removeprefix("scalar.")[:NAME_LENGTH] or "loss"
    runs = list(Run.objects.filter(project=project, pk__in=ids).order_by("created_at", "id"))
    if not runs:
        return empty_answer("No run is chosen: the eye beside a run shows its curve.")
    options = Options.of(request.GET)
    arms = RunArms(runs)
    points = options.points if len(runs) > MOST_SMOOTHED or not options.smooth else None
    curves = scalar_curves(runs, metric, arms, options, points=points)
    if not curves:
        return empty_answer(f"None of the chosen runs has logged “{metric}”.")
    drawn = curves_figure(
        curves,
        options.theme,
        y_range=None if options.zoomed else loss_range([curve.y for curve in curves]),
        log=options.log,
        compact=options.compact,
        height=320,
        x_title=AXIS_TITLES[options.axis],
        y_title=metric,
    )
    return figure_answer(drawn, f"{metric} of {_names(curve.name for curve in curves)}.")


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - NAMED_IN_SUMMARY
    return ", ".join(listed[:NAMED_IN_SUMMARY]) + (f" and {more} more" if more > 0 else "")
