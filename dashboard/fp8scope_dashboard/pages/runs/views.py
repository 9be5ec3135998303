"""The list of a project's runs: search, order, groups, columns and suggestions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

import numpy as np
from django.core.paginator import Page
from django.db.models import Count, Q
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils.cache import patch_cache_control

from fp8scope_dashboard.accounts.addresses import server_address
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts.models import Event, EventState
from fp8scope_dashboard.analysis.judging import standing_now
from fp8scope_dashboard.pages.access import in_project, page, person, run_of
from fp8scope_dashboard.pages.badges import STATES, Badge, state_badge
from fp8scope_dashboard.pages.charts.arms import Arm, Arms
from fp8scope_dashboard.pages.charts.sparkline import COLOURS, WIDTH, sparkline
from fp8scope_dashboard.pages.compare.runs import MOST_CHOSEN
from fp8scope_dashboard.pages.run.summary import Verdict, baseline_groups, verdict_of
from fp8scope_dashboard.pages.runs.columns import BUILT_IN, DEFAULT, Cell, Column, cell_of
from fp8scope_dashboard.pages.runs.groups import Group, groups_page
from fp8scope_dashboard.pages.runs.listing import GROUPS, Listing, ListState, entries_of, group_label
from fp8scope_dashboard.pages.runs.saved_views import views_of
from fp8scope_dashboard.pages.runs.suggestions import suggestions
from fp8scope_dashboard.runs import bulk
from fp8scope_dashboard.runs.models import DeletedRun, Run
from fp8scope_dashboard.runs.search import MAX_LENGTH, vocabulary_of
from fp8scope_dashboard.telemetry import queries


class Row:
    """One row of the list."""

    def __init__(
        self, run: Run, arm: Arm, baselines: set[str], open_events: int, columns: Iterable[Column]
    ) -> None:
        self.run = run
        self.arm = arm
        self.state: Badge = state_badge(standing_now(run))
        self.verdict: Verdict = verdict_of(run, baselines)
        self.open_events = open_events
        shown = list(columns)
        extra = entries_of(run, shown)
        self.cells: list[Cell] = [cell_of(column, run, extra) for column in shown]
        self.shows_difference = any(column.key == "difference" for column in shown)

    @property
    def progress(self) -> float | None:
        if not self.run.total_steps or self.run.last_step is None:
            return None
        return min(100.0, 100.0 * self.run.last_step / self.run.total_steps)

    @property
    def duration(self) -> float:
        end = self.run.finished_at or self.run.heartbeat_at
        return (end - self.run.created_at).total_seconds()


class Rows:
    """Makes rows; what all of them need is read once."""

    def __init__(self, project: Project, runs: Iterable[Run], columns: list[Column]) -> None:
        self._runs = list(runs)
        self._columns = columns
        self._arms = Arms(project)
        self._baselines = baseline_groups(project.pk)
        self._opened = _open_events(self._runs)

    def of(self, runs: Iterable[Run]) -> list[Row]:
        """The rows of some of the runs."""
        return [
            Row(run, self._arms.of(run), self._baselines, self._opened.get(run.id, 0), self._columns)
            for run in runs
        ]


@in_project()
def project(request: HttpRequest, project: Project) -> HttpResponse:
    """The runs of an address. A project without runs shows how to send the first."""
    state = ListState.of(request.GET)
    listing = Listing(project, state)
    everything = Run.objects.filter(project=project).aggregate(
        total=Count("pk"), archived=Count("pk", filter=Q(archived_at__isnull=False))
    )
    context: dict[str, Any] = {
        "state": state,
        **everything,
        "search": state.search[:MAX_LENGTH],
        "longest_search": MAX_LENGTH,
        "problems": listing.query.problems,
        "columns": [
            (column, state.sorted_by(column.key), state.direction(column.key)) for column in state.shown
        ],
        "name_order": (state.sorted_by("name"), state.direction("name")),
        "group_label": group_label(state.by) if state.by else "",
        "states": STATES,
        "server_url": server_address(request),
        "undoable": bulk.undoable(project, person(request)),
        **(_grouped(listing) if state.by else _listed(listing)),
    }
    if request.headers.get("HX-Target") == "runs":
        return page(request, project, "runs", "pages/runs/_runs.html", {**context, **_choices(listing)})
    own = {"views": views_of(project, person(request)), "state_query": state.query()}
    return page(request, project, "runs", "pages/runs/runs.html", {**context, **_choices(listing), **own})


def _listed(listing: Listing) -> dict[str, Any]:
    shown = listing.page()
    rows = Rows(listing.project, shown, listing.state.shown).of(shown)
    return {"rows": rows, **_paging(listing, shown)}


def _grouped(listing: Listing) -> dict[str, Any]:
    groups, shown = groups_page(listing)
    members = [run for group in groups for run in group.members or ()]
    rows = Rows(listing.project, members, listing.state.shown)
    entries: list[tuple[Group, list[Row]]] = [(group, rows.of(group.members or ())) for group in groups]
    keys = ("name", "count", "loss", "created")
    orders = {key: (listing.state.sorted_by(key), listing.state.direction(key)) for key in keys}
    return {"groups": entries, "orders": orders, **_paging(listing, shown)}


def _paging(listing: Listing, shown: Page[Any]) -> dict[str, Any]:
    state, matching = listing.state, listing.matching
    return {
        "pages": shown,
        "newer": state.address(page=str(shown.previous_page_number())) if shown.has_previous() else "",
        "older": state.address(page=str(shown.next_page_number())) if shown.has_next() else "",
        "matching": matching,
        "comparable": 1 < matching <= MOST_CHOSEN,
        "most_compared": MOST_CHOSEN,
    }


def _choices(listing: Listing) -> dict[str, Any]:
    """What the menus of the list offer."""
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
    """Suggestions for a search that is being typed, or for a column (`for=column`)."""
    text = request.GET.get("q", "").replace("\0", "")[:MAX_LENGTH]
    vocabulary = vocabulary_of(project)
    offered = suggestions(project, text, vocabulary, names_only=request.GET.get("for") == "column")
    return JsonResponse({"suggestions": offered})


def _open_events(runs: Iterable[Run]) -> Mapping[UUID, int]:
    events = Event.objects.filter(run__in=list(runs), state=EventState.OPEN).order_by()
    return dict(events.values_list("run_id").annotate(Count("id")))


@in_project(cacheable=True)
def spark(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """The run's loss as a small image. Its address contains the number of rows, so browsers may cache it.

    A deleted run has an empty image: pages that were open before still ask for it.
    """
    if _is_deleted(project, run_id):
        blank = HttpResponse(sparkline(np.empty(0), np.empty(0), "other"), content_type="image/svg+xml")
        patch_cache_control(blank, no_store=True)
        return blank
    shown = run_of(project, run_id)
    slot = request.GET.get("slot", "")
    # The list knows the colour already: finding it reads all groups of the project.
    colour = slot if slot in COLOURS else Arms(project).of(shown).slot
    series = queries.scalar(shown.id, "loss", points=WIDTH)
    image = sparkline(series.steps.astype(float), series.values, colour)
    answer = HttpResponse(image, content_type="image/svg+xml")
    patch_cache_control(answer, private=True, max_age=86_400, immutable=True)
    return answer


def _is_deleted(project: Project, run_id: UUID) -> bool:
    """Whether a run of the project was deleted: its data may be there still, for undoing it."""
    hidden = Run.with_deleted.filter(project=project, pk=run_id).exclude(deleted_at=None)
    return hidden.exists() or DeletedRun.objects.filter(project=project, run_id=run_id).exists()
