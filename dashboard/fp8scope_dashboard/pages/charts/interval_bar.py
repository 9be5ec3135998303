"""A difference and its interval on a bar of margins, as SVG in a row of a table."""

from __future__ import annotations

from collections.abc import Mapping

from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe

HEIGHT = 22
# The zone within the margin, on a bar from -3 to +3 margins.
_ZONE = (
    f'<rect class="forest__zone" x="33.33%" width="33.34%" y="0" height="{HEIGHT}"/>'
    f'<line class="forest__zero" x1="50%" x2="50%" y1="0" y2="{HEIGHT}"/>'
)


def interval_bar(positions: Mapping[str, float | None], slot: str, verdict: str) -> SafeString:
    """Draw the parts of a row at their positions (`scores.forest.Positions`), in per cent of the width.

    The figures stand in the row beside it, for readers of the screen too. It follows the width of its cell
    and the theme of the page, also in shared reports, which store the positions.
    """
    parts = [SafeString(_ZONE)]
    if positions["detectable"] is not None:
        parts.append(_line("forest__detectable", positions["detectable"], positions["detectable"], 4, 18))
    parts.append(_line("forest__interval", positions["low"], positions["high"], 11, 11))
    if not positions["off_scale"]:
        parts.append(
            format_html('<circle class="forest__point" cx="{}%" cy="11" r="5"/>', positions["point"])
        )
    elif positions["off_scale"] < 0:
        parts.append(SafeString('<text class="forest__off" x="0" y="16">◀</text>'))
    else:
        parts.append(SafeString('<text class="forest__off" x="100%" y="16" text-anchor="end">▶</text>'))
    return format_html(
        '<svg class="arm--{} forest__svg forest__svg--{}" width="100%" height="{}" aria-hidden="true">'
        "{}</svg>",
        slot,
        verdict,
        HEIGHT,
        # Each part is escaped already.
        mark_safe("".join(parts)),
    )


def _line(name: str, first: float | None, last: float | None, top: int, bottom: int) -> SafeString:
    return format_html('<line class="{}" x1="{}%" x2="{}%" y1="{}" y2="{}"/>', name, first, last, top, bottom)
