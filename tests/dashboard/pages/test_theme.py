"""The figures' colours are the pages' colours, and can be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fp8scope_dashboard.pages
from fp8scope_dashboard.pages.figures.theme import (
    THEMES,
    Theme,
    escaped,
    faded,
    new_figure,
    scale_of,
    theme_named,
)

TOKENS = Path(fp8scope_dashboard.pages.__file__).parent / "static/pages/css/tokens.css"


def tokens() -> dict[str, tuple[str, str]]:
    found = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", TOKENS.read_text())
    return {name: (light, dark) for name, light, dark in found}


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_it_works() -> None:
    assert theme_named("dark").name == "dark"
    assert theme_named("light").name == theme_named("nonsense").name == "light"


@pytest.mark.parametrize("side", [0, 1])
def test_figures_and_pages_agree(side: int) -> None:
    css, theme = tokens(), THEMES["dark" if side else "light"]
    named: dict[str, str] = {
        "text": theme.text,
        "muted": theme.muted,
        "grid": theme.grid,
        "surface": theme.surface,
    }
    named |= {"good": theme.good, "warning": theme.warning, "danger": theme.danger}
    named |= {str(slot): colour for slot, colour in theme.arms.items()}
    assert {name: css[name][side] for name in named} == named


@pytest.mark.parametrize("theme", THEMES.values(), ids=lambda theme: theme.name)
def test_lines_and_text_stand_out(theme: Theme) -> None:
    assert contrast(theme.text, theme.surface) > 10
    for colour in (theme.muted, theme.good, theme.warning, theme.danger, *theme.arms.values()):
        assert contrast(colour, theme.surface) >= 4.5, colour


@pytest.mark.parametrize("side", [0, 1])
def test_badges_can_be_read(side: int) -> None:
    css = tokens()
    for name in ("good", "warning", "danger"):
        assert contrast(css[name][side], css[f"{name}-bg"][side]) >= 4.5, name
    assert contrast(css["accent-text"][side], css["accent"][side]) >= 4.5
    assert contrast(css["muted"][side], css["neutral-bg"][side]) >= 4.5
    assert contrast(css["muted"][side], css["bg"][side]) >= 4.5


def test_small_helpers() -> None:
    assert faded("#0b63b5", 0.5) == "rgba(11,99,181,0.5)"
    assert escaped("<b>a & b</b>") == "&lt;b&gt;a &amp; b&lt;/b&gt;"
    assert scale_of(("#000000", "#ffffff")) == [[0.0, "#000000"], [1.0, "#ffffff"]]


def test_a_figure_has_no_background_of_its_own() -> None:
    layout = new_figure(THEMES["light"], compact=False, height=300).layout
    assert layout.paper_bgcolor == layout.plot_bgcolor == "rgba(0,0,0,0)"
    assert layout.uirevision == "keep"
