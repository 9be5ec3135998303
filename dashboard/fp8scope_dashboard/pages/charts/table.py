"""The data of a drawn figure as a table, for CSV and JSON.

The rows are what the chart shows: a long run is downsampled, and zooming gives the finer data.
"""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from fp8scope_dashboard.pages.charts.plain_figure import AnyFigure, PlainFigure, readable
from fp8scope_dashboard.text.numbers import json_number

Cell = float | str | None

# A spreadsheet runs a cell that begins with one of these as a formula.
FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True)
class Column:
    """One column: a name, the unit of its values ("" if unknown) and a cell for each row."""

    name: str
    unit: str
    cells: Sequence[Cell]


@dataclass(frozen=True)
class Table:
    """Columns of equal length; the first is the horizontal axis."""

    columns: Sequence[Column]

    def csv(self) -> str:
        """The table as CSV with a header. Missing values are empty; NaN and Infinity are words."""
        rows = zip(*(column.cells for column in self.columns), strict=True)
        return csv_of([[_header(column) for column in self.columns], *rows])

    def json(self, summary: str) -> bytes:
        """The table as JSON; NaN and infinities are strings, as in docs/wire.md."""
        columns = [
            {
                "name": column.name,
                "unit": column.unit,
                "values": [json_number(cell) if isinstance(cell, float) else cell for cell in column.cells],
            }
            for column in self.columns
        ]
        return orjson.dumps({"summary": summary, "columns": columns})


