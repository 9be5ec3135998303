"""The frames of the pages' charts: titles, sizes, and what charts react to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The surroundings of a chart.

    Attributes:
        title: what it shows, for the menu and for saved pictures.
        on: the kinds of changes that refresh it, separated by spaces.
        axis: charts of a page with the same axis share their range and their crosshair; "steps" for steps.
        size: the height in pixels until it is drawn, one of those in figures.css.
        zoom: zooming requests finer data with `first` and `last`.
        clickable: a click on a point does something.
        marks: it marks runs' alerts, changes and notes; people pin notes to the steps of the page's run.
        keep: htmx keeps it when it replaces what is around it.
    """

    title: str
    on: str = ""
    axis: str = ""
    size: int = 340
    zoom: bool = False
    clickable: bool = False
    marks: bool = False
    keep: bool = False


FRAMES: Final[Mapping[str, Frame]] = {
    "panels": Frame(
        title="Loss, difference, tensors out of range and gradient norm",
        on="rows alert report note comparison",
        axis="steps",
        size=640,
        zoom=True,
        marks=True,
    ),
    "loss": Frame(title="Loss", on="rows alert report note", axis="steps", zoom=True, marks=True),
    "scalar": Frame(
        title="Throughput and other scalars",
        on="rows alert report note",
        axis="steps",
        zoom=True,
        marks=True,
    ),
    "overlay-chart": Frame(
        title="Curves of chosen runs",
        on="rows alert report note",
        axis="runs",
        size=320,
        zoom=True,
        marks=True,
    ),
    "tensor-history": Frame(
        title="Exponents over the steps", on="histogram", axis="steps", size=320, zoom=True
    ),
    "tensor-lines": Frame(title="amax in the range, and rates", on="rows", axis="steps", size=420, zoom=True),
    "readiness-exponents": Frame(title="Exponents", on="histogram", size=320),
    "compare-tensors": Frame(title="Differences of tensors", on="rows", zoom=True),
    "scores": Frame(title="Scores by checkpoint", on="evaluation comparison", size=320),
    "differences": Frame(title="Paired differences by checkpoint", on="comparison", size=320),
}
"""The frames that are too long for a line of a template, by the name of the chart."""
