"""Saved views of charts: which one a person sees, and changes of it.

A person's own view changes as they arrange its panels. The first change of any other view makes a copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project, User
from fp8scope_dashboard.pages import saved_views
from fp8scope_dashboard.pages.panels.panel import MAX_PANELS, Panel, PanelError, panels_of
from fp8scope_dashboard.runs.models import SavedView

OWN_NAME: Final = "My charts"

Change = Callable[[list[Panel]], list[Panel]]


def views_of(project: Project, user: User) -> QuerySet[SavedView]:
    """The user's views of charts and the shared ones, by name."""
    return saved_views.views_of(project, user, SavedView.Page.CHARTS)


def opened(views: Sequence[SavedView], user: User, view_id: int | None) -> SavedView | None:
    """The view that a person sees: that of the address, else the last that they changed, else the default."""
    if view_id is not None:
        return next((view for view in views if view.pk == view_id), None)
    own = [view for view in views if view.owner_id == user.pk]
    if own:
        return max(own, key=lambda view: (view.changed_at, view.pk))
    return next((view for view in views if view.is_default), None)


def change(project: Project, user: User, view_id: int | None, how: Change) -> SavedView:
    """Change the panels of a view of the user, or of a copy of the view that they see.

    Raises:
        PanelError: the view would have too many panels.
        ViewError: the user has too many views.
    """
    with transaction.atomic():
        views = list(_locked(project, user))
        view = next((other for other in views if other.pk == view_id), None)
        if view is None:
            view = _copied(project, user, view_id, {other.name for other in views})
        panels = how(panels_of(view.panels))
        if len(panels) > MAX_PANELS:
            raise PanelError(f"A view has at most {MAX_PANELS} panels: remove one first.")
        view.panels = [panel.as_json() for panel in panels]
        view.changed_at = timezone.now()
        view.save()
    return view


def save_as(
    project: Project, user: User, name: str, shown: SavedView | None, *, shared: bool, renames: bool = False
) -> SavedView:
    """Save what a person sees under a name; an own view of this name is replaced.

    With `renames`, an own view that is shown gets the name instead.

    Raises:
        ViewError: the name is empty or too long, or the user has too many views.
    """
    name = saved_views.checked_name(name)
    with transaction.atomic():
        own = {view.name: view for view in _locked(project, user)}
        saved_views.check_room(own, name)
        target = own.get(name)
        if target is None and renames and shown is not None and shown.owner_id == user.pk:
            target = shown
        if target is None:
            target = SavedView(project=project, owner=user, page=SavedView.Page.CHARTS)
        if shown is not None and target.pk != shown.pk:
            target.panels = shown.panels
        target.name, target.changed_at = name, timezone.now()
        # The default of the project stays visible to it.
        target.shared = shared or target.is_default
        target.save()
    return target


def set_default(project: Project, view: SavedView, *, is_default: bool) -> None:
    """Make a view the default of its project, which shares it, or no longer the default."""
    with transaction.atomic():
        former = SavedView.objects.filter(project=project, page=SavedView.Page.CHARTS, is_default=True)
        former.update(is_default=False)
        if is_default:
            SavedView.objects.filter(pk=view.pk).update(is_default=True, shared=True)


def _locked(project: Project, user: User) -> QuerySet[SavedView]:
    """The user's own views, which nobody else changes until the end of the transaction."""
    return views_of(project, user).filter(owner=user).select_for_update(of=("self",))


def _copied(project: Project, user: User, view_id: int | None, names: set[str]) -> SavedView:
    """A new view of the user, with the panels of the view that they see."""
    saved_views.check_room(names)
    shown = opened(list(views_of(project, user)), user, view_id)
    numbered = (f"{OWN_NAME} {number}" for number in range(2, saved_views.MAX_VIEWS + 2))
    name = OWN_NAME if OWN_NAME not in names else next(number for number in numbered if number not in names)
    panels = shown.panels if shown is not None else []
    return SavedView(project=project, owner=user, page=SavedView.Page.CHARTS, name=name, panels=panels)
