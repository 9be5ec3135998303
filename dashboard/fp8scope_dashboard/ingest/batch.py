"""Validate the bytes of a batch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import UUID

import numpy as np
import pyarrow as pa

from fp8scope_dashboard.ingest.arrow_preflight import Envelope, open_envelope
from fp8scope_dashboard.telemetry.codec import SCALAR, STEP, TENSOR, TIME, TIME_TYPE
from fp8scope_dashboard.wire import limits
from fp8scope_dashboard.wire.errors import (
    InvalidError,
    MalformedError,
    ProtocolMismatchError,
    TooLargeError,
)

PROTOCOL = "1"
SCALAR_NAME = re.compile(r"[A-Za-z0-9_./-]{1,128}")
# The column with the counts of NaN and infinite elements.
NONFINITE = f"{TENSOR}nonfinite"
STATISTIC_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch that satisfies every rule that can be checked without the database.

    Attributes:
        body: the Arrow IPC stream to store; `head` as in `telemetry.models.Chunk`.
        width: length of the longest tensor list; the catalogue of the writer must be at least as long.
        last_time: that of the last row, in microseconds since 1970, by the sender's clock.
        last_scalars: the latest value of each scalar.
        not_finite: the scalars with a value that is NaN or infinite.
        tensors_break: whether tensors begin to have NaN or infinite elements, after rows without.
    """

    run: UUID
    writer: UUID
    seq: int
    dropped: int
    body: bytes
    head: int | None
    rows: int
    points: int
    first_step: int
    last_step: int
    last_time: int
    width: int
    last_scalars: dict[str, float]
    not_finite: frozenset[str]
    tensors_break: bool
    statistics: tuple[str, ...]


@dataclass(kw_only=True)
class _Tally:
    """Totals over the record batches read so far."""

    rows: int = 0
    points: int = 0
    first_step: int = 0
    last_step: int = -1
    last_time: int = 0
    last_scalars: dict[str, float] = field(default_factory=dict)
    not_finite: set[str] = field(default_factory=set)
    # Whether the last row that observed tensors had elements that are not finite; None: there was none.
    tensors_broken: bool | None = None
    tensors_break: bool = False


def read_arrow(body: bytes) -> Batch:
    """Validate an Arrow batch, decompressing one record batch at a time.

    Raises:
        RefusalError: the batch is invalid; the subclass and message say why.
    """
    return read_envelope(open_envelope(body), body)


def read_envelope(envelope: Envelope, body: bytes) -> Batch:
    """Validate an Arrow batch whose envelope is already open; see `read_arrow`."""
    try:
        metadata = read_metadata(envelope.schema)
        widths = _check_schema(envelope.schema)
    except UnicodeDecodeError as error:
        raise MalformedError("A name in the schema is not UTF-8.", "Write names as text.") from error
    tally = _Tally()
    for message in envelope.batches:
        _add(tally, decompress(message, envelope.schema))
    if tally.rows == 0:
        raise InvalidError("The batch has no rows.", "Send a heartbeat instead of an empty batch.")
    return Batch(
        run=read_uuid(metadata, "fp8scope.run"),
        writer=read_uuid(metadata, "fp8scope.writer"),
        seq=read_natural(metadata, "fp8scope.seq", limits.MAX_SEQ),
        dropped=read_natural({"fp8scope.dropped": "0", **metadata}, "fp8scope.dropped", limits.MAX_COUNT),
        body=body,
        head=envelope.head,
        rows=tally.rows,
        points=tally.points,
        first_step=tally.first_step,
        last_step=tally.last_step,
        last_time=tally.last_time,
        width=max(widths.values(), default=0),
        last_scalars=tally.last_scalars,
        not_finite=frozenset(tally.not_finite),
        tensors_break=tally.tensors_break,
        statistics=tuple(widths),
    )


def writer_of_envelope(envelope: Envelope) -> UUID | None:
    """The writer that the metadata name; None if they do not, which `read_envelope` refuses."""
    try:
        return UUID((envelope.schema.metadata or {})[b"fp8scope.writer"].decode())
    except (KeyError, ValueError):
        return None


