"""Marks of a chart: what happened as vertical lines, and stretches of values that it cannot show."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.pages.charts.theme import Slot, Theme, escaped, faded

ALERT: Final = "alert"
NOTE: Final = "note"
CHANGE: Final = "change"
# More marks would overlap.
MAX_MARKS: Final = 200


# Characters of a line, and of all lines, that the hover text has of a detail.
LINE_LENGTH: Final = 60
DETAIL_LENGTH: Final = 240
_SYMBOLS: Final = {ALERT: "diamond", CHANGE: "square", NOTE: "circle"}


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A vertical line with a name, e.g. where an alert began.

    Attributes:
        label: the kind of mark, for the hover text; other than ALERT and NOTE, it is a change to the run.
        detail: further words of the hover text, in lines of their own.
        address: the page that a click on the mark opens; empty for none.
        slot: the colour of its run, in a chart of several runs.
    """

    x: float
    text: str
    severe: bool = False
    label: str = ALERT
    detail: str = ""
    address: str = ""
    slot: Slot | None = None

    @property
    def group(self) -> str:
        return self.label if self.label in (ALERT, NOTE) else CHANGE

    @property
    def hover(self) -> str:
        """The text and the detail as HTML of plotly."""
        lines = textwrap.wrap(textwrap.shorten(self.detail, DETAIL_LENGTH, placeholder=" …"), LINE_LENGTH)
        return "<br>".join(escaped(line) for line in (self.text, *lines))


class Drawing(Protocol):
    """The receiver of marks: a plotly figure, or the parts of one."""

    def add_scatter(self, **trace: Any) -> object: ...

    def add_shape(self, **shape: Any) -> object: ...


def draw_marks(
    drawing: Drawing, marks: Sequence[Mark], theme: Theme, *, axis: str, height: float | None
) -> None:
    """Draw a dotted line through the whole chart for each mark.

    Their texts are at `height` on the y axis `axis`; without a height there are none.
    """
    marks = marks[:MAX_MARKS]
    for mark in marks:
        drawing.add_shape(
            type="line",
            xref="x",
            yref="paper",
            x0=mark.x,
            x1=mark.x,
            y0=0,
            y1=1,
            line={
                "color": faded(_colour(mark, theme), 0.7 if mark.slot is None else 0.4),
                "width": 1,
                "dash": "dot",
            },
            layer="below",
        )
    for name, symbol in _SYMBOLS.items():
        group = [mark for mark in marks if mark.group == name]
        if group and height is not None:
            drawing.add_scatter(
                x=[mark.x for mark in group],
                y=[height] * len(group),
                yaxis=axis,
                mode="markers",
                marker={
                    "symbol": symbol,
                    "size": 8,
                    "color": [_colour(mark, theme) for mark in group],
                    "line": {"width": 1, "color": theme.surface},
                },
                text=[mark.hover for mark in group],
                customdata=[escaped(mark.label) for mark in group],
                name=name,
                # For marks.js: a click on a mark opens its page.
                meta={"addresses": [mark.address for mark in group]},
                showlegend=False,
                hovertemplate="%{text}<extra>%{customdata}</extra>",
                cliponaxis=False,
            )


def stretches(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The first and the last index of each stretch of True, int64[N, 2]; at most MAX_MARKS / 2 stretches."""
    padded = np.concatenate(([False], mask, [False]))
    changes = np.flatnonzero(padded[1:] != padded[:-1])
    pairs = np.stack([changes[::2], changes[1::2] - 1], axis=1)
    if len(pairs) > MAX_MARKS // 2:
        pairs = pairs[np.linspace(0, len(pairs) - 1, MAX_MARKS // 2).astype(int)]
    return pairs


def _colour(mark: Mark, theme: Theme) -> str:
    if mark.slot is not None:
        return theme.arms[mark.slot]
    if mark.label == NOTE:
        return theme.text
    if mark.label != ALERT:
        return theme.muted
    return theme.danger if mark.severe else theme.warning
