"""Series, heat maps and histograms from the server, as Arrow where pyarrow is installed, else as JSON.

Both have the same values.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

import numpy as np

from fp8scope.client.connection import ClientError, Connection
from fp8scope.client.fields import NOT_FINITE, number_of
from fp8scope.client.history import RunHistory, StatisticMap, TensorHistograms, Times

MAX_POINTS: Final = 100_000
"""The most points of one answer."""
AS_ARROW: Final = 10_000
"""Fewer points are read as JSON: importing pyarrow takes longer."""
MAX_PARTS: Final = 10_000


@cache
def has_arrow() -> bool:
    """Return whether pyarrow can be imported. pip may leave it broken beside another NumPy."""
    if importlib.util.find_spec("pyarrow") is None:
        return False
    try:
        import pyarrow  # noqa: F401  Large, and not needed by most programs.
    except ImportError:
        return False
    return True


def read_series(
    connection: Connection,
    run: str,
    series: Mapping[str, str],
    first: int | None,
    last: int | None,
    points: int,
    *,
    times: bool = False,
) -> RunHistory:
    """A series of a run in at most `points` points. `series` names a scalar, or a tensor and a statistic."""
    path, query = f"/runs/{run}/series", {**series, "first": first, "last": last, "points": points}
    if times:
        query["times"] = "true"
    name = series.get("scalar") or f"{series['tensor']} {series['statistic']}"
    if points > AS_ARROW and has_arrow():
        table, facts = _table(connection.arrow(path, query))
        return RunHistory(
            name=name,
            steps=table.column("step").to_numpy(),
            values=table.column("value").to_numpy(),
            thinned=facts["thinned"] == "true",
            how=facts.get("how", ""),
            times=_times(table.column("time").to_numpy()) if times else None,
        )
    answer = connection.json(path, query)
    return RunHistory(
        name=name,
        steps=np.array(answer["steps"], np.int64),
        values=_numbers(answer["values"]),
        thinned=answer["thinned"],
        how=answer.get("how", ""),
        times=_times(np.array(answer["times"], "datetime64[us]")) if times else None,
    )


def _times(times: Any) -> Times:
    return np.asarray(times, "datetime64[us]")


def read_every_step(
    connection: Connection,
    run: str,
    series: Mapping[str, str],
    first: int | None,
    last: int | None,
    *,
    times: bool = False,
) -> RunHistory:
    """Every stored step of a series, in as many requests as that takes.

    Where retention has left only roll-ups, the series stays thinned.
    """
    whole = read_series(connection, run, series, first, last, MAX_POINTS, times=times)
    if not whole.thinned:
        return whole
    begin = int(whole.steps[0]) if first is None else first
    end = int(whole.steps[-1]) if last is None else last
    parts = [
        read_series(connection, run, series, low, high, MAX_POINTS, times=times)
        for low, high in _ranges(begin, end)
    ]
    is_thinned = any(part.thinned for part in parts)
    return RunHistory(
        name=whole.name,
        steps=np.concatenate([part.steps for part in parts]),
        values=np.concatenate([part.values for part in parts]),
        thinned=is_thinned,
        how=whole.how if is_thinned else "",
        times=np.concatenate([part.times for part in parts if part.times is not None]) if times else None,
    )


def _ranges(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most MAX_POINTS steps. Raises ClientError for more than MAX_PARTS of them."""
    if (last - first) // MAX_POINTS >= MAX_PARTS:
        raise ClientError(f"Steps {first} to {last} are too many to read each: name a smaller range.")
    for low in range(first, last + 1, MAX_POINTS):
        yield low, min(low + MAX_POINTS - 1, last)


def read_map(
    connection: Connection, run: str, statistic: str, first: int | None, last: int | None, columns: int
) -> StatisticMap:
    """The heat map of a statistic in at most `columns` columns."""
    query = {"statistic": statistic, "first": first, "last": last, "columns": columns}
    path = f"/runs/{run}/heatmap"
    if has_arrow():
        table, facts = _table(connection.arrow(path, query))
        cells = table.column("values").combine_chunks()
        names = table.column("tensor").to_pylist()
        values = cells.flatten().to_numpy(zero_copy_only=False).reshape(len(names), -1)
        edges: Any = _list_of(facts["step_edges"])
    else:
        answer = connection.json(path, {**query, "format": "json"})
        names, edges = answer["tensors"], answer["step_edges"]
        width = max(0, len(edges) - 1)
        values = np.array([_numbers(row) for row in answer["values"]], np.float64).reshape(len(names), width)
    edges = np.array(edges, np.int64)
    return StatisticMap(statistic=statistic, tensors=tuple(names), step_edges=edges, values=values)


def _list_of(text: str) -> list[int]:
    """The whole numbers of a JSON list."""
    return [int(part) for part in text.strip("[]").split(",") if part.strip()]


def read_histograms(
    connection: Connection, run: str, tensor: str, first: int | None, last: int | None, limit: int
) -> TensorHistograms:
    """The histograms of a tensor: of many sampled steps some that are evenly spread."""
    query = {"tensor": tensor, "first": first, "last": last, "limit": limit}
    answer = connection.json(f"/runs/{run}/histograms", query)
    read, low = answer["histograms"], answer["min_exponent"]
    bins = len(read[0]["counts"]) if read else 0
    return TensorHistograms(
        tensor=tensor,
        steps=np.array([row["step"] for row in read], np.int64),
        exponents=np.arange(low, low + bins, dtype=np.int64),
        counts=np.array([row["counts"] for row in read], np.float64).reshape(len(read), bins),
        zeros=np.array([row["zeros"] for row in read], np.float64),
        nonfinite=np.array([row["nonfinite"] for row in read], np.float64),
    )


def _numbers(values: list[Any]) -> Any:
    """float64[N] of the values of an answer; null becomes NaN."""
    if not any(value is None or value in NOT_FINITE for value in values):
        return np.array(values, np.float64)
    numbers = [number_of(value) for value in values]
    return np.array([np.nan if number is None else number for number in numbers], np.float64)


def _table(body: bytes) -> tuple[Any, dict[str, str]]:
    """The table of an Arrow stream, and the metadata of its schema."""
    import pyarrow  # As in has_arrow.

    with pyarrow.ipc.open_stream(body) as stream:
        table = stream.read_all()
    metadata = table.schema.metadata or {}
    return table, {name.decode(): text.decode() for name, text in metadata.items()}
