"""The list of a project's runs: search, order, groups, columns and suggestions."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import numpy as np
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.utils.cache import patch_cache_control

from fp8scope_dashboard.accounts import permissions
from fp8scope_dashboard.accounts.addresses import server_address
from fp8scope_dashboard.accounts.models import Density, Project
from fp8scope_dashboard.pages.access import in_project, may, may_for, page, person
from fp8scope_dashboard.pages.charts.run_colours import NAMES, colour_slot
from fp8scope_dashboard.pages.charts.sparkline import COLOURS, WIDTH, sparkline
from fp8scope_dashboard.pages.compare.runs import MAX_CHOSEN
from fp8scope_dashboard.pages.runs.columns import BUILT_IN, DEFAULT
from fp8scope_dashboard.pages.runs.first_run import WAYS, arrival_of
from fp8scope_dashboard.pages.runs.groups import groups_page
from fp8scope_dashboard.pages.runs.listing import GROUPS, Listing, ListState, group_label
from fp8scope_dashboard.pages.runs.rows import RenderedRows
from fp8scope_dashboard.pages.runs.saved_views import menu_of
from fp8scope_dashboard.pages.runs.suggestions import metric_suggestions, suggestions
from fp8scope_dashboard.runs import bulk
from fp8scope_dashboard.runs.models import DeletedRun, Run
from fp8scope_dashboard.runs.search import MAX_LENGTH, vocabulary_of
from fp8scope_dashboard.telemetry import queries


@in_project()
def project(request: HttpRequest, project: Project) -> HttpResponse:
    """The runs of an address. A project without runs shows how to send the first."""
    state = ListState.of(request.GET)
    listing = Listing(project, state)
    may_change = may(request, project, permissions.DESCRIBE_RUNS)
    context: dict[str, Any] = {
        "state": state,
        "total": listing.total,
        "archived": listing.archived,
        "search": state.search[:MAX_LENGTH],
        "longest_search": MAX_LENGTH,
        "problems": listing.query.problems,
        "columns": [
            (column, state.sorted_by(column.key), state.direction(column.key)) for column in state.shown
        ],
        "name_order": (state.sorted_by("name"), state.direction("name")),
        "group_label": group_label(state.by) if state.by else "",
        "density": person(request).list_density or Density.COMPACT,
        "densities": Density.choices,
        "server_url": server_address(request),
        "ways": WAYS,
        "undoable": bulk.undoable(
            project,
            person(request),
            everybody=may_for(request, project, permissions.DELETE_RUNS, None),
        ),
        **(_grouped(listing, may_change) if state.by else _listed(listing, may_change)),
    }
    if request.headers.get("HX-Target") == "runs":
        return page(request, project, "runs", "pages/runs/_runs.html", {**context, **_choices(listing)})
    own = {
        "views": menu_of(project, person(request), state),
        "colours": enumerate(NAMES, 1),
    }
    return page(request, project, "runs", "pages/runs/runs.html", {**context, **_choices(listing), **own})


def _listed(listing: Listing, may_change: bool) -> dict[str, Any]:
    shown, state = listing.page(), listing.state
    rows = RenderedRows(listing.project, shown.runs, state.shown, may_change=may_change).of(shown.runs)
    newer = older = ""
    if shown.has_previous and shown.runs:
        # The first page needs no run beside it.
        before = str(shown.runs[0].pk) if shown.number > 2 else ""
        newer = state.address(page=str(shown.number - 1) if before else "", before=before)
    if shown.has_next and shown.runs:
        older = state.address(page=str(shown.number + 1), after=str(shown.runs[-1].pk))
    arrival = None if state.search else arrival_of(listing.total, shown.runs)
    return {
        "rows": rows,
        "arrival": arrival,
        "newer": newer,
        "older": older,
        **_paging(listing, shown.number, shown.count),
    }


def _grouped(listing: Listing, may_change: bool) -> dict[str, Any]:
    state = listing.state
    groups, shown = groups_page(listing)
    members = [run for group in groups for run in group.members or ()]
    rows = RenderedRows(listing.project, members, state.shown, may_change=may_change)
    keys = ("name", "count", "loss", "created")
    return {
        "groups": [(group, rows.of(group.members or ())) for group in groups],
        "orders": {key: (state.sorted_by(key), state.direction(key)) for key in keys},
        "newer": state.address(page=str(shown.previous_page_number())) if shown.has_previous() else "",
        "older": state.address(page=str(shown.next_page_number())) if shown.has_next() else "",
        **_paging(listing, shown.number, shown.paginator.num_pages),
    }


def _paging(listing: Listing, number: int, count: int) -> dict[str, Any]:
    matching = listing.matching
    return {
        "page_number": number,
        "page_count": count,
        "matching": matching,
        "comparable": 1 < matching <= MAX_CHOSEN,
        "most_compared": MAX_CHOSEN,
    }


def _choices(listing: Listing) -> dict[str, Any]:
    """Return what the menus of the list offer."""
    state = listing.state
    return {
        "facets": listing.facets(),
        "group_choices": [
            (key, label, state.address(by=key, open=(), sort="")) for key, label in GROUPS.items()
        ],
        "ungrouped": state.address(by="", open=(), sort="-created"),
        "chosen_keys": state.columns or DEFAULT,
        "built_in": [column for key, column in BUILT_IN.items() if key != "name"],
        "own_columns": [column for column in state.shown if column.source],
        "default_columns": state.address(columns=()),
    }


@in_project()
def suggest(request: HttpRequest, project: Project) -> JsonResponse:
    """Suggestions for a search that is being typed; `for` is "column" or "metric" for their fields."""
    text = request.GET.get("q", "").replace("\0", "")[:MAX_LENGTH]
    vocabulary = vocabulary_of(project)
    wanted = request.GET.get("for")
    if wanted == "metric":
        offered = metric_suggestions(text, vocabulary)
    else:
        offered = suggestions(project, text, vocabulary, names_only=wanted == "column")
    return JsonResponse({"suggestions": offered})


@in_project(cacheable=True)
def spark(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """The run's loss as a small image. Its address contains the number of rows, so browsers may cache it.

    A deleted run has an empty image: pages that were open before still ask for it.
    """
    # One query: between two of them the run may be deleted.
    shown = Run.with_deleted.filter(project=project, pk=run_id).first()
    if shown is None and not DeletedRun.objects.filter(project=project, run_id=run_id).exists():
        raise Http404("No such run.")
    if shown is None or shown.deleted_at is not None:
        blank = HttpResponse(sparkline(np.empty(0), np.empty(0), "other"), content_type="image/svg+xml")
        patch_cache_control(blank, no_store=True)
        return blank
    slot = request.GET.get("slot", "")
    colour = slot if slot in COLOURS else colour_slot(shown)
    series = queries.scalar(shown.id, "loss", points=WIDTH)
    image = sparkline(series.steps.astype(float), series.values, colour)
    answer = HttpResponse(image, content_type="image/svg+xml")
    patch_cache_control(answer, private=True, max_age=86_400, immutable=True)
    return answer
