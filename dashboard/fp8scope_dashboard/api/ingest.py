"""Messages of training processes: batches, histograms, evaluations, finish, heartbeats."""

from __future__ import annotations

from functools import partial
from typing import Any
from uuid import UUID

from django.http import HttpRequest
from ninja import Query, Router, Status

from fp8scope_dashboard.api import batches
from fp8scope_dashboard.api.auth import WRITER, run_of_message, secret_of
from fp8scope_dashboard.api.batches import ARROW, JSON
from fp8scope_dashboard.api.responses import ANSWERS, ERRORS, Known, Urgent, answer, news_for, take
from fp8scope_dashboard.edge.backpressure import gate
from fp8scope_dashboard.evaluations.services import Scores, store_evaluation
from fp8scope_dashboard.ingest import services
from fp8scope_dashboard.ingest.arrow_preflight import open_envelope
from fp8scope_dashboard.ingest.batch import SCALAR_NAME, STATISTIC_NAME
from fp8scope_dashboard.ingest.histograms import read_histograms, store_histograms
from fp8scope_dashboard.receipts.dedup import identify
from fp8scope_dashboard.runs import services as runs
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.wire import limits, schemas
from fp8scope_dashboard.wire.errors import InvalidError, MalformedError, NotArrowError

router = Router(tags=["ingest"], auth=WRITER)

NATURAL = {"type": "integer", "minimum": 0, "maximum": limits.MAX_INT}
NUMBER = {
    "anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}, {"type": "null"}],
}
BATCH_BODY = {
    "required": True,
    "description": "See docs/wire.md for columns and metadata.",
    "content": {
        ARROW: {"schema": {"type": "string", "format": "binary"}},
        JSON: {
            "schema": {
                "type": "object",
                "required": ["protocol", "writer", "seq", "rows"],
                "properties": {
                    "protocol": {"const": 1},
                    "writer": {"type": "string", "format": "uuid"},
                    "seq": {**NATURAL, "maximum": limits.MAX_SEQ},
                    "dropped": {**NATURAL, "maximum": limits.MAX_COUNT, "default": 0},
                    "rows": {
                        "type": "array",
                        "minItems": 1,
                        "maxItems": limits.ROWS,
                        "items": {
                            "type": "object",
                            "required": ["step", "time"],
                            "properties": {
                                "step": NATURAL,
                                "time": {"type": "string", "format": "date-time"},
                                "scalars": {
                                    "type": "object",
                                    "propertyNames": {"pattern": f"^{SCALAR_NAME.pattern}$"},
                                    "additionalProperties": NUMBER,
                                },
                                "tensors": {
                                    "type": "object",
                                    "description": "By statistic, the values by names of registered tensors.",
                                    "propertyNames": {"pattern": f"^{STATISTIC_NAME.pattern}$"},
                                    "additionalProperties": {
                                        "type": "object",
                                        "additionalProperties": NUMBER,
                                    },
                                },
                            },
                        },
                    },
                },
            }
        },
    },
}

HISTOGRAM_BODY = {
    "required": True,
    "description": "See docs/wire.md for columns and metadata.",
    "content": {ARROW: {"schema": {"type": "string", "format": "binary"}}},
}


@router.post("/runs/{run}/batches", response=ANSWERS, openapi_extra={"requestBody": BATCH_BODY})
def send_batch(request: HttpRequest, run: UUID, received: Query[Known], urgent: Query[Urgent]) -> Status[Any]:
    """Store rows. Sending the same message again has no effect."""
    sent = batches.Sent(
        run=run,
        secret=secret_of(request),
        kind=_content_type(request),
        body=request.body,
        received=received,
        urgent=urgent.urgent,
    )
    return Status(*batches.take(sent))


@router.post("/runs/{run}/histograms", response=ANSWERS, openapi_extra={"requestBody": HISTOGRAM_BODY})
def send_histograms(request: HttpRequest, run: UUID, received: Query[Known]) -> Status[Any]:
    """Store the exponent histograms of some tensors in one sampled step."""
    registered = run_of_message(request, run)
    body = request.body
    if _content_type(request) != ARROW:
        raise NotArrowError("Histograms are sent as an Arrow IPC stream.", f"Set Content-Type to {ARROW}.")
    envelope = open_envelope(body)
    with gate.admit(envelope.decompressed_bytes + len(body), registered.project_id):
        histograms = read_histograms(envelope, body)
        _check_run(registered, histograms.run)
        message = identify(registered.id, histograms.writer, histograms.seq, "histogram", body)
        stored = store_histograms(registered, message, histograms)
    return answer(registered, message, stored, received)


@router.post("/runs/{run}/evaluations", response=ANSWERS)
def send_evaluation(
    request: HttpRequest, run: UUID, body: schemas.EvaluationIn, received: Query[Known]
) -> Status[Any]:
    """Store the scores of the items of one evaluation."""
    scores = Scores(
        step=body.step,
        name=body.name,
        metric=body.metric,
        kind=body.kind,
        higher_is_better=body.higher_is_better,
        items=body.items,
        item_ids=body.item_ids,
        clusters=body.clusters,
        precision=body.precision,
        margin=body.margin,
        matrix=None if body.matrix is None else body.matrix.model_dump(),
    )
    return take(request, run, body, "evaluation", partial(store_evaluation, scores=scores), received)


@router.post("/runs/{run}/finish", response=ANSWERS)
def finish_run(
    request: HttpRequest, run: UUID, body: schemas.FinishIn, received: Query[Known]
) -> Status[Any]:
    """Record that a writer has finished. The run is over once all writers have."""
    ending = services.Ending(
        failed=body.state == "failed",
        ends_run=body.ends_run,
        error=body.error,
        rows_sent=body.rows_sent,
        points_sent=body.points_sent,
        dropped=body.dropped,
        errors=body.errors,
        finished_at=body.finished_at,
    )
    return take(request, run, body, "finish", partial(services.store_finish, ending=ending), received)


@router.post("/runs/{run}/heartbeat", response={200: schemas.Pulse, ERRORS: schemas.ErrorOut})
def beat(
    request: HttpRequest, run: UUID, body: schemas.HeartbeatIn, received: Query[Known]
) -> dict[str, Any]:
    """Record that a writer is alive when it has nothing to send."""
    registered = run_of_message(request, run)
    state = runs.heartbeat(registered, body.writer, dropped=body.dropped, errors=body.errors)
    return {"state": state.value, **news_for(registered, body.writer, received)}


def _content_type(request: HttpRequest) -> str:
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise MalformedError("Content-Encoding is not supported.", "Compress the Arrow buffers instead.")
    return (request.content_type or "").lower()


def _check_run(run: Run, said: UUID) -> None:
    if said != run.id:
        raise InvalidError(
            f"The message belongs to run {said}.", "fp8scope.run must be the run in the address."
        )
