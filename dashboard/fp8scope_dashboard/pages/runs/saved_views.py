"""Saved views of the list of runs."""

from __future__ import annotations

from typing import Final

from django.http import QueryDict
from django.urls import reverse

from fp8scope_dashboard.accounts.models import Project, User
from fp8scope_dashboard.pages.runs.listing import ListState
from fp8scope_dashboard.pages.saved_views import (
    ViewError,
    ViewMenu,
    check_room,
    checked_name,
    choice_of,
    views_of,
)
from fp8scope_dashboard.runs.models import SavedView

QUERY_LENGTH: Final = 2_000


def menu_of(project: Project, user: User, state: ListState) -> ViewMenu:
    """The menu of the views of the list, which shows `state`."""
    page, shown = reverse("project", args=[project.slug]), _stored(state)
    return ViewMenu(
        title="Views",
        choices=[
            choice_of(
                view,
                user,
                f"{page}?{view.query}",
                reverse("view_delete", args=[project.slug, view.pk]),
                is_current=bool(shown) and view.query == shown,
            )
            for view in views_of(project, user, SavedView.Page.RUNS)
        ],
        empty="A view keeps a search, its columns, order and grouping.",
        saving=reverse("view_save", args=[project.slug]),
        saving_label="Save this list as",
        field="query",
        value=state.query(),
    )


def save(project: Project, user: User, name: str, query: str, *, shared: bool) -> SavedView:
    """Save a view, or replace the user's view of the same name.

    Raises:
        ViewError: the name or the query is empty or too long, or the user has too many views.
    """
    name = checked_name(name)
    query_string = _stored(ListState.of(QueryDict(query[: 4 * QUERY_LENGTH])))
    if len(query_string) > QUERY_LENGTH:
        raise ViewError("The view is too long to be saved: shorten the search, or show fewer columns.")
    own = SavedView.objects.filter(project=project, owner=user, page=SavedView.Page.RUNS)
    check_room(set(own.values_list("name", flat=True)), name)
    view, _ = SavedView.objects.update_or_create(
        project=project,
        owner=user,
        page=SavedView.Page.RUNS,
        name=name,
        defaults={"query": query_string, "shared": shared},
    )
    return view


def _stored(state: ListState) -> str:
    """Only what the list understands is stored, without the page and open groups."""
    return state.address(open=()).removeprefix("?")
