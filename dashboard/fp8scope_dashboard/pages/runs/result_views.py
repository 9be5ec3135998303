"""The charts of a search: settings of its runs against their results."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from django.http import HttpRequest, HttpResponse, QueryDict
from django.urls import reverse

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.pages.access import in_project, page
from fp8scope_dashboard.pages.charts.addresses import figure_view
from fp8scope_dashboard.pages.charts.answers import AnyChart, Chart, EmptyChart
from fp8scope_dashboard.pages.charts.run_colours import colour_slot
from fp8scope_dashboard.pages.charts.series import Options
from fp8scope_dashboard.pages.formatting import count
from fp8scope_dashboard.pages.runs.columns import RunColumn, column_named
from fp8scope_dashboard.pages.runs.listing import Listing, ListState
from fp8scope_dashboard.pages.runs.result_figures import parallel_figure, scatter_figure
from fp8scope_dashboard.pages.runs.result_values import (
    MAX_RUNS,
    RESULTS,
    SETTINGS,
    axis_of,
    differing_settings,
    plotted,
    read_runs,
)
from fp8scope_dashboard.runs.search import MAX_LENGTH

MAX_AXES: Final = 8
FIRST_AXES: Final = 5
MAX_SCALARS: Final = 60
MAX_SETTINGS: Final = 40
NO_RUN: Final = "No run of the search has both values. Choose another setting or result, or search more runs."


@in_project()
def run_charts(request: HttpRequest, project: Project) -> HttpResponse:
    """The page with the charts of a search."""
    state = ListState.of(request.GET)
    listing = Listing(project, state)
    matching = listing.matching
    settings = differing_settings(listing, MAX_SETTINGS)
    scalars = [f"scalar.{name}" for name in listing.vocabulary.scalars if name != "loss"][:MAX_SCALARS]
    context: dict[str, Any] = {
        "state": state,
        "search": state.search[:MAX_LENGTH],
        "longest_search": MAX_LENGTH,
        "problems": listing.query.problems,
        "matching": matching,
        "is_cut": matching > MAX_RUNS,
        "most_runs": MAX_RUNS,
        "results": _choices([*RESULTS, *scalars]),
        "settings": _choices([*settings, *SETTINGS]),
        "first_axes": ",".join(settings[:FIRST_AXES]),
        "axes": [
            (*choice, choice[0] in settings[:FIRST_AXES]) for choice in _choices([*settings, *SETTINGS])
        ],
        "list_address": f"{reverse('project', args=[project.slug])}{state.address(page='')}",
    }
    return page(request, project, "runs", "pages/runs/charts.html", context)


def _choices(keys: list[str]) -> list[tuple[str, str]]:
    """Keys with their titles."""
    return [(key, column.title) for key in keys if (column := column_named(key)) is not None]


@figure_view
def run_scatter(project: Project, query: QueryDict) -> AnyChart:
    """The results of the runs of a search over a setting."""
    setting, result = plotted(query.get("setting", "")), plotted(query.get("result", ""))
    if setting is None or result is None:
        return EmptyChart("Choose a setting and a result.")
    runs = read_runs(_listing(project, query), [setting, result])
    across, up = (axis_of(runs, [setting, result], column) for column in (setting, result))
    shown = int(np.count_nonzero(np.isfinite(across.positions) & np.isfinite(up.positions)))
    if not shown:
        return EmptyChart(NO_RUN)
    options = Options.of(query)
    facts = [(run.name, colour_slot(run), reverse("run", args=[project.slug, run.pk])) for run in runs]
    drawn = scatter_figure(across, up, facts, options.theme, compact=options.compact)
    return Chart(drawn, f"{up.title} over {across.title} of {count(shown)} of {count(len(runs))} runs.")


@figure_view
def run_parallel(project: Project, query: QueryDict) -> AnyChart:
    """The settings of the runs of a search as parallel axes, and a result as the last one."""
    result = plotted(query.get("result", ""))
    chosen = [plotted(key) for key in query.get("settings", "").split(",")[:MAX_AXES]]
    settings: list[RunColumn] = [column for column in chosen if column is not None]
    if result is None or not settings:
        return EmptyChart("Choose a result, and the settings to show.")
    columns = [*settings, result]
    runs = read_runs(_listing(project, query), columns)
    last = axis_of(runs, columns, result)
    if last.texts or not np.isfinite(last.positions).any():
        return EmptyChart(NO_RUN)
    axes = [axis_of(runs, columns, column) for column in settings]
    options = Options.of(query)
    drawn = parallel_figure(axes, last, [run.name for run in runs], options.theme, compact=options.compact)
    titles = ", ".join(axis.title for axis in axes)
    shown = int(np.count_nonzero(np.isfinite(last.positions)))
    return Chart(drawn, f"{titles} and {last.title} of {count(shown)} of {count(len(runs))} runs.")


def _listing(project: Project, query: QueryDict) -> Listing:
    return Listing(project, ListState(search=query.get("q", "").strip()))
