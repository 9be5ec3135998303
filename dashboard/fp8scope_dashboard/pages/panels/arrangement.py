"""Changes of the order and the size of panels, as functions of their list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, get_args

from django.http import QueryDict

from fp8scope_dashboard.pages.address_values import whole_number
from fp8scope_dashboard.pages.panels.panel import MAX_WIDTH, Height, Panel, PanelError, new_id

ACTIONS: Final = ("pin", "unpin", "remove", "move", "earlier", "later", "size")
HEIGHTS: Final[tuple[Height, ...]] = get_args(Height)


def put(panels: Sequence[Panel], panel: Panel) -> list[Panel]:
    """Replace the panel of the same id, or add it at the end with a new one."""
    if any(other.id == panel.id for other in panels):
        return [panel if other.id == panel.id else other for other in panels]
    return [*panels, replace(panel, id=new_id())]


def arranged(panels: Sequence[Panel], action: str, fields: QueryDict) -> list[Panel]:
    """The panels after an action on the one that the field `panel` names.

    `move` takes the position `to` among all panels that stand in the same section, from 0; `size` takes
    `width` and `height`, or the signs + and - for one more or less.

    Raises:
        PanelError: there is no such panel or action, e.g. because it was removed in another window.
    """
    panel = next((panel for panel in panels if panel.id == fields.get("panel", "")), None)
    if panel is None or action not in ACTIONS:
        raise PanelError("This panel is no longer in the view.")
    if action == "remove":
        return [other for other in panels if other.id != panel.id]
    if action in ("pin", "unpin"):
        return put(panels, replace(panel, is_pinned=action == "pin"))
    if action == "size":
        return put(panels, _sized(panel, fields.get("width", ""), fields.get("height", "")))
    section = [other.id for other in panels if other.is_pinned == panel.is_pinned]
    at = section.index(panel.id)
    to = {"earlier": at - 1, "later": at + 1}.get(action, whole_number(fields.get("to", "")))
    return _moved(panels, panel, at if to is None else to)


def _moved(panels: Sequence[Panel], panel: Panel, to: int) -> list[Panel]:
    """The panel at a position among those of its section; the other section stays as it is."""
    section = [other for other in panels if other.is_pinned == panel.is_pinned and other.id != panel.id]
    section.insert(max(0, min(len(section), to)), panel)
    beside = [other for other in panels if other.is_pinned != panel.is_pinned]
    return [*section, *beside] if panel.is_pinned else [*beside, *section]


def _sized(panel: Panel, width: str, height: str) -> Panel:
    columns = {"+": panel.width + 1, "-": panel.width - 1}.get(width, whole_number(width))
    at = HEIGHTS.index(panel.height) + {"+": 1, "-": -1}.get(height, 0)
    chosen = height if height in HEIGHTS else HEIGHTS[max(0, min(len(HEIGHTS) - 1, at))]
    columns = panel.width if columns is None else max(1, min(MAX_WIDTH, columns))
    return replace(panel, width=columns, height=chosen)
