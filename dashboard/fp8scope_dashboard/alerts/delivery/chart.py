"""Draw an alert's evidence as a PNG, for e-mails and chats. The page has the same chart, with more detail.

`draw` is a pure function of what the alert stores. It needs no browser and no fonts of the system.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.text.numbers import LARGEST
from fp8scope_dashboard.text.onsets import steps_in_words
from fp8scope_dashboard.text.ticks import ticks

# Pixels of the picture. It is drawn SCALE times larger and reduced, which smooths the lines.
WIDTH, HEIGHT, SCALE = 1200, 600, 2
LEFT, RIGHT, TOP, BOTTOM = 120, 24, 96, 74
TITLE_SIZE, LABEL_SIZE = 26, 22
WHITE, INK, GREY, GRID = "#ffffff", "#1f2430", "#5c6470", "#e3e6ea"
ONSET, THRESHOLD, BASELINE = "#c0213a", "#5c6470", "#0b63b5"
# The run or its worst tensors: shades, because the colours of the pages mean arms. Dashes tell them apart.
COLOURS = ("#1b2330", "#566273", "#7d889a")
DASHES = ((), (16, 8), (4, 7))
# Baselines beyond these only make the chart unreadable.
MAX_BASELINES = 3
# Positive values that span more than this factor are drawn on a logarithmic axis.
WIDE = 1_000.0


@dataclass(frozen=True)
class ChartLine:
    """One line: steps and values float64[N], with NaN and infinities where the run had them.

    `dash` has the lengths of a dash and of the gap after it, in pixels; empty for a solid line.
    """

    label: str
    colour: str
    steps: Floats
    values: Floats
    dash: Sequence[int] = ()


@dataclass
class _Plot:
    """The mapping from steps and values to pixels of the enlarged picture."""

    steps: tuple[float, float]
    values: tuple[float, float]
    logarithmic: bool
    image: Image.Image = field(
        default_factory=lambda: Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), WHITE)
    )

    def __post_init__(self) -> None:
        self.pen = ImageDraw.Draw(self.image)

    def x(self, step: float) -> float:
        first, last = self.steps
        return SCALE * (LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / (last - first))

    def y(self, value: float) -> float:
        low, high = (self._axis(bound) for bound in self.values)
        share = (self._axis(value) - low) / (high - low)
        return SCALE * (HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(1.0, max(0.0, share)))

    def _axis(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.logarithmic else value

    def text(self, x: float, y: float, words: str, colour: str, anchor: str, size: int = LABEL_SIZE) -> None:
        self.pen.text((x * SCALE, y * SCALE), words, fill=colour, font=_font(size * SCALE), anchor=anchor)


def draw(
    evidence: Mapping[str, Any],
    *,
    title: str,
    onset: int,
    detected: int,
    threshold: float | None,
    after: int | None = None,
) -> bytes | None:
    """Draw the series around an onset. None if the evidence has no series with a finite value.

    Args:
        evidence: `series` and `baseline`, lists of {"name", "steps", "values"} as alerts/evidence.py stores
            them.
        title: one line above the chart; cut if it is too long.
        threshold: in the unit of the values; drawn only if it is within reach of them.
    """
    lines = lines_of(evidence)
    finite = [line.values[np.isfinite(line.values)] for line in lines]
    values = np.concatenate(finite) if finite else np.empty(0)
    if not len(values):
        return None
    is_rate = str(evidence["series"][0]["name"]).endswith("_rate")
    low, high = float(values.min()), float(values.max())
    if threshold is not None and math.isfinite(threshold) and _is_near(threshold, low, high):
        low, high = min(low, threshold), max(high, threshold)
    else:
        threshold = None
    logarithmic = low > 0.0 and high / low > WIDE
    steps = np.concatenate([line.steps for line in lines])
    first, last = min(float(steps.min()), onset), max(float(steps.max()), detected)
    plot = _Plot(
        (first, last if last > first else first + 1.0), _with_margin(low, high, logarithmic), logarithmic
    )
    _draw_axes(plot, "share of elements" if is_rate else "loss" if _is_loss(evidence) else "value")
    _draw_onset(plot, onset, steps_in_words(onset, after), detected)
    if threshold is not None:
        _draw_threshold(plot, threshold)
    for line in reversed(lines):
        _draw_line(plot, line)
    _draw_legend(plot, lines)
    plot.text(24, 34, _shortened(plot, title), INK, "lm", TITLE_SIZE)
    return _png(plot.image)


def lines_of(evidence: Mapping[str, Any]) -> list[ChartLine]:
    """The lines to draw: the tensors' or else the loss, then the baselines'."""
    series = [entry for entry in evidence.get("series", ()) if entry.get("steps")]
    tensors = [entry for entry in series if "tensor" in entry]
    lines = []
    # The loss beside another scalar has another unit.
    chosen = tensors or series[:1]
    labels = _without_shared_beginning([str(entry.get("tensor", entry["name"])) for entry in chosen])
    for line, label, colour, dash in zip(chosen, labels, COLOURS, DASHES, strict=False):
        lines.append(_line(line, label, colour, dash))
    if not tensors:
        baselines = [entry for entry in evidence.get("baseline", ()) if entry.get("steps")]
        lines += [_line(baseline, str(baseline["name"]), BASELINE) for baseline in baselines[:MAX_BASELINES]]
    return lines


def _without_shared_beginning(names: list[str]) -> list[str]:
    """Names without the modules that all of them begin with, e.g. `model.layers.`."""
    if len(names) < 2:
        return names
    shared = os.path.commonprefix(names)
    return [name[shared.rfind(".") + 1 :] for name in names]


def _line(series: Mapping[str, Any], label: str, colour: str, dash: Sequence[int] = ()) -> ChartLine:
    # The stored form has "NaN" and "Infinity"; float() accepts both.
    values = np.array([float(value) for value in series["values"]], np.float64)
    values[np.abs(values) > LARGEST] = np.inf
    return ChartLine(label, colour, np.asarray(series["steps"], np.float64), values, dash)


def _is_loss(evidence: Mapping[str, Any]) -> bool:
    return all(series["name"] == "loss" for series in evidence["series"])


def _is_near(threshold: float, low: float, high: float) -> bool:
    reach = max(high - low, abs(high), 1e-300)
    return low - reach <= threshold <= high + reach


def _with_margin(low: float, high: float, logarithmic: bool) -> tuple[float, float]:
    if logarithmic:
        return low / 1.3, high * 1.3
    margin = 0.07 * (high - low) or 0.05 * abs(high) or 1.0
    return (0.0 if 0.0 <= low < margin else low - margin), high + margin


def _draw_axes(plot: _Plot, name: str) -> None:
    left, right, bottom = SCALE * LEFT, SCALE * (WIDTH - RIGHT), SCALE * (HEIGHT - BOTTOM)
    for value in ticks(*plot.values, plot.logarithmic):
        y = plot.y(value)
        plot.pen.line([(left, y), (right, y)], fill=GRID, width=SCALE)
        plot.text(LEFT - 10, y / SCALE, f"{value:.4g}", GREY, "rm")
    for step in ticks(*plot.steps):
        if step == int(step):
            x = plot.x(step)
            plot.pen.line([(x, bottom), (x, bottom + 6 * SCALE)], fill=GREY, width=SCALE)
            plot.text(x / SCALE, HEIGHT - BOTTOM + 12, f"{int(step):,}", GREY, "mt")
    plot.pen.line([(left, SCALE * TOP), (left, bottom), (right, bottom)], fill=GREY, width=SCALE)
    plot.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "step", GREY, "mb")
    plot.text(24, TOP - 10, name, GREY, "lb")


def _draw_onset(plot: _Plot, onset: int, in_words: str, detected: int) -> None:
    top, bottom = SCALE * TOP, SCALE * (HEIGHT - BOTTOM)
    x, end = plot.x(onset), max(plot.x(detected), plot.x(onset) + 2 * SCALE)
    shade = Image.new("RGB", plot.image.size, ONSET)
    mask = Image.new("L", plot.image.size, 0)
    ImageDraw.Draw(mask).rectangle([x, top, end, bottom], fill=26)
    plot.image.paste(shade, mask=mask)
    for y in range(top, bottom, 10 * SCALE):
        plot.pen.line([(x, y), (x, min(bottom, y + 5 * SCALE))], fill=ONSET, width=2 * SCALE)
    # On the side with more room.
    is_right = x > SCALE * (LEFT + WIDTH) / 2
    plot.text(
        x / SCALE + (-8 if is_right else 8), TOP + 6, f"onset {in_words}", ONSET, "rt" if is_right else "lt"
    )


def _draw_threshold(plot: _Plot, threshold: float) -> None:
    y = plot.y(threshold)
    for x in range(SCALE * LEFT, SCALE * (WIDTH - RIGHT), 18 * SCALE):
        plot.pen.line([(x, y), (x + 10 * SCALE, y)], fill=THRESHOLD, width=2 * SCALE)
    plot.text(LEFT + 8, y / SCALE - 4, f"threshold {threshold:.4g}", THRESHOLD, "lb")


def _draw_line(plot: _Plot, line: ChartLine) -> None:
    for part in _finite_parts(line.values):
        points = [(plot.x(line.steps[i]), plot.y(line.values[i])) for i in part]
        if len(points) == 1:
            _dot(plot, *points[0], line.colour)
        else:
            for dash in _dashes(points, line.dash):
                plot.pen.line(dash, fill=line.colour, width=3 * SCALE, joint="curve")
    for i in np.flatnonzero(~np.isfinite(line.values)):
        # At the upper edge: the value is beyond every axis.
        _dot(plot, plot.x(line.steps[i]), SCALE * (TOP + 5.0), ONSET)


def _dashes(
    points: Sequence[tuple[float, float]], dash: Sequence[int]
) -> Iterator[list[tuple[float, float]]]:
    """The dashes of a line through these points, of the enlarged picture; the line itself if it is solid."""
    if not dash:
        yield list(points)
        return
    x, y = np.array(points).T
    along = np.concatenate([[0.0], np.cumsum(np.hypot(np.diff(x), np.diff(y)))])
    for start in np.arange(0.0, along[-1], float(sum(dash)) * SCALE):
        end = min(start + dash[0] * SCALE, along[-1])
        inner = along[(along > start) & (along < end)]
        places = np.concatenate([[start], inner, [end]])
        yield list(zip(np.interp(places, along, x), np.interp(places, along, y), strict=True))


def _finite_parts(values: Floats) -> Iterator[Sequence[int]]:
    """The index ranges of consecutive finite values."""
    finite = np.isfinite(values)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], finite, [False]])))
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        yield range(int(start), int(end))


def _dot(plot: _Plot, x: float, y: float, colour: str) -> None:
    radius = 5 * SCALE
    plot.pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=colour)


def _draw_legend(plot: _Plot, lines: Sequence[ChartLine]) -> None:
    entries: list[tuple[str, str, Callable[[float, float], None]]] = []
    for line in lines:
        entries.append((line.label, line.colour, partial(_stroke, plot, line)))
    if any(not np.isfinite(line.values).all() for line in lines):
        entries.append(("NaN or infinite", ONSET, lambda x, y: _dot(plot, x + 13 * SCALE, y, ONSET)))
    # The name of the vertical axis is on the left.
    x, y, most = float(WIDTH - RIGHT), float(TOP - 22), (WIDTH - 240) / len(entries) - 74
    for label, colour, sign in reversed(entries):
        label = _cut_middle(plot, label, most)
        x -= _width(plot, label)
        plot.text(x, y, label, colour, "lm")
        x -= 50
        sign(x * SCALE, y * SCALE)
        x -= 22


def _stroke(plot: _Plot, line: ChartLine, x: float, y: float) -> None:
    for dash in _dashes([(x, y), (x + 40 * SCALE, y)], line.dash):
        plot.pen.line(dash, fill=line.colour, width=4 * SCALE)


def _shortened(plot: _Plot, title: str) -> str:
    return _cut(plot, " ".join(title.split()), WIDTH - 48, TITLE_SIZE)


def _cut(plot: _Plot, words: str, most: float, size: int = LABEL_SIZE) -> str:
    if _width(plot, words, size) <= most:
        return words
    while len(words) > 4 and _width(plot, f"{words}...", size) > most:
        words = words[:-1]
    return f"{words}..."


def _cut_middle(plot: _Plot, words: str, most: float) -> str:
    """Tensors' names differ at both ends."""
    length = len(words)
    short = words
    while length > 4 and _width(plot, short) > most:
        length -= 1
        short = f"{words[: length // 2]}...{words[-(length - length // 2) :]}"
    return short


def _width(plot: _Plot, words: str, size: int = LABEL_SIZE) -> float:
    return plot.pen.textlength(words, font=_font(size * SCALE)) / SCALE


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    # Pillow brings this font.
    return ImageFont.load_default(size)


def _png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    reduced = image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)
    reduced.save(stream, "PNG")
    return stream.getvalue()
