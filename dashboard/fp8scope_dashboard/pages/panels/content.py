"""The content of the tab of charts: the panels of a view, and all scalars of the run in groups."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from django.http import QueryDict
from django.urls import reverse

from fp8scope_dashboard.accounts.models import User
from fp8scope_dashboard.db.regular_expressions import MAX_LENGTH, PatternError, matching
from fp8scope_dashboard.pages.address_values import whole_number
from fp8scope_dashboard.pages.charts.frames import Frame
from fp8scope_dashboard.pages.panels import saved
from fp8scope_dashboard.pages.panels.figure import title_of
from fp8scope_dashboard.pages.panels.groups import ScalarGroup, groups_of
from fp8scope_dashboard.pages.panels.panel import PIXELS, Panel, panels_of
from fp8scope_dashboard.pages.saved_views import ViewMenu, choice_of
from fp8scope_dashboard.runs.models import Run, SavedView
from fp8scope_dashboard.telemetry import queries

# Charts of a group at once, and of one that was opened as a whole.
MAX_SHOWN, MAX_OPENED = 24, 1_000
# Of a scalar that is no panel of a view.
USUAL: Final = Panel(height="small")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One chart of the tab.

    Attributes:
        id: of its element; another one if it shows something else.
        panel: the id in the view; empty if it is a scalar of a group.
        metric: the scalar of a group.
        edit: the query of its form.
    """

    id: str
    title: str
    address: str
    size: int
    width: int = 1
    height: str = "small"
    panel: str = ""
    metric: str = ""
    edit: str = ""
    is_pinned: bool = False

    @property
    def frame(self) -> Frame:
        """Return what surrounds its chart."""
        return Frame(
            title=self.title,
            on="rows alert report note",
            axis="steps",
            size=self.size,
            zoom=True,
            marks=True,
            keep=True,
        )


@dataclass(frozen=True, kw_only=True)
class Section:
    """Charts under one heading. `more`: how many of the group are not shown; `all_address` shows them."""

    title: str
    cells: list[Cell]
    total: str
    more: int = 0
    all_address: str = ""
    name: str = ""


def charts_context(run: Run, query: QueryDict, user: User) -> dict[str, Any]:
    """Return what the tab needs."""
    views = list(saved.views_of(run.project, user))
    asked = whole_number(query.get("view", ""))
    view = saved.opened(views, user, asked)
    panels = panels_of(view.panels) if view is not None else []
    logged = queries.scalar_names(run.id)
    text = query.get("find", "").strip()[: MAX_LENGTH + 1]
    shown, problem = _matching(logged, text)
    number = str(view.pk) if view is not None else ""
    own = [_cell(run, panel, number) for panel in panels]
    sections = [_section(run, group, query, number) for group in groups_of(shown)]
    cells = [*own, *(cell for section in sections for cell in section.cells)]
    return {
        "view": view,
        "views": _menu(run, views, view, user),
        "view_remark": "This view is not shared with you, or was deleted." if asked and view is None else "",
        "find": text,
        "find_problem": problem,
        "max_find": MAX_LENGTH,
        "pinned": [cell for cell in own if cell.is_pinned],
        "arranged": [cell for cell in own if not cell.is_pinned],
        "sections": sections,
        # The state of the switch of marks has the name of the first in the page's address (see view.js).
        "marked": " ".join(["charts", *(cell.id for cell in cells)]),
        "logged": len(logged),
    }


def tab_address(run: Run, **fields: str) -> str:
    """The address of the tab, with these fields."""
    query = QueryDict(mutable=True)
    query.update({"tab": "charts", **{name: value for name, value in fields.items() if value}})
    return f"{reverse('run', args=[run.project.slug, run.pk])}?{query.urlencode()}"


def _matching(logged: Sequence[str], text: str) -> tuple[list[str], str]:
    """The scalars that a search finds, and what is wrong with it."""
    if not text:
        return list(logged), ""
    try:
        return matching(logged, text), ""
    except PatternError as error:
        return [name for name in logged if text.casefold() in name.casefold()], str(error)


def _section(run: Run, group: ScalarGroup, query: QueryDict, shown_view: str) -> Section:
    is_opened = query.get("group") == group.name
    shown = group.metrics[: MAX_OPENED if is_opened else MAX_SHOWN]
    view = query.get("view", "") if whole_number(query.get("view", "")) is not None else ""
    total = f"{len(group.metrics):,} chart{'' if len(group.metrics) == 1 else 's'}"
    return Section(
        title=group.name,
        name=group.name,
        cells=[_metric_cell(run, name, shown_view) for name in shown],
        total=total,
        more=len(group.metrics) - len(shown),
        all_address=tab_address(run, group=group.name, view=view, find=query.get("find", "")[:MAX_LENGTH]),
    )


def _metric_cell(run: Run, name: str, view: str) -> Cell:
    panel = Panel(metrics=(name,), height=USUAL.height)
    return Cell(
        id=f"chart-{_digest(name)}",
        title=title_of(panel),
        address=_address(run, panel),
        size=PIXELS[panel.height],
        metric=name,
        edit=urlencode({"metric": name, "view": view}),
    )


def _cell(run: Run, panel: Panel, view: str) -> Cell:
    address = _address(run, panel)
    return Cell(
        id=f"panel-{panel.id}-{_digest(address)}",
        title=title_of(panel),
        address=address,
        size=PIXELS[panel.height],
        width=panel.width,
        height=panel.height,
        panel=panel.id,
        edit=urlencode({"panel": panel.id, "view": view}),
        is_pinned=panel.is_pinned,
    )


def _address(run: Run, panel: Panel) -> str:
    return f"{reverse('panel_figure', args=[run.project.slug, run.pk])}?{panel.query.urlencode()}"


def _menu(run: Run, views: Sequence[SavedView], shown: SavedView | None, user: User) -> ViewMenu:
    ids = [run.project.slug, run.pk]
    return ViewMenu(
        title="All metrics" if shown is None else shown.name,
        choices=[
            choice_of(
                view,
                user,
                tab_address(run, view=str(view.pk)),
                reverse("panel_view_delete", args=[*ids, view.pk]),
                is_current=shown is not None and view.pk == shown.pk,
            )
            for view in views
        ],
        empty="The first panel that you pin, add or move makes a view of yours.",
        saving=reverse("panel_view_save", args=ids),
        saving_label="Save these panels as",
        field="view",
        value="" if shown is None else str(shown.pk),
        is_shared=shown is not None and shown.shared,
        can_rename=shown is not None and shown.owner_id == user.pk,
        default_form="" if shown is None else reverse("panel_view_default", args=[*ids, shown.pk]),
        is_default=shown is not None and shown.is_default,
        opens_left=True,
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]
