"""Figures use the colours of the pages, with sufficient contrast."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest

import fp8scope_dashboard.pages
from fp8scope_dashboard.pages.alerts.evidence_figure import evidence_figure
from fp8scope_dashboard.pages.charts.curves import Curve, curves_figure
from fp8scope_dashboard.pages.charts.marks import Mark
from fp8scope_dashboard.pages.charts.theme import (
    PALETTE,
    RUN_SLOTS,
    THEMES,
    Theme,
    escaped,
    faded,
    new_figure,
    scale_of,
    theme_named,
)
from fp8scope_dashboard.pages.run.controls.figures import ranking_figure
from fp8scope_dashboard.pages.run.efficiency import PHASES, Split
from fp8scope_dashboard.pages.run.figures.step_phases import efficiency_figure

TOKENS = Path(fp8scope_dashboard.pages.__file__).parent / "static/pages/css/tokens.css"


def tokens() -> dict[str, tuple[str, str]]:
    definitions = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", TOKENS.read_text())
    return {name: (light, dark) for name, light, dark in definitions}


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_it_works() -> None:
    assert theme_named("dark").name == "dark"
    assert theme_named("light").name == theme_named("nonsense").name == "light"


@pytest.mark.parametrize("side", [0, 1])
def test_figures_and_pages_have_the_same_colours(side: int) -> None:
    css, theme = tokens(), THEMES["dark" if side else "light"]
    named: dict[str, str] = {
        "text": theme.text,
        "muted": theme.muted,
        "grid": theme.grid,
        "surface": theme.surface,
    }
    named |= {"good": theme.good, "warning": theme.warning, "danger": theme.danger}
    named |= {str(slot): colour for slot, colour in theme.arms.items() if slot not in RUN_SLOTS}
    assert {name: css[name][side] for name in named} == named


def test_runs_have_the_colours_of_arms() -> None:
    css = TOKENS.read_text()
    for slot, arm in zip(RUN_SLOTS, PALETTE, strict=True):
        assert f"--{slot}: var(--{arm});" in css
        assert all(theme.arms[slot] == theme.arms[arm] for theme in THEMES.values())


@pytest.mark.parametrize("theme", THEMES.values(), ids=lambda theme: theme.name)
def test_lines_and_text_have_enough_contrast(theme: Theme) -> None:
    assert contrast(theme.text, theme.surface) > 10
    for colour in (theme.muted, theme.good, theme.warning, theme.danger, *theme.arms.values()):
        assert contrast(colour, theme.surface) >= 4.5, colour


@pytest.mark.parametrize("side", [0, 1])
def test_badges_have_enough_contrast(side: int) -> None:
    css = tokens()
    for name in ("good", "warning", "danger"):
        assert contrast(css[name][side], css[f"{name}-bg"][side]) >= 4.5, name
    assert contrast(css["accent-text"][side], css["accent"][side]) >= 4.5
    assert contrast(css["muted"][side], css["neutral-bg"][side]) >= 4.5
    assert contrast(css["muted"][side], css["bg"][side]) >= 4.5


def test_formats_colours_and_text() -> None:
    assert faded("#0b63b5", 0.5) == "rgba(11,99,181,0.5)"
    assert escaped("<b>a & b</b>") == "&lt;b&gt;a &amp; b&lt;/b&gt;"
    assert scale_of(("#000000", "#ffffff")) == [[0.0, "#000000"], [1.0, "#ffffff"]]


def test_figures_have_a_transparent_background() -> None:
    layout = new_figure(THEMES["light"], compact=False, height=300).layout
    assert layout.paper_bgcolor == layout.plot_bgcolor == "rgba(0,0,0,0)"
    assert layout.uirevision == "keep"


def without_arms(theme: Theme) -> dict[str, go.Figure]:
    """Charts of phases, products, tensors and marks, none of which is an arm."""
    x = np.arange(4.0)
    times = Split(x, np.full((len(PHASES), 4), 0.01))
    products = [("a", "fprop", 0.1, 0.9), ("b", "dgrad", 0.2, 0.9), ("c", "wgrad", 0.3, 0.9)]
    series = [
        {"tensor": f"{name}.input", "name": f"{name}.input amax", "steps": [1, 2], "values": [1.0, 2.0]}
        for name in "abc"
    ]
    tensors = evidence_figure({"series": series}, theme, slot="fp8-1", onset=1, detected=2, threshold=None)
    assert tensors is not None
    shade = Curve(name="a", arm="", slot="shade-1", x=x, y=x)
    return {
        "phases": efficiency_figure(times, theme, compact=False),
        "products": ranking_figure(products, 0.4, theme),
        "tensors": tensors,
        "marks": curves_figure(
            [shade], theme, marks=[Mark(x=1.0, text="layers to BF16", label="change")]
        ).editable(),
    }


@pytest.mark.parametrize("theme", THEMES.values(), ids=lambda theme: theme.name)
def test_the_colours_of_arms_mean_arms_and_nothing_else(theme: Theme) -> None:
    of_arms = {
        colour
        for slot, arm in theme.arms.items()
        if not slot.startswith("shade")
        for colour in (arm, faded(arm, 0.5).rpartition(",")[0])
    }
    for name, figure in without_arms(theme).items():
        drawn = json.dumps(figure.to_plotly_json(), default=str)
        assert [colour for colour in of_arms if colour in drawn] == [], name
