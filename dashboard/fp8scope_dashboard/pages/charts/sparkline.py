"""Curves of a few pixels as SVG: the loss of a run in a list, and a statistic of a tensor in a ranking."""

from __future__ import annotations

import numpy as np
from django.utils.html import format_html
from django.utils.safestring import SafeString
from numpy.typing import NDArray

from fp8scope_dashboard.pages.charts.ranges import loss_range
from fp8scope_dashboard.pages.charts.theme import PALETTE, RUN_SLOTS, Slot
from fp8scope_dashboard.statistics.arrays import Floats

WIDTH, HEIGHT, EDGE = 132, 32, 3
ROW_WIDTH, ROW_HEIGHT, ROW_EDGE = 120, 22, 1
# An image cannot follow the page's theme; these colours have contrast on light and dark.
TWELVE = (
    "#2f86d0", "#e2702b", "#b456ab", "#a88a1c", "#1f9a88", "#dc4a86",
    "#7a75e6", "#6b9c35", "#b0734f", "#2b98b8", "#cf4a63", "#ad62de",
)  # fmt: skip
COLOURS: dict[Slot, str] = {
    **dict(zip(PALETTE, TWELVE, strict=True)),
    **dict(zip(RUN_SLOTS, TWELVE, strict=True)),
    "other": "#7d8899",
}
BROKEN = "#e0455a"


def sparkline(x: Floats, y: Floats, slot: Slot) -> str:
    """The curve y over x as SVG text, clipped to the range, with a cross at the first non-finite value.

    Args:
        x: float64[N], increasing.
        y: float64[N], may hold NaN and infinities.
        slot: of the run or its arm, which determines the colour.
    """
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>']
    limits = loss_range([y])
    if limits is not None:
        across = (x - x[0]) / ((x[-1] - x[0]) or 1.0) * (WIDTH - 2 * EDGE) + EDGE
        down = _down(y, limits, HEIGHT, EDGE)
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{COLOURS[slot]}" stroke-width="1.6" '
            'stroke-linejoin="round" stroke-linecap="round"/>'
            for points in _polylines(across, down)
        ]
        broken = np.flatnonzero(~np.isfinite(y))
        if len(broken):
            left, top = float(across[broken[0]]), EDGE + 4.0
            parts.append(
                f'<path d="M{left - 3:.1f} {top - 3:.1f}l6 6m0 -6l-6 6" stroke="{BROKEN}" stroke-width="2" '
                'stroke-linecap="round"/>'
            )
    return "".join([*parts, "</svg>"])


def row_sparkline(values: Floats, limits: tuple[float, float]) -> SafeString:
    """Evenly spaced values, float64[N], as SVG in a row of a table; empty without any finite one.

    It follows the theme of the page. Values that are not finite are left out, so that sampled statistics are
    a curve, too.
    """
    seen = np.flatnonzero(np.isfinite(values))
    if not len(seen):
        return SafeString("")
    across = seen / max(1, len(values) - 1) * ROW_WIDTH
    (points,) = _polylines(across, _down(values[seen], limits, ROW_HEIGHT, ROW_EDGE))
    return format_html(
        '<svg class="tspark" viewBox="0 0 {} {}" aria-hidden="true"><polyline points="{}"/></svg>',
        ROW_WIDTH,
        ROW_HEIGHT,
        points,
    )


def _down(values: Floats, limits: tuple[float, float], height: int, edge: int) -> Floats:
    """Pixels from the top, float64[N], of values that are clipped to the limits."""
    low, high = limits
    share = (np.clip(values, low, high) - low) / ((high - low) or 1.0)
    return np.asarray(edge + (1.0 - share) * (height - 2 * edge))


def _polylines(across: Floats, down: Floats) -> list[str]:
    """The points of each stretch that is finite."""
    return [
        " ".join(f"{across[i]:.1f},{down[i]:.1f}" for i in piece) for piece in stretches(np.isfinite(down))
    ]


def stretches(mask: NDArray[np.bool_]) -> list[range]:
    """The index ranges of consecutive True."""
    padded = np.concatenate(([False], mask, [False]))
    changes = np.flatnonzero(padded[1:] != padded[:-1])
    return [range(int(first), int(last)) for first, last in zip(changes[::2], changes[1::2], strict=True)]
