"""The parts of a figure as SVG elements."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

import numpy as np
from PIL import Image

from fp8scope_dashboard.pages.figures.frozen.axes import Axis, Floats, numbers

DASHES: Final = {"dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3", "longdash": "11 4"}
# Plotly's default; the dashboard's figures name theirs.
FALLBACK: Final = "#4a5565"


def stroke(line: Mapping[str, Any], default: str = FALLBACK) -> str:
    """The attributes of a line."""
    dash = DASHES.get(str(line.get("dash", "")), "")
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    colour = escape(str(line.get("color") or default))
    return f'stroke="{colour}" stroke-width="{float(line.get("width", 1.5)):g}"{dashes}'


def path(x: Floats, y: Floats, *, shape: str = "", closed: bool = False) -> str:
    """The data of an SVG path through points; it is interrupted where one is NaN."""
    if shape == "hv" and len(x) > 1:
        x, y = np.repeat(x, 2)[1:], np.repeat(y, 2)[:-1]
    parts, is_open = [], False
    for at, to, usable in zip(x, y, np.isfinite(x) & np.isfinite(y), strict=True):
        if not usable:
            is_open = closed and is_open
            continue
        parts.append(f"{'L' if is_open else 'M'}{at:.1f} {to:.1f}")
        is_open = True
    return "".join(parts) + ("Z" if closed and parts else "")


def scatter(trace: Mapping[str, Any], x_axis: Axis, y_axis: Axis) -> str:
    """Lines, markers, error bars and the filled area of a trace."""
    x, y = x_axis.at(numbers(trace.get("x"))), y_axis.at(numbers(trace.get("y")))
    mode, line = str(trace.get("mode", "lines")), trace.get("line") or {}
    parts = []
    if fill := trace.get("fill"):
        outline = path(x, y, closed=True)
        if fill == "tozeroy":
            outline = _down_to(x, y, float(y_axis.at([0.0])[0]), y_axis)
        parts.append(f'<path d="{outline}" fill="{escape(str(trace.get("fillcolor") or "none"))}"/>')
    if "lines" in mode and float(line.get("width", 2)) > 0:
        data = path(x, y, shape=str(line.get("shape", "")))
        parts.append(f'<path d="{data}" fill="none" {stroke(line)} stroke-linejoin="round"/>')
    for name, axis in (("error_x", x_axis), ("error_y", y_axis)):
        if error := trace.get(name):
            parts.append(_error_bars(trace, error, name == "error_x", axis, x, y))
    if "markers" in mode:
        parts.append(_markers(trace.get("marker") or {}, x, y))
    return "".join(parts)


def _down_to(x: Floats, y: Floats, zero: float, axis: Axis) -> str:
    """The area between a line and zero."""
    usable = np.isfinite(x) & np.isfinite(y)
    if not usable.any():
        return ""
    if not np.isfinite(zero):
        zero = axis.start
    x, y = x[usable], y[usable]
    return path(np.concatenate([x, x[::-1]]), np.concatenate([y, np.full(len(x), zero)]), closed=True)


def _error_bars(
    trace: Mapping[str, Any], error: Mapping[str, Any], sideways: bool, axis: Axis, x: Floats, y: Floats
) -> str:
    values = numbers(trace.get("x" if sideways else "y"))
    up = numbers(error.get("array"))
    down = numbers(error["arrayminus"]) if error.get("arrayminus") is not None else up
    low, high = axis.at(values - down), axis.at(values + up)
    bars = zip(x, y, low, high, strict=True)
    data = [
        f"M{a:.1f} {at_y:.1f}L{b:.1f} {at_y:.1f}" if sideways else f"M{at_x:.1f} {a:.1f}L{at_x:.1f} {b:.1f}"
        for at_x, at_y, a, b in bars
        if np.isfinite([at_x, at_y, a, b]).all()
    ]
    line = {"color": error.get("color"), "width": error.get("thickness", 1.6)}
    return f'<path d="{"".join(data)}" fill="none" {stroke(line)}/>' if data else ""


def _markers(marker: Mapping[str, Any], x: Floats, y: Floats) -> str:
    colours = marker.get("color") or FALLBACK
    radius = float(marker.get("size", 6)) / 2.0 if not isinstance(marker.get("size"), list) else 3.0
    symbol = str(marker.get("symbol", "circle"))
    parts = []
    for index, (at_x, at_y) in enumerate(zip(x, y, strict=True)):
        if not (np.isfinite(at_x) and np.isfinite(at_y)):
            continue
        colour = colours if isinstance(colours, str) else str(colours[index % len(colours)])
        parts.append(_symbol(symbol, float(at_x), float(at_y), radius, escape(colour)))
    return "".join(parts)


_CORNERS: Final[Mapping[str, Sequence[tuple[float, float]]]] = {
    "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
    "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
    "triangle-up": ((0, -1.2), (1.1, 0.9), (-1.1, 0.9)),
    "triangle-down": ((0, 1.2), (1.1, -0.9), (-1.1, -0.9)),
}


def _symbol(symbol: str, x: float, y: float, radius: float, colour: str) -> str:
    if symbol.startswith("x"):
        return (
            f'<path d="M{x - radius:.1f} {y - radius:.1f}l{2 * radius:.1f} {2 * radius:.1f}m0 '
            f'{-2 * radius:.1f}l{-2 * radius:.1f} {2 * radius:.1f}" stroke="{colour}" stroke-width="2"/>'
        )
    if symbol in _CORNERS:
        corners = " ".join(f"{x + radius * a:.1f},{y + radius * b:.1f}" for a, b in _CORNERS[symbol])
        return f'<polygon points="{corners}" fill="{colour}"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour}"/>'


def shape(
    options: Mapping[str, Any], x_axis: Axis, y_axis: Axis, area: tuple[float, float, float, float]
) -> str:
    """A line or rectangle, in data coordinates or shares of the area (left, top, right, bottom)."""
    left, top, right, bottom = area

    def place(value: Any, reference: str, axis: Axis, ends: tuple[float, float]) -> float:
        if reference == "paper" or reference.endswith("domain"):
            return ends[0] + float(value) * (ends[1] - ends[0])
        return float(axis.at([float(value)])[0])

    x_ref, y_ref = str(options.get("xref", "x")), str(options.get("yref", "y"))
    x0, x1 = (place(options[key], x_ref, x_axis, (left, right)) for key in ("x0", "x1"))
    y0, y1 = (place(options[key], y_ref, y_axis, (bottom, top)) for key in ("y0", "y1"))
    if not np.isfinite([x0, x1, y0, y1]).all():
        return ""
    line = options.get("line") or {}
    if options.get("type") == "line":
        return f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" fill="none" {stroke(line)}/>'
    outline = "" if not float(line.get("width", 0)) else f" {stroke(line)}"
    return (
        f'<rect x="{min(x0, x1):.1f}" y="{min(y0, y1):.1f}" width="{abs(x1 - x0):.1f}" '
        f'height="{abs(y1 - y0):.1f}" fill="{escape(str(options.get("fillcolor") or "none"))}"{outline}/>'
    )


def heat_map(trace: Mapping[str, Any], x_axis: Axis, y_axis: Axis) -> str:
    """A heat map as an image of one pixel a cell, stretched over its range; cells must be evenly spaced."""
    z = _matrix(trace["z"])
    x, y = x_axis.at(numbers(trace["x"])), y_axis.at(numbers(trace["y"]))
    if not z.size:
        return ""
    half_x = abs(x[-1] - x[0]) / max(1, len(x) - 1) / 2.0 or abs(x_axis.end - x_axis.start) / 2.0
    half_y = abs(y[-1] - y[0]) / max(1, len(y) - 1) / 2.0 or abs(y_axis.end - y_axis.start) / 2.0
    if len(y) > 1 and y[0] > y[-1]:
        z = z[::-1]
    if len(x) > 1 and x[0] > x[-1]:
        z = z[:, ::-1]
    low, high = float(trace.get("zmin", np.nanmin(z))), float(trace.get("zmax", np.nanmax(z)))
    pixels = _colours((z - low) / ((high - low) or 1.0), trace["colorscale"])
    stored = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(stored, "PNG", optimize=True)
    return (
        f'<image x="{x.min() - half_x:.1f}" y="{y.min() - half_y:.1f}" '
        f'width="{abs(x[-1] - x[0]) + 2 * half_x:.1f}" height="{abs(y[-1] - y[0]) + 2 * half_y:.1f}" '
        'preserveAspectRatio="none" style="image-rendering:pixelated" '
        f'href="data:image/png;base64,{base64.b64encode(stored.getvalue()).decode()}"/>'
    )


def _matrix(values: Any) -> Floats:
    if isinstance(values, Mapping):
        return numbers(values)
    return np.array([numbers(row) for row in values], np.float64)


def _colours(shares: Floats, scale: Sequence[Sequence[Any]]) -> Any:
    """RGBA of shares from 0 to 1, uint8[rows, columns, 4]; transparent where a share is NaN."""
    stops = [float(stop) for stop, _ in scale]
    channels = [[int(str(colour)[i : i + 2], 16) for _, colour in scale] for i in (1, 3, 5)]
    clipped = np.clip(np.nan_to_num(shares), 0.0, 1.0)
    layers = [np.interp(clipped, stops, channel) for channel in channels]
    return np.stack([*layers, np.where(np.isnan(shares), 0.0, 255.0)], axis=-1).round().astype(np.uint8)
