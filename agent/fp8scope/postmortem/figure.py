"""Line charts as SVG, for a report that is read without a browser's scripts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 28, 36
MAX_POINTS = 2000


@dataclass(frozen=True)
class DocumentFigure:
    """A chart: its title, and values over steps. Values that are not finite are marked at the top edge.

    `mark`: the step to mark with a vertical line, if any.
    """

    name: str
    title: str
    steps: Sequence[int]
    values: Sequence[float]
    mark: int | None = None

    def svg(self) -> str:
        """The chart as a standalone SVG document."""
        stride = max(1, len(self.steps) // MAX_POINTS)
        points = list(zip(self.steps[::stride], self.values[::stride], strict=True))
        finite = [value for _, value in points if math.isfinite(value)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        if low == high:
            low, high = low - abs(low) * 0.01 - 1e-9, high + abs(high) * 0.01 + 1e-9
        first, last = points[0][0], max(points[-1][0], points[0][0] + 1)

        def x(step: float) -> float:
            return LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)

        def y(value: float) -> float:
            return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

        line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points if math.isfinite(value))
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{escape(self.title)}" font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
            f'<text x="{LEFT}" y="18" font-weight="bold" fill="#1f2430">{escape(self.title)}</text>',
        ]
        for value in (low, (low + high) / 2, high):
            parts.append(
                f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
                f'stroke="#d9dde5"/><text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end" '
                f'fill="#5a6270">{value:.4g}</text>'
            )
        for step, anchor in ((first, "start"), (points[-1][0], "end")):
            parts.append(
                f'<text x="{x(step):.1f}" y="{HEIGHT - 14}" text-anchor="{anchor}" fill="#5a6270">'
                f"step {step}</text>"
            )
        if self.mark is not None and first <= self.mark <= last:
            parts.append(
                f'<line x1="{x(self.mark):.1f}" x2="{x(self.mark):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" '
                'stroke="#c0392b" stroke-dasharray="4 3"/>'
            )
        parts.append(f'<polyline points="{line}" fill="none" stroke="#2f6fde" stroke-width="1.5"/>')
        for step, value in points:
            if not math.isfinite(value):
                parts.append(f'<circle cx="{x(step):.1f}" cy="{TOP}" r="3" fill="#c0392b"/>')
        return "".join([*parts, "</svg>\n"])
