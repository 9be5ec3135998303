"""Saved views of all pages: who sees and deletes them, their bounds, and their menu."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from django.core.exceptions import PermissionDenied
from django.db.models import Q, QuerySet
from django.http import Http404, HttpRequest

from fp8scope_dashboard.accounts import permissions
from fp8scope_dashboard.accounts.models import Project, User
from fp8scope_dashboard.pages.access import may, person, require_own
from fp8scope_dashboard.runs.models import SavedView

MAX_VIEWS: Final = 100
MAX_NAME: Final = 80


class ViewError(ValueError):
    """The view cannot be saved; the message says why."""


@dataclass(frozen=True, kw_only=True)
class ViewChoice:
    """A view in a menu. `deletion`: the address of the form that deletes it."""

    name: str
    address: str
    remark: str
    deletion: str
    is_own: bool
    is_current: bool


@dataclass(frozen=True, kw_only=True)
class ViewMenu:
    """The menu of the views of a page.

    Attributes:
        title: on its button.
        empty: what it says without views.
        saving: the address of the form that saves what is shown, and the label of the name.
        field, value: the hidden field of that form, which tells what is shown.
        default_form: the address of the form that makes the shown view the project's default; empty for none.
    """

    title: str
    choices: Sequence[ViewChoice]
    empty: str
    saving: str
    saving_label: str
    field: str
    value: str
    is_shared: bool = False
    can_rename: bool = False
    default_form: str = ""
    is_default: bool = False
    opens_left: bool = False


def views_of(project: Project, user: User, kind: SavedView.Page) -> QuerySet[SavedView]:
    """The user's views of a page and the shared ones, by name."""
    views = SavedView.objects.filter(Q(owner=user) | Q(shared=True), project=project, page=kind)
    return views.select_related("owner").order_by("name", "id")


def choice_of(view: SavedView, user: User, address: str, deletion: str, *, is_current: bool) -> ViewChoice:
    """A view as its menu has it."""
    is_own = view.owner_id == user.pk
    kind = "the project’s default," if view.is_default else "shared" if view.shared else ""
    return ViewChoice(
        name=view.name,
        address=address,
        remark=kind.rstrip(",") if is_own else f"{kind} by {view.owner.username}",
        deletion=deletion,
        is_own=is_own,
        is_current=is_current,
    )


def checked_name(name: str) -> str:
    """The name without spaces around it.

    Raises:
        ViewError: it is empty or too long.
    """
    name = name.strip()
    if not name or len(name) > MAX_NAME or "\0" in name:
        raise ViewError(f"Give the view a name of 1 to {MAX_NAME} characters.")
    return name


def check_room(names: Collection[str], name: str = "") -> None:
    """Check that a person with views of these names may have one more, or one of them again.

    Raises:
        ViewError: there are MAX_VIEWS.
    """
    if len(names) >= MAX_VIEWS and name not in names:
        raise ViewError(f"You have {MAX_VIEWS} views: delete one first.")


def asks_to_share(request: HttpRequest, project: Project) -> bool:
    """True if a form shares the view. Only members can."""
    shared = request.POST.get("shared") == "1"
    if shared and not may(request, project, permissions.SHARE_VIEWS):
        raise PermissionDenied("Only members can share views.")
    return shared


def said_of(view: SavedView) -> str:
    """The message after a view was saved."""
    return f"Saved the view “{view.name}”{' for all members' if view.shared else ', for you'}."


def seen_view(request: HttpRequest, project: Project, kind: SavedView.Page, view_id: int) -> SavedView:
    """The view with this number, if the person sees it; else a 404."""
    view = views_of(project, person(request), kind).filter(pk=view_id).first()
    if view is None:
        raise Http404("No such view.")
    return view


def delete(request: HttpRequest, project: Project, kind: SavedView.Page, view_id: int) -> SavedView:
    """Delete an own view; administrators also delete shared ones."""
    view = seen_view(request, project, kind, view_id)
    require_own(request, project, permissions.DELETE_VIEWS, view.owner_id)
    view.delete()
    return view
