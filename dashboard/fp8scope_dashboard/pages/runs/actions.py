"""Actions of people on selected runs: tag, archive, delete, compare, undo; and saved views."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlencode
from uuid import UUID

from django.contrib import messages
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect
from django.urls import reverse

from fp8scope_dashboard.accounts import permissions
from fp8scope_dashboard.accounts.models import Density, Project, User
from fp8scope_dashboard.audit.log import actor_of, record
from fp8scope_dashboard.audit.models import Action
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.pages.access import POST, back_to, in_project, may_for, person, require_own, run_of
from fp8scope_dashboard.pages.address_values import uuids_in, whole_number
from fp8scope_dashboard.pages.charts.run_colours import NAMES, colour_number
from fp8scope_dashboard.pages.compare.runs import MAX_CHOSEN
from fp8scope_dashboard.pages.formatting import count as count_text
from fp8scope_dashboard.pages.runs import saved_views
from fp8scope_dashboard.pages.runs.listing import Listing, ListState
from fp8scope_dashboard.pages.saved_views import ViewError, asks_to_share, said_of
from fp8scope_dashboard.pages.saved_views import delete as delete_view
from fp8scope_dashboard.pages.undo_offer import offer_undo
from fp8scope_dashboard.runs import bulk
from fp8scope_dashboard.runs.models import BulkAction, Run, SavedView

# Runs that a form may list one by one; more are chosen as all that match.
MAX_LISTED: Final = 500
DONE: Final = {
    "tag": "Tagged {runs} “{tag}”.",
    "untag": "Removed the tag “{tag}” from {runs}.",
    "archive": "Archived {runs}. The search archived:yes shows them.",
    "unarchive": "Unarchived {runs}.",
    "delete": "Deleted {runs}. For 10 minutes this can be undone; then the data is deleted.",
}


class SelectionError(ValueError):
    """The selection of a form cannot be used; the message says why."""


@in_project(permissions.DESCRIBE_RUNS, methods=POST)
def change(request: HttpRequest, project: Project) -> HttpResponse:
    """Tag, untag, archive, unarchive or delete the selected runs, and redirect back."""
    action, tag = request.POST.get("action", ""), request.POST.get("tag", "")
    if action not in DONE:
        messages.error(request, "Choose what to do with the runs.")
        return _back(request, project)
    try:
        runs = _selected(project, request.POST, exact=action == "delete")
        only_own = action == "delete" and not may_for(request, project, permissions.DELETE_RUNS, None)
        done = bulk.change(project, runs, BulkAction.Kind(action), person(request), tag, only_own=only_own)
    except (SelectionError, bulk.BulkError) as error:
        messages.error(request, str(error))
    else:
        if done is None:
            messages.warning(request, "Nothing was changed: the runs were in this state already.")
        else:
            said = DONE[action].format(runs=_runs(len(done.runs)), tag=done.tag).partition(". ")[0]
            record(actor_of(request), project, Action.RUNS_CHANGED, said.rstrip("."), bulk=str(done.pk))
            messages.success(request, DONE[action].format(runs=_runs(len(done.runs)), tag=done.tag))
    return _back(request, project)


@in_project(permissions.UNDO_RUNS, methods=POST)
def undo(request: HttpRequest, project: Project, action_id: UUID) -> HttpResponse:
    """Undo a change, and redirect back."""
    action = BulkAction.objects.filter(project=project, pk=action_id).first()
    if action is None:
        raise Http404("No such change.")
    require_own(request, project, permissions.UNDO_RUNS, action.done_by_id)
    only_own = not may_for(request, project, permissions.DELETE_RUNS, None)
    try:
        restored = bulk.undo(action, person(request), only_own=only_own)
    except bulk.BulkError as error:
        messages.error(request, str(error))
    else:
        record(actor_of(request), project, Action.UNDONE, f"{action.kind}, for {_runs(restored)}")
        messages.success(request, f"Undone for {_runs(restored)}.")
    return _back(request, project)


@in_project(methods=POST)
def compare_selected(request: HttpRequest, project: Project) -> HttpResponse:
    """Redirect to the comparison of the selected runs."""
    try:
        runs = _selected(project, request.POST)
    except SelectionError as error:
        messages.error(request, str(error))
        return _back(request, project)
    if request.POST.get("all") == "1":
        fields: list[tuple[str, str]] = [("q", request.POST.get("q", ""))]
    else:
        ids = runs.order_by("created_at", "id").values_list("pk", flat=True)
        fields = [("runs", str(pk)) for pk in ids[: MAX_CHOSEN + 1]]
    if len(fields) > MAX_CHOSEN:
        fields = fields[:MAX_CHOSEN]
        messages.warning(request, f"Only the first {MAX_CHOSEN} runs are compared.")
    return redirect(f"{reverse('compare', args=[project.slug])}?{urlencode(fields)}")


@in_project(methods=POST)
def list_density(request: HttpRequest, project: Project) -> HttpResponse:
    """Remember the height of rows for the user."""
    density = request.POST.get("density", "")
    if density in Density.values:
        User.objects.filter(pk=person(request).pk).update(list_density=density)
    return _back(request, project)


@in_project(permissions.DESCRIBE_RUNS, methods=POST)
def run_colour(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """Choose the colour of a run by its number; without one, the run has that of its id again."""
    run = run_of(project, run_id)
    number = whole_number(request.POST.get("colour", ""), 2)
    run.colour = number if number is not None and 1 <= number <= len(NAMES) else None
    run.save(update_fields=["colour"])
    name = NAMES[colour_number(run) - 1].lower()
    record(actor_of(request), project, Action.RUNS_CHANGED, f"colour of {run.name}: {name}")
    run_changed(run.pk, project.pk, "state")
    return _back(request, project)


@in_project(methods=POST)
def view_save(request: HttpRequest, project: Project) -> HttpResponse:
    """Save the list's address under a name. Only members can share it."""
    shared = asks_to_share(request, project)
    query = request.POST.get("query", "")
    try:
        view = saved_views.save(project, person(request), request.POST.get("name", ""), query, shared=shared)
    except ViewError as error:
        messages.error(request, str(error))
    else:
        messages.success(request, said_of(view))
        query = view.query
    return redirect(f"{reverse('project', args=[project.slug])}?{QueryDict(query).urlencode()}")


