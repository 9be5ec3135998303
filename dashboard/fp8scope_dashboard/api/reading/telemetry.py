"""Read stored telemetry: scalars, a series or a heat map, as the pages show them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal
from uuid import UUID

import numpy as np
import orjson
import pyarrow as pa
from django.http import HttpRequest, HttpResponse
from ninja import Query, Router
from numpy.typing import NDArray

from fp8scope_dashboard.api.auth import RUN_READER, check_run, run_of, tensor_of
from fp8scope_dashboard.api.reading.arrow import ARROW, Form, arrow_answer
from fp8scope_dashboard.api.reading.schemas import ScalarsOut
from fp8scope_dashboard.api.responses import ERRORS
from fp8scope_dashboard.pages import glossary
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.codec import Float64s
from fp8scope_dashboard.telemetry.downsample import MIN_POINTS
from fp8scope_dashboard.text.numbers import json_number
from fp8scope_dashboard.wire import schemas
from fp8scope_dashboard.wire.errors import InvalidError, UnknownNameError

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
                },
                ARROW: {"schema": {"type": "string", "format": "binary"}},
            }
        }
    }
}
HEATMAP_ANSWER = {
    "responses": {
        200: {
            "content": {
                ARROW: {"schema": {"type": "string", "format": "binary"}},
                "application/json": {"schema": {"type": "object"}},
            }
        }
    }
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
    times: Annotated[bool, Query(description="Also the times of the steps.")] = False,
    format: Form = "json",
) -> HttpResponse:
    """A scalar, or a statistic of a tensor, over steps.

    Every stored step if there are at most `points` of them. Otherwise `thinned` is true, and `how` says which
    steps were chosen and how to get the others; spikes of a single step are kept. As Arrow, the columns are
    step (int64) and value (float64), and the schema metadata has `thinned` and `how`. With `times` there are
    the times at which the steps ended, by the clock of the training: in microseconds since 1970 (UTC), null
    where a client sent none; as Arrow the column time.
    """
    index = tensor_of(request, run, tensor)
    if bool(scalar) == bool(tensor):
        raise InvalidError("Name either a scalar or a tensor.", "?scalar=loss or ?tensor=NAME&statistic=amax")
    if scalar:
        line = queries.scalar(run, scalar, first=first, last=last, points=points, timed=times)
    elif index is None:
        raise UnknownNameError("The run has no such tensor.", "Names are <module path>.<role>.")
    else:
        line = queries.tensor_series(
            run, index, statistic, first=first, last=last, points=points, timed=times
        )
    if format == "arrow":
        how: dict[bytes | str, bytes | str] = (
            {"thinned": "true", "how": HOW_THINNED} if line.thinned else {"thinned": "false"}
        )
        timed = {"time": line.times.astype("datetime64[us]")} if times else {}
        return arrow_answer({"step": line.steps, "value": line.values, **timed}, how)
    return HttpResponse(_line_as_json(line, times=times), content_type="application/json")


@router.get("/runs/{run}/scalars", response={200: ScalarsOut, ERRORS: schemas.ErrorOut})
def get_scalars(request: HttpRequest, run: UUID) -> dict[str, Any]:
    """The names of the run's logged scalars with their latest values, and the range of its steps."""
    last = run_of(request, run).last_scalars or {}
    first_step, last_step = queries.step_range(run) or (None, None)
    return {
        "first_step": first_step,
        "last_step": last_step,
        "scalars": [
            {"name": name, "title": glossary.title(name), "last": last[name]} for name in sorted(last)
        ],
    }


@router.get("/runs/{run}/heatmap", response={ERRORS: schemas.ErrorOut}, openapi_extra=HEATMAP_ANSWER)
def get_heatmap(
    request: HttpRequest,
    run: UUID,
    statistic: str,
    first: Step = None,
    last: Step = None,
    columns: Columns = 400,
    format: Annotated[
        Literal["arrow", "json"], Query(description="json: tensors, step_edges, values.")
    ] = "arrow",
) -> HttpResponse:
    """The largest value of a statistic per tensor (row) and range of steps (column), as an Arrow stream.

    The Arrow columns are `tensor` and `values` (float64, null where nothing was observed). The schema
    metadata `step_edges`, a JSON list, has the first step of each range and the step after the last one.
    """
    check_run(request, run)
    heatmap = queries.heatmap(run, statistic, first=first, last=last, columns=columns)
    if format == "json":
        return HttpResponse(_map_as_json(heatmap), content_type="application/json")
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


def _map_as_json(heatmap: queries.Heatmap) -> bytes:
    """The rows of a heat map; null where nothing was observed, infinities as the strings of docs/wire.md."""
    rows = [
        [None if np.isnan(value) else json_number(value) for value in row] for row in heatmap.values.tolist()
    ]
    body = {"tensors": heatmap.names, "step_edges": heatmap.step_edges.tolist(), "values": rows}
    return orjson.dumps(body)


def _microseconds(times: NDArray[np.datetime64]) -> list[int | None]:
    """Microseconds since 1970; None where there is no time."""
    whole = times.astype("datetime64[us]").astype(np.int64).tolist()
    return [None if missing else time for time, missing in zip(whole, np.isnat(times).tolist(), strict=True)]


def _line_as_json(line: queries.Series, *, times: bool = False) -> bytes:
    """Finite numbers without loss of precision; NaN and infinities as the strings of docs/wire.md."""
    values: Float64s | list[float | str] = np.ascontiguousarray(line.values)
    if not np.isfinite(line.values).all():
        values = [json_number(value) for value in line.values.tolist()]
    body: dict[str, Any] = {"steps": np.ascontiguousarray(line.steps), "values": values}
    if times:
        body["times"] = _microseconds(line.times)
    body["thinned"] = line.thinned
    if line.thinned:
        body["how"] = HOW_THINNED
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