def csv_of(rows: Iterable[Sequence[Cell]]) -> str:
    """Rows as CSV, with no cell that a spreadsheet would run as a formula."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerows([_csv_cell(cell) for cell in row] for row in rows)
    return text.getvalue()


def table_of(drawn: AnyFigure) -> Table:
    """The data of a figure's traces, one row for each value of x and a column for each trace.

    A heat map has one row for each of its columns, and a column for each tensor. Traces with intervals for
    each point become rows of (series, x, y, low, high) instead.
    """
    figure = readable(drawn)
    traces = [trace for trace in figure.data if _is_data(figure, trace)]
    maps = [trace for trace in traces if trace.type == "heatmap"]
    if maps:
        return _of_map(figure, maps[0])
    if all(_has_distinct_x(trace) for trace in traces):
        return _wide(figure, traces)
    return _long(figure, traces)


def _is_data(figure: PlainFigure, trace: Any) -> bool:
    """Return whether a trace has values of the run, and is no mark or entry of the legend."""
    if trace.type == "heatmap":
        return True
    if trace.x is None or not any(value is not None for value in trace.x):
        return False
    # Marks are on a hidden axis, or at the edge of the chart.
    on_hidden_axis = figure.layout[_axis_name(trace.yaxis, "y")].visible is False
    return not on_hidden_axis and trace["cliponaxis"] is not False if trace.type == "scatter" else True


def _is_band(trace: Any) -> bool:
    """Return whether a trace outlines an interval: its upper limit, then its lower limit backwards."""
    x = _values(trace.x)
    return trace.type == "scatter" and trace.fill == "toself" and x == x[::-1]


def _has_distinct_x(trace: Any) -> bool:
    if _is_band(trace):
        return True
    x = list(trace.x)
    return trace.orientation != "h" and trace.error_y.array is None and len(set(x)) == len(x)


def _wide(figure: PlainFigure, traces: Sequence[Any]) -> Table:
    series = [series for trace in traces for series in _series_of(trace)]
    x = sorted({at for _, by_x, _ in series for at in by_x if at is not None}, key=_order)
    columns = [Column(_axis_title(figure, "x") or "x", "", x)]
    names = _distinct([name for name, _, _ in series])
    for (_, by_x, axis), name in zip(series, names, strict=True):
        columns.append(Column(name, _axis_title(figure, axis), [by_x.get(at) for at in x]))
    return Table(columns)


def _series_of(trace: Any) -> list[tuple[str, dict[Cell, Cell], str]]:
    """(name, values by x, axis of y): one series, or the two limits of an interval."""
    name, x, y, axis = _text(trace.name) or "value", _values(trace.x), _values(trace.y), trace.yaxis or "y"
    if not _is_band(trace):
        return [(name, dict(zip(x, y, strict=False)), axis)]
    half = len(x) // 2
    high, low = dict(zip(x[:half], y[:half], strict=True)), dict(zip(x[half:], y[half:], strict=True))
    return [(f"{name}, low", low, axis), (f"{name}, high", high, axis)]


def _long(figure: PlainFigure, traces: Sequence[Any]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for trace in traces:
        x, y = _named(figure, "x", _values(trace.x)), _named(figure, "y", _values(trace.y))
        up, down = _values(trace.error_y.array), _values(trace.error_y.arrayminus)
        for i, (at, value) in enumerate(zip(x, y, strict=False)):
            high = _sum(value, up[i] if i < len(up) else None, 1.0)
            low = _sum(value, down[i] if i < len(down) else None, -1.0)
            rows.append((_text(trace.name), at, value, low, high))
    titles = ("series", _axis_title(figure, "x") or "x", _axis_title(figure, "y") or "value", "low", "high")
    cells = list(zip(*rows, strict=True)) or [()] * len(titles)
    columns = [Column(title, "", values) for title, values in zip(titles, cells, strict=True)]
    return Table([column for column in columns if any(cell is not None for cell in column.cells)])


def _of_map(figure: PlainFigure, trace: Any) -> Table:
    # The colours of z may be logarithmic; customdata has the values.
    values = trace.z if trace.customdata is None else trace.customdata
    names = _distinct([_text(str(name)) for name in _row_names(figure, trace.y)])
    columns = [Column(_axis_title(figure, "x") or "x", "", _values(trace.x))]
    return Table(
        [*columns, *(Column(name, "", _values(row)) for name, row in zip(names, values, strict=True))]
    )


def _row_names(figure: PlainFigure, shown: Any) -> Any:
    """The names of the rows of a chart from `meta`, if its builder has set them; else what the axis shows."""
    meta = figure.layout.meta if isinstance(figure.layout.meta, Mapping) else {}
    return meta.get("names", shown)


def _named(figure: PlainFigure, letter: str, values: Sequence[Cell]) -> Sequence[Cell]:
    """The texts of an axis whose positions have names; of rows in full, whose labels may be shortened."""
    axis = figure.layout[f"{letter}axis"]
    if axis.tickvals is None or axis.ticktext is None:
        return values
    texts = _row_names(figure, axis.ticktext) if letter == "y" else axis.ticktext
    names = {float(at): _text(str(text)) for at, text in zip(axis.tickvals, texts, strict=False)}
    return [names.get(float(round(value)), value) if isinstance(value, float) else value for value in values]


def _values(array: Any) -> list[Cell]:
    if array is None:
        return []
    return [_cell(value) for value in (array.tolist() if isinstance(array, np.ndarray) else array)]


def _cell(value: Any) -> Cell:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _sum(value: Cell, part: Cell, sign: float) -> Cell:
    return value + sign * part if isinstance(value, float) and isinstance(part, float) else None


def _order(value: Cell) -> tuple[bool, float, str]:
    return (True, 0.0, value) if isinstance(value, str) else (False, value or 0.0, "")


def _axis_title(figure: PlainFigure, axis: str) -> str:
    """The title of an axis such as x or y2; of panels with one x axis, the lowest has the title."""
    title = figure.layout[_axis_name(axis, axis[0])].title.text
    if title or axis[0] == "y":
        return _text(title)
    others = [figure.layout[name].title.text for name in figure.layout if name.startswith("xaxis")]
    return _text(next((other for other in others if other), ""))


def _axis_name(axis: str | None, letter: str) -> str:
    """The key in the layout of an axis such as y2; of the first one without a name."""
    return f"{letter}axis{(axis or letter)[1:]}"


def _text(name: str | None) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", name or ""))


def _distinct(names: Sequence[str]) -> list[str]:
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return result


def _header(column: Column) -> str:
    return f"{column.name} [{column.unit}]" if column.unit and column.unit != column.name else column.name


def _csv_cell(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, str):
        return f"'{cell}" if cell.startswith(FORMULA) else cell
    return _number(cell)


def _number(value: float) -> str:
    plain = json_number(value)
    if isinstance(plain, str):
        return plain
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
