"""Columns as an Arrow stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import numpy as np
import pyarrow as pa
from django.http import HttpResponse
from ninja import Query

from fp8scope_dashboard.telemetry.codec import Float64s

ARROW: Final = "application/vnd.apache.arrow.stream"
Form = Annotated[Literal["json", "arrow"], Query(description="arrow: an Arrow IPC stream.")]
ARROW_OR_JSON: Final[dict[str, Any]] = {
    "responses": {200: {"content": {ARROW: {"schema": {"type": "string", "format": "binary"}}}}}
}
EXPONENTS: Final = 277
_TYPES: Final[Mapping[str, Any]] = {
    "step": pa.int64(),
    "value": pa.float64(),
    "time": pa.timestamp("us", "UTC"),
    "zeros": pa.float64(),
    "nonfinite": pa.float64(),
    "counts": pa.list_(pa.float64(), EXPONENTS),
}


def arrow_answer(columns: Mapping[str, Any], metadata: Mapping[bytes | str, bytes | str]) -> HttpResponse:
    """A response with one record batch of these columns, each of its type in the protocol."""
    schema = pa.schema([(name, _TYPES[name]) for name in columns], metadata=dict(metadata))
    arrays = [_array(values, _TYPES[name]) for name, values in columns.items()]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=schema))
    return HttpResponse(sink.getvalue().to_pybytes(), content_type=ARROW)


def _array(values: Any, kind: Any) -> Any:
    if not pa.types.is_fixed_size_list(kind):
        return pa.array(values, kind)
    flat: Float64s = np.concatenate([np.zeros(0), *values])
    return pa.FixedSizeListArray.from_arrays(pa.array(flat, pa.float64()), kind.list_size)
