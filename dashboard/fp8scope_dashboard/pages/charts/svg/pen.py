"""Strokes, fills and words of a picture, in the colours of its theme."""

from __future__ import annotations

import html
import re
from typing import Final

from fp8scope_dashboard.pages.charts.theme import Theme
from fp8scope_dashboard.text.ticks import superscript

# The width of a character as a share of its height.
CHARACTER: Final = 0.56


def colour_names(theme: Theme) -> dict[str, str]:
    """The names in tokens.css of a theme's colours: of runs those of the arms, whose colours they share."""
    return {
        theme.text: "text",
        theme.muted: "muted",
        theme.grid: "grid",
        theme.surface: "surface",
        theme.good: "good",
        theme.warning: "warning",
        theme.danger: "danger",
        **{theme.arms[slot]: slot for slot in reversed(list(theme.arms))},
    }


class Pen:
    """Writes paint and words of SVG elements. In a page, colours are variables of its theme.

    `width`: of a file, in pixels; None for a page.
    """

    def __init__(self, theme: Theme, width: int | None) -> None:
        self.theme, self.width = theme, width
        self._names = colour_names(theme)

    def stroke(self, colour: str, width: float, dash: str | None = None, *, stretched: bool = False) -> str:
        name, alpha = self._paint(colour)
        # Programs other than browsers do not know vector-effect; in a file nothing is distorted.
        factor = 10.0 if stretched and self.width else 1.0
        unit = max(width, 3.0) * factor
        pattern = {"dash": (3, 3), "dot": (1, 1), "dashdot": (3, 1, 1, 1), "longdash": (5, 5)}.get(dash or "")
        parts = [f' stroke="{name}" stroke-width="{width * factor:g}"']
        if alpha < 1:
            parts.append(f' stroke-opacity="{alpha:g}"')
        if pattern:
            lengths = " ".join(f"{part * unit:g}" for part in pattern)
            parts.append(
                f' stroke-dasharray="{lengths}" stroke-linecap="butt"'
                if not stretched
                else f' stroke-dasharray="{lengths}"'
            )
        if stretched and not self.width:
            parts.append(' vector-effect="non-scaling-stroke"')
        return "".join(parts)

    def fill(self, colour: str | None) -> str:
        name, alpha = self._paint(colour or self.theme.muted)
        return f' fill="{name}"' + (f' fill-opacity="{alpha:g}"' if alpha < 1 else "")

    def _paint(self, colour: str) -> tuple[str, float]:
        """The colour, as a variable of the page's theme where it has a name there, and its opacity."""
        match = re.fullmatch(r"rgba\((\d+),\s*(\d+),\s*(\d+),\s*([\d.]+)\)", colour)
        solid = "#" + "".join(f"{int(part):02x}" for part in match.groups()[:3]) if match else colour
        if not re.fullmatch(r"#[0-9a-fA-F]{6}", solid):
            solid = self.theme.text
        alpha = float(match[4]) if match else 1.0
        return (f"var(--{self._names[solid]})" if not self.width and solid in self._names else solid), alpha

    def text(
        self,
        x: float | str,
        y: float,
        words: str,
        *,
        colour: str | None = None,
        anchor: str = "start",
        size: float = 11,
        weight: int = 0,
    ) -> str:
        at = x if isinstance(x, str) else f"{x:g}"
        more = "" if anchor == "start" else f' text-anchor="{anchor}"'
        more += "" if size == 11 else f' font-size="{size:g}"'
        more += f' font-weight="{weight}"' if weight else ""
        paint = self.fill(colour or self.theme.text)
        return f'<text x="{at}" y="{y:.1f}"{paint}{more}>{html.escape(plain(words))}</text>'


def plain(text: str | None) -> str:
    """Plotly's texts may have tags; those of exponents become raised digits."""
    raised = re.sub(r"<sup>(-?\d+)</sup>", lambda match: superscript(match[1]), str(text or ""))
    return html.unescape(re.sub(r"<[^>]*>", "", raised))