def read_metadata(schema: pa.Schema) -> dict[str, str]:
    """Return the metadata of a schema, after checking the protocol version."""
    metadata = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
    protocol = metadata.get("fp8scope.protocol")
    if protocol is None:
        raise MalformedError(
            "The schema metadata lacks fp8scope.protocol.",
            "Set fp8scope.protocol, fp8scope.run, fp8scope.writer and fp8scope.seq as schema metadata.",
        )
    check_protocol(protocol)
    return metadata


def check_protocol(protocol: str) -> None:
    """Raise ProtocolMismatchError unless this is the supported version."""
    if protocol != PROTOCOL:
        raise ProtocolMismatchError(
            f"The batch uses protocol version {protocol[:20]}; this dashboard supports version {PROTOCOL}.",
            "Install the same version of fp8scope on both machines, then run `fp8scope sync`.",
        )


def read_uuid(metadata: Mapping[str, str], key: str) -> UUID:
    """Return a metadata entry as a UUID. Raises MalformedError if it is missing or not a UUID."""
    try:
        return UUID(metadata[key])
    except (KeyError, ValueError) as error:
        raise MalformedError(
            f"The metadata {key} must be a UUID.", f"Set {key} as schema metadata."
        ) from error


def read_natural(metadata: Mapping[str, str], key: str, largest: int = limits.MAX_INT) -> int:
    """Return a metadata entry as an integer. Raises MalformedError unless it is in 0 to `largest`."""
    text = metadata.get(key, "")
    if not re.fullmatch(r"[0-9]{1,19}", text) or int(text) > largest:
        raise MalformedError(
            f"The metadata {key} must be a decimal number from 0 to {largest}.",
            f"Set {key} as schema metadata.",
        )
    return int(text)


def _check_schema(schema: pa.Schema) -> dict[str, int]:
    """Check the names and types of all columns. Returns the list size of each statistic."""
    names = schema.names
    if len(set(names)) != len(names):
        raise InvalidError("Two columns have the same name.", "Name each scalar and statistic once.")
    for name, expected in ((STEP, pa.int64()), (TIME, TIME_TYPE)):
        if name not in names or schema.field(name).type != expected:
            raise InvalidError(f"The column {name} of type {expected} is missing.", "See docs/wire.md.")
    widths: dict[str, int] = {}
    scalars = 0
    for column in schema:
        if column.name.startswith(SCALAR):
            _check_scalar(column)
            scalars += 1
        elif column.name.startswith(TENSOR):
            widths[column.name.removeprefix(TENSOR)] = _check_statistic(column)
        elif column.name not in (STEP, TIME):
            raise InvalidError(
                f"Unknown column {column.name[:100]!r}.",
                "Columns are step, time, scalar:<name>, tensor:<statistic>.",
            )
    if scalars > limits.SCALARS or len(widths) > limits.STATISTICS:
        raise TooLargeError(
            f"The batch has {scalars} scalars and {len(widths)} statistics; "
            f"at most {limits.SCALARS} and {limits.STATISTICS} are allowed.",
            "Log fewer names.",
        )
    return widths


def _check_scalar(column: pa.Field[Any]) -> None:
    if not SCALAR_NAME.fullmatch(column.name.removeprefix(SCALAR)):
        raise InvalidError(
            f"The scalar name {column.name.removeprefix(SCALAR)[:140]!r} is invalid.",
            "A name has 1 to 128 of the characters A-Z a-z 0-9 _ . / -",
        )
    if column.type != pa.float64():
        raise InvalidError(
            f"The column {column.name} must be float64, not {column.type}.", "See docs/wire.md."
        )


def _check_statistic(column: pa.Field[Any]) -> int:
    if not STATISTIC_NAME.fullmatch(column.name.removeprefix(TENSOR)):
        raise InvalidError(
            f"The statistic name {column.name.removeprefix(TENSOR)[:50]!r} is invalid.",
            "The statistics are numel, amax, scale, saturated, underflow, subnormal and nonfinite.",
        )
    kind = column.type
    if not pa.types.is_fixed_size_list(kind) or kind.value_type not in (pa.float64(), pa.float32()):
        raise InvalidError(
            f"The column {column.name} must be a fixed_size_list of float64 or float32, not {kind}"[:300],
            "A list has one value per catalogue entry; see docs/wire.md.",
        )
    if kind.list_size > limits.TENSORS:
        raise TooLargeError(
            f"The column {column.name} has more than {limits.TENSORS} tensors.", "Watch fewer tensors."
        )
    return int(kind.list_size)


