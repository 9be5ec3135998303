"""Colours of the figures in light and dark, equal to those of static/pages/css/tokens.css (tested).

They follow Okabe and Ito (2008): blue and vermilion differ for every common form of colour blindness. An arm
has the same colour on every page, and its seeds share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import plotly.graph_objects as go

from fp8scope_dashboard.text.numbers import THIN
from fp8scope_dashboard.text.ticks import WHOLE_BELOW

ThemeName = Literal["light", "dark"]
# Arms, shades for the lines of a chart that are no arms, and colours of single runs.
Slot = Literal[
    "bf16",
    "fp8-1",
    "fp8-2",
    "fp8-3",
    "fp8-4",
    "fp8-5",
    "fp8-6",
    "fp8-7",
    "fp8-8",
    "fp8-9",
    "fp8-10",
    "fp8-11",
    "other",
    "shade-1",
    "shade-2",
    "shade-3",
    "run-1",
    "run-2",
    "run-3",
    "run-4",
    "run-5",
    "run-6",
    "run-7",
    "run-8",
    "run-9",
    "run-10",
    "run-11",
    "run-12",
]
PALETTE: Final[tuple[Slot, ...]] = tuple(slot for slot in get_args(Slot) if slot.startswith(("bf16", "fp8-")))
"""The arms of a comparison: twelve colours. Those that are hard to tell apart have different dashes."""
RUN_SLOTS: Final[tuple[Slot, ...]] = tuple(slot for slot in get_args(Slot) if slot.startswith("run-"))
"""Single runs. They have the colours of PALETTE, which mean an arm only where arms are compared."""

# The colours of PALETTE, on a light and on a dark ground; tokens.css has the same.
LIGHT: Final = (
    "#0b63b5", "#bd4906", "#8e2f86", "#7a6200", "#0a7566", "#b5205f",
    "#4a45c4", "#47751b", "#84492a", "#0a718f", "#9c1c3c", "#9137c8",
)  # fmt: skip
DARK: Final = (
    "#6fb4f2", "#ff9a57", "#e08ad6", "#e0c24a", "#4fd0bd", "#ff86b5",
    "#a6a1ff", "#a4d666", "#d9a583", "#5fcfe8", "#ff7a8a", "#cf9bff",
)  # fmt: skip

FONT: Final = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", sans-serif'
# FP8 groups also differ in their dashes.
DASHES: Final[Mapping[Slot, str]] = {
    "bf16": "solid",
    "fp8-1": "solid",
    "fp8-2": "dash",
    "fp8-3": "dot",
    "fp8-4": "dashdot",
    "fp8-5": "solid",
    "fp8-6": "dash",
    "fp8-7": "dot",
    "fp8-8": "dashdot",
    "fp8-9": "solid",
    "fp8-10": "dash",
    "fp8-11": "dot",
    "other": "dashdot",
    "shade-1": "solid",
    "shade-2": "dash",
    "shade-3": "dot",
    **dict.fromkeys(RUN_SLOTS, "solid"),
}


# Of a legend: the usual width on a phone and on a desktop, an entry without its name, a letter and a row.
LEGEND_WIDTHS: Final = (180.0, 860.0)
ENTRY_PIXELS, LETTER_PIXELS, LEGEND_ROW_PIXELS = 48.0, 6.6, 19
# Fewer steps than this have a tick each.
FEW_STEPS: Final = 8


@dataclass(frozen=True, kw_only=True)
class Theme:
    """One set of colours, all as #rrggbb."""

    name: ThemeName
    text: str
    muted: str
    grid: str
    surface: str
    arms: Mapping[Slot, str]
    good: str
    warning: str
    danger: str
    # Low to high; the first is the colour of zero.
    heat: tuple[str, ...]
    cool: tuple[str, ...]


def _colours(twelve: Sequence[str]) -> dict[Slot, str]:
    return dict(zip((*PALETTE, *RUN_SLOTS), (*twelve, *twelve), strict=True))


THEMES: Final[Mapping[ThemeName, Theme]] = {
    "light": Theme(
        name="light",
        text="#1b2330",
        muted="#5b6676",
        grid="#e3e7ed",
        surface="#ffffff",
        arms={
            **_colours(LIGHT),
            "other": "#4a5565",
            "shade-1": "#27313f",
            "shade-2": "#566273",
            "shade-3": "#687485",
        },
        good="#0f7a55",
        warning="#8a5800",
        danger="#c0213a",
        heat=("#eef1f5", "#fbe3b5", "#f6b26b", "#e5702f", "#b93218", "#6d1210"),
        cool=("#eaf3fb", "#b5d6ee", "#6aaed6", "#2f7fb8", "#135a94", "#08345e"),
    ),
    "dark": Theme(
        name="dark",
        text="#e6eaf1",
        muted="#9aa6b8",
        grid="#2a3342",
        surface="#161c27",
        arms={
            **_colours(DARK),
            "other": "#a9b4c4",
            "shade-1": "#dfe5ee",
            "shade-2": "#a3aebf",
            "shade-3": "#8492a6",
        },
        good="#4cc497",
        warning="#e3b04b",
        danger="#ff6f7f",
        heat=("#212a38", "#4d3a2a", "#8a4b22", "#cf6a25", "#f79d4c", "#ffe0a6"),
        cool=("#1d2a3a", "#1f4469", "#2d6ea6", "#559fd3", "#9accee", "#e1f2fd"),
    ),
}


