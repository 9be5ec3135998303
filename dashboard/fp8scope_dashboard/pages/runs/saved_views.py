"""Saved views of the list of runs."""

from __future__ import annotations

from typing import Final

from django.db.models import Q, QuerySet
from django.http import QueryDict

from fp8scope_dashboard.accounts.models import Project, User
from fp8scope_dashboard.pages.runs.listing import ListState
from fp8scope_dashboard.runs.models import SavedView

MOST_VIEWS: Final = 100
NAME_LENGTH: Final = 80
QUERY_LENGTH: Final = 2_000


class ViewError(ValueError):
    """The view cannot be saved; the message says why."""


def views_of(project: Project, user: User) -> QuerySet[SavedView]:
    """The user's views and the shared ones, by name."""
    seen = SavedView.objects.filter(Q(owner=user) | Q(shared=True), project=project, page=SavedView.Page.RUNS)
    return seen.select_related("owner").order_by("name", "id")


def save(project: Project, user: User, name: str, query: str, *, shared: bool) -> SavedView:
    """Save a view, or replace the user's view of the same name.

    Raises:
        ViewError: the name or the query is empty or too long, or the user has MOST_VIEWS views.
    """
    name = name.strip()
    if not name or len(name) > NAME_LENGTH or "\0" in name:
        raise ViewError(f"Give the view a name of 1 to {NAME_LENGTH} characters.")
    # Only what the list understands is stored, without the page and open groups.
    state = ListState.of(QueryDict(query[: 4 * QUERY_LENGTH]))
    query_string = state.address(open=()).removeprefix("?")
    if len(query_string) > QUERY_LENGTH:
        raise ViewError("The view is too long to be saved: shorten the search, or show fewer columns.")
    own = SavedView.objects.filter(project=project, owner=user, page=SavedView.Page.RUNS)
    if own.count() >= MOST_VIEWS and not own.filter(name=name).exists():
        raise ViewError(f"You have {MOST_VIEWS} views: delete one first.")
    view, _ = SavedView.objects.update_or_create(
        project=project,
        owner=user,
        page=SavedView.Page.RUNS,
        name=name,
        defaults={"query": query_string, "shared": shared},
    )
    return view