def decompress(message: pa.ipc.Message, schema: pa.Schema) -> pa.RecordBatch:
    """Decompress a record batch and check every buffer. Raises MalformedError if it cannot be read."""
    try:
        batch = pa.ipc.read_record_batch(message, schema)
        # Otherwise a buffer that is too short for its rows would be read beyond its end.
        batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise MalformedError(
            f"A record batch cannot be read: {str(error).splitlines()[0][:200]}",
            "Send the buffer of the writer unchanged.",
        ) from error
    return batch


def _add(tally: _Tally, batch: pa.RecordBatch) -> None:
    """Check the values of a record batch and add them to the tally, without a loop over rows."""
    if batch.num_rows == 0:
        return
    _add_steps(tally, batch)
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name.startswith(SCALAR):
            present = len(column) - column.null_count
            tally.points += present
            if present:
                scalar = name.removeprefix(SCALAR)
                tally.last_scalars[scalar] = _last_value(column)
                if not _is_finite(column):
                    tally.not_finite.add(scalar)
        elif name.startswith(TENSOR):
            if column.null_count:
                raise InvalidError(
                    f"The column {name} has a null list.",
                    "Write a list of nulls if nothing was observed.",
                )
            values = cast("pa.FixedSizeListArray[Any]", column).flatten()
            tally.points += len(values) - values.null_count
            if name == NONFINITE and values.null_count < len(values):
                _add_nonfinite(tally, values.to_numpy(zero_copy_only=False).reshape(batch.num_rows, -1))
    tally.rows += batch.num_rows


def _add_nonfinite(tally: _Tally, counts: np.ndarray[Any, np.dtype[np.floating[Any]]]) -> None:
    """Note whether elements become NaN or infinite in the rows [R, tensors]; NaN: not observed."""
    observed = np.asarray((~np.isnan(counts)).any(axis=1))
    broken = np.asarray((counts > 0).any(axis=1))[observed]
    if tally.tensors_broken is not None:
        broken = np.concatenate([[tally.tensors_broken], broken])
    tally.tensors_break |= bool((broken[1:] & ~broken[:-1]).any())
    tally.tensors_broken = bool(broken[-1])


def _add_steps(tally: _Tally, batch: pa.RecordBatch) -> None:
    steps, times = batch.column(STEP), batch.column(TIME)
    if steps.null_count or times.null_count:
        raise InvalidError("step and time must not contain nulls.", "Set both in every row.")
    numbers = steps.to_numpy()
    if numbers[0] < 0:
        raise InvalidError("A step is negative.", "Steps count from 0.")
    if (np.diff(numbers) < 0).any() or numbers[0] < tally.last_step:
        raise InvalidError(
            "The steps decrease within the batch.", "Begin a new batch after going back to an earlier step."
        )
    micros = times.cast(pa.int64()).to_numpy()
    if micros.min() < limits.FIRST_TIME_US or micros.max() > limits.LAST_TIME_US:
        raise InvalidError(
            "A time is before 1970 or after 2199.",
            "time is in microseconds since 1970, UTC. Check the clock.",
        )
    if tally.rows == 0:
        tally.first_step = int(numbers[0])
    tally.last_step = int(numbers[-1])
    tally.last_time = int(micros[-1])


def _last_value(column: pa.Array[Any]) -> float:
    if column.null_count == 0:
        return float(column[-1].as_py())
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    return float(column[int(np.flatnonzero(valid)[-1])].as_py())


def _is_finite(column: pa.Array[Any]) -> bool:
    """Return whether all values are finite; nulls are no values."""
    values = column.drop_null() if column.null_count else column
    return bool(np.isfinite(values.to_numpy()).all())


def to_json_number(value: float) -> float | str:
    """Return a value for JSON: NaN and infinities become the strings of docs/wire.md."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value
