"""A frozen report as its template shows it: Markdown as HTML, charts in the colours of the reader's theme."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from fp8scope_dashboard.pages.charts.svg import colour_names
from fp8scope_dashboard.pages.charts.theme import THEMES
from fp8scope_dashboard.text import markdown

_PAINT: Final = re.compile(r'\b(fill|stroke)="(#[0-9a-f]{6})"')
_NAMES: Final = colour_names(THEMES["light"])


def sections_to_show(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The sections of a report's content; see sections.py."""
    return [_shown(section) for section in content.get("sections", ())]


def in_colours_of_the_page(svg: str) -> str:
    """A chart that was drawn in the light theme, with variables of the page's theme as its colours.

    Reports store colours and not variables, so that they stay as they are when the style sheets change their
    names. Colours without a name, and pictures in the chart, remain.
    """
    return _PAINT.sub(
        lambda match: f'{match[1]}="var(--{_NAMES[match[2]]})"' if match[2] in _NAMES else match[0], svg
    )


def _shown(section: Mapping[str, Any]) -> dict[str, Any]:
    kind = section["kind"]
    if kind == "text":
        return {**section, "html": markdown.to_html(section["markdown"])}
    if kind == "forest":
        return {**section, "lines": [{"row": row} for row in section["rows"]]}
    if kind == "runs":
        rows = [
            {"name": name, "values": list(zip(section["names"], values, strict=False))}
            for name, *values in section["rows"]
        ]
        return {**section, "rows": rows}
    if kind == "figure":
        # A heat map is a picture with colours of its own: reports have it once for each theme.
        dark = section.get("svg_dark", "")
        is_light_only = "<image" in section["svg"] and not dark
        svg = section["svg"] if is_light_only else in_colours_of_the_page(section["svg"])
        return {**section, "svg": svg, "svg_dark": dark, "is_light_only": is_light_only}
    return dict(section)
