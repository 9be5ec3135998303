"""The chart of runs that are chosen in the list."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from django.http import QueryDict

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.pages.address_values import uuids_in
from fp8scope_dashboard.pages.charts.addresses import figure_view
from fp8scope_dashboard.pages.charts.answers import AnyChart, Chart, EmptyChart
from fp8scope_dashboard.pages.charts.run_colours import RunArms
from fp8scope_dashboard.pages.charts.run_marks import marks_of_runs
from fp8scope_dashboard.pages.charts.series import Options, loss_figure, scalar_curves
from fp8scope_dashboard.runs.models import Run

MAX_CURVES: Final = 30
# Beyond this number, lines are not smoothed: a faint line for each run would hide the others.
MAX_SMOOTHED: Final = 12
NAME_LENGTH: Final = 200
NAMED_IN_SUMMARY: Final = 3


@figure_view
def runs_figure(project: Project, query: QueryDict) -> AnyChart:
    """The curves of a metric of the runs of the query."""
    ids = uuids_in(query.get("runs", "").split(","), MAX_CURVES)
    metric = query.get("metric", "").strip().removeprefix("scalar.")[:NAME_LENGTH] or "loss"
    chosen = Run.objects.filter(project=project, pk__in=ids)
    runs = list(chosen.select_related("project").order_by("created_at", "id"))
    if not runs:
        return EmptyChart("No run is chosen: the eye beside a run shows its curve.")
    options = Options.of(query)
    arms = RunArms(runs)
    points = options.points if len(runs) > MAX_SMOOTHED or not options.smooth else None
    curves = scalar_curves(runs, metric, arms, options, points=points)
    if not curves:
        return EmptyChart(f"None of the chosen runs has logged “{metric}”.")
    marks = marks_of_runs(runs, curves, options)
    drawn = loss_figure(curves, options, y_title=metric, height=320, marks=marks)
    return Chart(drawn, f"{metric} of {_names(curve.name for curve in curves)}.")


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - NAMED_IN_SUMMARY
    return ", ".join(listed[:NAMED_IN_SUMMARY]) + (f" and {more} more" if more > 0 else "")
