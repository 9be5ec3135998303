"""Read stored telemetry: a series or a heat map, as the pages show them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final
from uuid import UUID

import numpy as np
import orjson
import pyarrow as pa
from django.http import HttpRequest, HttpResponse
from ninja import Query, Router

from fp8scope_dashboard.api.auth import RUN_READER, check_run, tensor_of
from fp8scope_dashboard.api.responses import ERRORS
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.codec import Float64s
from fp8scope_dashboard.telemetry.downsample import MIN_POINTS
from fp8scope_dashboard.text.numbers import json_number
from fp8scope_dashboard.wire import schemas
from fp8scope_dashboard.wire.errors import InvalidError

ARROW = "application/vnd.apache.arrow.stream"
MAX_POINTS, MAX_COLUMNS = 100_000, 2_000

HOW_THINNED: Final = (
    "There are more steps than points: the smallest and the largest value of ranges of steps, the sharpest "
    "spikes, and steps that keep the shape of the line. For every step ask for parts of the range with first "
    "and last. Below the step from which retention has kept rows there are only extremes."
)

router = Router(tags=["telemetry"], auth=RUN_READER)
Step = Annotated[int | None, Query(ge=0, le=2**62, description="Inclusive; default: all that is stored.")]
Points = Annotated[int, Query(ge=MIN_POINTS, le=MAX_POINTS, description="Maximum number.")]
Columns = Annotated[int, Query(ge=1, le=MAX_COLUMNS, description="Maximum number.")]
LINE_ANSWER = {
    "responses": {
        200: {
            "content": {
                "application/json": {
                    "schema": {
                        "type": "object",
                        "properties": {
                            "steps": {"type": "array", "items": {"type": "integer"}},
                            "values": {"type": "array", "items": {"type": ["number", "string"]}},
                            "thinned": {"type": "boolean"},
                            "how": {"type": "string"},
                        },
                    }
                }
            }
        }
    }
}
HEATMAP_ANSWER = {
    "responses": {200: {"content": {ARROW: {"schema": {"type": "string", "format": "binary"}}}}}
}


@router.get("/runs/{run}/series", response={ERRORS: schemas.ErrorOut}, openapi_extra=LINE_ANSWER)
def get_series(
    request: HttpRequest,
    run: UUID,
    scalar: Annotated[str, Query(description="A scalar, or empty. Name either this or a tensor.")] = "",
    tensor: Annotated[str, Query(description="<module path>.<role> of the run's catalogue, or empty.")] = "",
    statistic: Annotated[str, Query(description="Of the tensor.")] = "amax",
    first: Step = None,
    last: Step = None,
    points: Points = 2_000,
) -> HttpResponse:
    """A scalar, or a statistic of a tensor, over steps.

    Every stored step if there are at most `points` of them. Otherwise `thinned` is true, and `how` says which
    steps were chosen and how to get the others; spikes of a single step are kept.
    """
    index = tensor_of(request, run, tensor)
    if bool(scalar) == bool(tensor):
        raise InvalidError("Name either a scalar or a tensor.", "?scalar=loss or ?tensor=NAME&statistic=amax")
    if scalar:
        line = queries.scalar(run, scalar, first=first, last=last, points=points, timed=False)
    elif index is None:
        raise InvalidError("The run has no such tensor.", "Names are <module path>.<role>.")
    else:
        line = queries.tensor_series(
            run, index, statistic, first=first, last=last, points=points, timed=False
        )
    return HttpResponse(_line_as_json(line), content_type="application/json")


@router.get("/runs/{run}/heatmap", response={ERRORS: schemas.ErrorOut}, openapi_extra=HEATMAP_ANSWER)
def get_heatmap(
    request: HttpRequest,
    run: UUID,
    statistic: str,
    first: Step = None,
    last: Step = None,
    columns: Columns = 400,
) -> HttpResponse:
    """The largest value of a statistic per tensor (row) and range of steps (column), as an Arrow stream.

    The Arrow columns are `tensor` and `values` (float64, null where nothing was observed). The schema
    metadata `step_edges`, a JSON list, has the first step of each range and the step after the last one.
    """
    check_run(request, run)
    heatmap = queries.heatmap(run, statistic, first=first, last=last, columns=columns)
    flat = heatmap.values.reshape(-1)
    cells = pa.array(flat, pa.float64(), mask=np.isnan(flat))
    values = pa.FixedSizeListArray.from_arrays(cells, max(1, heatmap.values.shape[1]))
    schema = pa.schema(
        [("tensor", pa.string()), ("values", values.type)],
        metadata={"step_edges": json.dumps(heatmap.step_edges.tolist())},
    )
    names = pa.array(heatmap.names if len(values) else [], pa.string())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch([names, values], schema=schema))
    return HttpResponse(sink.getvalue().to_pybytes(), content_type=ARROW)


def _line_as_json(line: queries.Series) -> bytes:
    """Finite numbers without loss of precision; NaN and infinities as the strings of docs/wire.md."""
    values: Float64s | list[float | str] = np.ascontiguousarray(line.values)
    if not np.isfinite(line.values).all():
        values = [json_number(value) for value in line.values.tolist()]
    body: dict[str, Any] = {"steps": np.ascontiguousarray(line.steps), "values": values}
    body["thinned"] = line.thinned
    if line.thinned:
        body["how"] = HOW_THINNED
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