def theme_named(name: str) -> Theme:
    """The theme with this name; the light theme for an unknown name."""
    return THEMES["dark"] if name == "dark" else THEMES["light"]


def faded(colour: str, alpha: float) -> str:
    """`#rrggbb` with an opacity, as CSS."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:g})"


def escaped(text: str) -> str:
    """Escape a name: plotly interprets some HTML in names."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def shortened(name: str, length: int) -> str:
    """A name of at most `length` characters: its start and its end, which tell names apart."""
    if len(name) <= length:
        return name
    head = (length - 1) // 3
    return f"{name[:head]}…{name[-(length - 1 - head) :]}"


def steps_axis(first: float, last: float) -> dict[str, Any]:
    """The range of an axis of steps, with room around a single one, and no ticks between two steps."""
    first, last = (first, last) if last > first else (first - 1.0, first + 1.0)
    return {"range": [first, last], **({"dtick": 1, "tick0": 0} if last - first < FEW_STEPS else {})}


def scale_of(colours: tuple[str, ...]) -> list[list[float | str]]:
    """A colour scale for plotly with equal distances."""
    return [[i / (len(colours) - 1), colour] for i, colour in enumerate(colours)]


# Axes of whole numbers, by title.
COUNTED: Final = ("step", "steps", "tokens", "checkpoint (step)")
# Ticks of a step have all their digits where they are close to each other: 1 234 565, and not 1.23457M.
WHOLE: Final = {
    "hoverformat": ",d",
    "tickformatstops": [{"dtickrange": [1, WHOLE_BELOW - 1], "value": ",d"}],
}


def new_figure(
    theme: Theme, *, compact: bool, height: int, x_title: str = "", y_title: str = ""
) -> go.Figure:
    """An empty figure in the dashboard's style. `compact`: for narrow screens."""
    return go.Figure(
        layout=base_layout(theme, compact=compact, height=height, x_title=x_title, y_title=y_title)
    )


def base_layout(
    theme: Theme, *, compact: bool, height: int, x_title: str = "", y_title: str = ""
) -> dict[str, Any]:
    """The layout of `new_figure`. Plotly checks each change of a figure, so making one at once is cheaper."""
    axis = {
        "gridcolor": theme.grid,
        "zeroline": False,
        "linecolor": theme.grid,
        "tickcolor": theme.grid,
        "ticks": "outside",
        "ticklen": 4,
        "automargin": True,
        "tickfont": {"size": 11, "color": theme.muted},
    }
    title = {"standoff": 8, "font": {"size": 12, "color": theme.muted}}
    return {
        # Not the default template of plotly, which None would be.
        "template": {},
        "height": height,
        "autosize": True,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12, "color": theme.text},
        "margin": {"l": 44 if compact else 56, "r": 10, "t": 26, "b": 36, "pad": 0},
        "hovermode": "x unified",
        "hoverlabel": {
            "bgcolor": theme.surface,
            "bordercolor": theme.grid,
            "font": {"family": FONT, "size": 12, "color": theme.text},
        },
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1.0,
            "yanchor": "bottom",
            "font": {"size": 12},
            "itemsizing": "constant",
            "bgcolor": "rgba(0,0,0,0)",
        },
        "dragmode": False if compact else "zoom",
        # A constant value keeps the zoom when the figure is refreshed.
        "uirevision": "keep",
        "modebar": {"color": theme.muted, "activecolor": theme.text, "bgcolor": "rgba(0,0,0,0)"},
        "separators": f".{THIN}",
        "xaxis": {
            **axis,
            **(WHOLE if x_title in COUNTED else {}),
            "title": {**title, "text": x_title},
            "showgrid": False,
        },
        "yaxis": {**axis, "title": {**title, "text": "" if compact else y_title}},
    }


def make_room_for_legend(layout: dict[str, Any], names: Iterable[str], *, compact: bool) -> None:
    """Raise a figure by the further rows of its legend above it, so that its curves keep their height."""
    room, rows = 0.0, 0
    for name in names:
        width = ENTRY_PIXELS + LETTER_PIXELS * len(name)
        if width > room:
            rows += 1
            room = LEGEND_WIDTHS[0] if compact else LEGEND_WIDTHS[1]
        room -= width
    added = LEGEND_ROW_PIXELS * max(0, rows - 1)
    layout["height"] += added
    layout["margin"] = {**layout["margin"], "t": layout["margin"]["t"] + added}
