"""Reads the messages of docs/wire.md as plain objects, and checks every one of them."""

from typing import Any, cast

import pyarrow as pa
from agent.helpers.stored_run import StoredRun

STATISTICS = {"numel", "amax", "scale", "saturated", "underflow", "subnormal", "nonfinite"}
SAMPLED = {"blocks", "saturated_blocks", "scale_min", "scale_median", "scale_max", "sq_error", "sq_signal"}
SAMPLED |= {"scale_frozen", "scale_stale", "history_amax", "update_ratio"}
SAMPLED |= {"kurtosis", "logit_bound", "load_max", "load_imbalance"}
EXPONENT_BINS = 279


class Refusal(Exception):
    """An error of the API."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(message or code)
        self.status = status
        self.code = code


def read_histograms(body: bytes, content_type: str, stored: StoredRun) -> dict[str, Any]:
    """Check histograms against docs/wire.md and return them as plain objects."""
    assert content_type == "application/vnd.apache.arrow.stream"
    with pa.ipc.open_stream(body) as stream:
        table = stream.read_all()
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    types = {column.name: column.type for column in table.schema}
    assert types == {
        "step": pa.int64(),
        "time": pa.timestamp("us", tz="UTC"),
        "tensor": pa.int32(),
        "counts": pa.list_(pa.float64(), EXPONENT_BINS),
    }, types
    assert metadata["fp8scope.protocol"] == "1" and "fp8scope.dropped" not in metadata
    writer = metadata["fp8scope.writer"]
    names = [tensor["name"] for tensor in stored.catalogues.get(writer, [])]
    rows: list[dict[str, Any]] = table.to_pylist()
    for row in rows:
        assert all(value is not None for value in row.values()) and min(row["counts"]) >= 0
        row["name"] = names[row.pop("tensor")]
    return {"rows": rows, "writer": writer, "seq": int(metadata["fp8scope.seq"])}


def read_batch(body: bytes, content_type: str, stored: StoredRun | None = None) -> dict[str, Any]:
    """Check a batch against docs/wire.md and return it as plain objects."""
    if content_type != "application/vnd.apache.arrow.stream":
        raise Refusal(400, "not_arrow")
    try:
        with pa.ipc.open_stream(body) as stream:
            table = stream.read_all()
    except (pa.ArrowException, OSError) as error:
        raise Refusal(400, "malformed", str(error)) from error
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    if metadata["fp8scope.protocol"] != "1":
        raise Refusal(400, "protocol_mismatch")
    writer = metadata["fp8scope.writer"]
    steps = table.column("step")
    assert steps.type == pa.int64() and steps.null_count == 0
    times = table.column("time")
    assert times.type == pa.timestamp("us", tz="UTC") and times.null_count == 0
    numbers = cast(list[int], steps.to_pylist())
    assert numbers == sorted(numbers)
    rows: list[dict[str, Any]] = [
        {"step": step, "time": moment, "scalars": {}, "tensors": {}, "writer": writer}
        for step, moment in zip(numbers, times.to_pylist(), strict=True)
    ]
    points = 0
    for name in table.column_names[2:]:
        kind, _, label = name.partition(":")
        column = table.column(name)
        if kind == "scalar":
            assert column.type == pa.float64()
        else:
            assert kind == "tensor" and label in STATISTICS | SAMPLED, name
            assert pa.types.is_fixed_size_list(column.type)
            if stored is not None and column.type.list_size > len(stored.catalogues.get(writer, [])):
                raise Refusal(422, "invalid", "more values than the catalogue has tensors")
        for row, value in zip(rows, column.to_pylist(), strict=True):
            row[f"{kind}s"][label] = value
            points += sum(v is not None for v in value) if isinstance(value, list) else value is not None
    return {
        "run": metadata["fp8scope.run"],
        "writer": writer,
        "seq": int(metadata["fp8scope.seq"]),
        "dropped": int(metadata.get("fp8scope.dropped", "0")),
        "rows": rows,
        "points": points,
    }