@in_project(methods=POST)
def view_delete(request: HttpRequest, project: Project, view_id: int) -> HttpResponse:
    """Delete an own view. Administrators also delete shared ones."""
    view = delete_view(request, project, SavedView.Page.RUNS, view_id)
    messages.success(request, f"Deleted the view “{view.name}”. The runs are as before.")
    if view.owner_id == person(request).pk:
        fields = {"name": view.name, "query": view.query, "shared": "1" if view.shared else ""}
        offer_undo(request, "Save it again?", reverse("view_save", args=[project.slug]), **fields)
    return _back(request, project)


def _selected(project: Project, form: QueryDict, *, exact: bool = False) -> QuerySet[Run]:
    """The runs that a form selects: those listed, or all that match the search `q` if `all` is 1.

    With `exact`, their number must be that of the page (`matching`), which a person has seen.

    Raises:
        SelectionError: nothing is selected, or the search is not understood.
    """
    if form.get("all") != "1":
        ids = uuids_in(form.getlist("runs"), MAX_LISTED + 1)
        if len(ids) > MAX_LISTED:
            raise SelectionError(f"More than {MAX_LISTED} runs are selected: use “all that match”.")
        if not ids:
            raise SelectionError("Select runs first: tick their boxes, or press x on a row.")
        return Run.objects.filter(project=project, pk__in=ids)
    listing = Listing(project, ListState(search=form.get("q", "")))
    # A term that is left out would select more runs than meant.
    if listing.query.problems:
        raise SelectionError(f"Nothing was changed. {listing.query.problems[0]}")
    if exact and str(listing.runs.count()) != form.get("matching", ""):
        raise SelectionError(
            "Nothing was deleted: other runs match the search now. Check the list and delete again."
        )
    return listing.runs


def _runs(number: int) -> str:
    return f"{count_text(number)} run{'' if number == 1 else 's'}"


def _back(request: HttpRequest, project: Project) -> HttpResponse:
    return back_to(request, project, reverse("project", args=[project.slug]))
