"""Convert a JSON batch of a small client into an Arrow stream, which is then validated and stored."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import numpy as np

from fp8scope_dashboard.ingest.batch import Batch, check_protocol, read_arrow
from fp8scope_dashboard.telemetry.codec import ChunkData, encode
from fp8scope_dashboard.wire import limits
from fp8scope_dashboard.wire.errors import (
    CatalogueGapRefusalError,
    InvalidError,
    MalformedError,
    TooLargeError,
)

NOT_FINITE = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        MalformedError: the body is not JSON, not an object, or nested too deeply.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedError("The body is not valid JSON.", "Send one JSON object, UTF-8.") from error
    if not isinstance(document, dict):
        raise MalformedError("The body is not a JSON object.", "Send one JSON object, UTF-8.")
    return document


def writer_in(document: Mapping[str, Any]) -> UUID:
    """Return the writer of a batch. Raises InvalidError if it is not a UUID."""
    try:
        return UUID(document["writer"])
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise InvalidError("writer must be a UUID.", "Each process of the run has its own.") from error


def read_json(document: Mapping[str, Any], run: UUID, positions: Mapping[str, int]) -> Batch:
    """Validate a batch. `positions` maps each tensor name to its position in the catalogue of the writer.

    Raises:
        RefusalError: the batch is invalid; the subclass and message say why.
    """
    if "protocol" not in document:
        raise MalformedError("The batch lacks protocol.", 'Send {"protocol": 1, "writer": ..., ...}.')
    check_protocol(str(document["protocol"]))
    metadata = {
        "fp8scope.protocol": str(document["protocol"]),
        "fp8scope.run": str(run),
        "fp8scope.writer": str(writer_in(document)),
        "fp8scope.seq": str(_integer(document.get("seq"))),
        "fp8scope.dropped": str(_integer(document.get("dropped", 0))),
    }
    rows = document.get("rows")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise InvalidError("rows must be a non-empty list of objects.", "Send one object per step.")
    if len(rows) > limits.ROWS:
        raise TooLargeError(f"The batch has more than {limits.ROWS} rows.", "Split it into several batches.")
    return read_arrow(encode(_to_arrays(rows, positions), metadata=metadata))


def _to_arrays(rows: Sequence[Mapping[str, Any]], positions: Mapping[str, int]) -> ChunkData:
    scalars = [_object(row, "scalars") for row in rows]
    tensors = [_object(row, "tensors") for row in rows]
    names = sorted(set().union(*scalars))
    statistics = sorted(set().union(*tensors))
    width = _width(tensors, positions)
    _check_size(len(rows), len(names), len(statistics), width)
    values = {name: np.full(len(rows), np.nan) for name in names}
    logged = {name: np.zeros(len(rows), bool) for name in names}
    matrices = {name: np.full((len(rows), width), np.nan) for name in statistics}
    for i, row in enumerate(scalars):
        for name, value in row.items():
            if value is not None:
                values[name][i], logged[name][i] = _number(value), True
    for i, row in enumerate(tensors):
        for statistic in row:
            for tensor, value in _object(row, statistic).items():
                if value is not None:
                    matrices[statistic][i, positions[tensor]] = _number(value)
    steps = np.array([_step(row) for row in rows], np.int64)
    return ChunkData(
        steps=steps,
        times=np.array([_time(row) for row in rows]),
        scalars=values,
        logged=logged,
        statistics=matrices,
    )


def _object(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = row.get(key) or {}
    if not isinstance(value, dict):
        raise InvalidError(f"{key[:100]} must be an object.", "See docs/wire.md.")
    return value


def _width(tensors: Sequence[Mapping[str, Any]], positions: Mapping[str, int]) -> int:
    """The list length needed for every named tensor."""
    named: set[str] = set()
    for row in tensors:
        for statistic in row:
            named |= _object(row, statistic).keys()
    unknown = named - positions.keys()
    if unknown:
        raise CatalogueGapRefusalError(
            f"The tensor {min(unknown)[:200]!r} is not in the catalogue of this writer.",
            "Register its tensors first: POST .../writers/{writer}/tensors",
        )
    return 1 + max((positions[name] for name in named), default=-1)


def _check_size(rows: int, scalars: int, statistics: int, width: int) -> None:
    """Bound the arrays: they are as wide as the catalogue, however few values the batch has."""
    cells = rows * (scalars + statistics * width)
    if scalars > limits.SCALARS or statistics > limits.STATISTICS or cells * 8 > limits.DECOMPRESSED_BYTES:
        raise TooLargeError(
            f"{rows} rows of {scalars} scalars and {statistics} statistics of {width} tensors are too many.",
            "Split it into several batches, or send it as Arrow.",
        )


def _number(value: object) -> float:
    if isinstance(value, str) and value in NOT_FINITE:
        return NOT_FINITE[value]
    # Booleans are ints in Python; json.loads accepts a bare NaN, which JSON does not have.
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise InvalidError(
            f"{str(value)[:50]!r} is not a number.", 'Write "NaN", "Infinity" or "-Infinity" as strings.'
        )
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidError(
            "A number is too large for float64.", 'Write "Infinity" for an infinite value.'
        ) from error


def _integer(value: Any) -> Any:
    """The number as an int if it is whole: JSON has one kind of number, and 330.0 is an integer there."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _step(row: Mapping[str, Any]) -> int:
    step = _integer(row.get("step"))
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= limits.MAX_INT:
        raise InvalidError("step must be an integer from 0 to 2^63 - 1.", "Send one row per step.")
    return step


def _time(row: Mapping[str, Any]) -> np.datetime64:
    try:
        time = datetime.fromisoformat(row["time"])
        if time.tzinfo is None:
            raise ValueError("no offset from UTC")
        return np.datetime64(time.astimezone(UTC).replace(tzinfo=None), "us")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidError(
            f"time must look like 2026-01-01T00:00:00Z, not {str(row.get('time'))[:50]!r}.",
            "Use ISO 8601 with an offset or Z.",
        ) from error
