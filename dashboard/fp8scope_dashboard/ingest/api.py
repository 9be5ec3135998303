"""What training processes send: batches, evaluations, the finish, heartbeats."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from django.http import HttpRequest
from ninja import Query, Router, Status

from fp8scope_dashboard.ingest import schemas, services
from fp8scope_dashboard.ingest.auth import run_of
from fp8scope_dashboard.ingest.batch import Batch, read_envelope
from fp8scope_dashboard.ingest.envelope import open_envelope
from fp8scope_dashboard.ingest.errors import InvalidError, MalformedError, NotArrowError
from fp8scope_dashboard.ingest.json_batch import parse_json, read_json, writer_in
from fp8scope_dashboard.ingest.ledger import MessageKind, identify
from fp8scope_dashboard.ingest.pressure import gate
from fp8scope_dashboard.runs import services as runs
from fp8scope_dashboard.runs.models import Run

ARROW = "application/vnd.apache.arrow.stream"
JSON = "application/json"
ERRORS = frozenset({400, 401, 404, 409, 413, 422, 429, 500, 503})

router = Router(tags=["ingest"])
AlertsAfter = Annotated[int, Query(ge=0, le=2**63 - 1, description="Greatest alert id that was handled.")]
ANSWERS: dict[Any, Any] = {201: schemas.Receipt, 200: schemas.Receipt, ERRORS: schemas.ErrorOut}

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
                    "seq": {"type": "integer", "minimum": 0},
                    "dropped": {"type": "integer", "minimum": 0, "default": 0},
                    "rows": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["step", "time"],
                            "properties": {
                                "step": {"type": "integer", "minimum": 0},
                                "time": {"type": "string", "format": "date-time"},
                                "scalars": {"type": "object"},
                                "tensors": {"type": "object"},
                            },
                        },
                    },
                },
            }
        },
    },
}


@router.post("/runs/{run}/batches", response=ANSWERS, openapi_extra={"requestBody": BATCH_BODY})
def send_batch(request: HttpRequest, run: UUID, alerts_after: AlertsAfter = 0) -> Status[Any]:
    """Store rows, once however often they are sent."""
    found = run_of(request, run)
    body = request.body
    kind = (request.content_type or "").lower()
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise MalformedError("Content-Encoding is not supported.", "Compress the Arrow buffers instead.")
    if kind == ARROW:
        envelope = open_envelope(body)
        with gate.admit(envelope.decompressed_bytes + len(body)):
            return _store_batch(found, read_envelope(envelope, body), body, alerts_after)
    if kind == JSON:
        # Parsed JSON takes several times its bytes.
        with gate.admit(8 * len(body)):
            document = parse_json(body)
            positions = services.tensor_positions(found, writer_in(document))
            return _store_batch(found, read_json(document, run, positions), body, alerts_after)
    raise NotArrowError(
        f"A batch cannot be of type {kind[:100]!r}.", f"Set Content-Type to {ARROW} or {JSON}."
    )


@router.post("/runs/{run}/evaluations", response=ANSWERS)
def send_evaluation(
    request: HttpRequest, run: UUID, body: schemas.EvaluationIn, alerts_after: AlertsAfter = 0
) -> Status[Any]:
    """Store the scores of one evaluation, item by item."""
    found = run_of(request, run)
    scores = services.Scores(
        step=body.step,
        name=body.name,
        metric=body.metric,
        kind=body.kind,
        higher_is_better=body.higher_is_better,
        items=body.items,
        item_ids=body.item_ids,
        clusters=body.clusters,
    )
    message = _identify(request, found, body.writer, body.seq, "evaluation")
    return _answer(found, message.seq, services.store_evaluation(found, message, scores), alerts_after)


@router.post("/runs/{run}/finish", response=ANSWERS)
def finish_run(
    request: HttpRequest, run: UUID, body: schemas.FinishIn, alerts_after: AlertsAfter = 0
) -> Status[Any]:
    """One writer is done; the run is over when all are."""
    found = run_of(request, run)
    ending = services.Ending(
        failed=body.state == "failed",
        ends_run=body.ends_run,
        error=body.error,
        rows_sent=body.rows_sent,
        points_sent=body.points_sent,
        dropped=body.dropped,
        errors=body.errors,
    )
    message = _identify(request, found, body.writer, body.seq, "finish")
    return _answer(found, message.seq, services.store_finish(found, message, ending), alerts_after)


@router.post("/runs/{run}/heartbeat", response={200: schemas.Pulse, ERRORS: schemas.ErrorOut})
def beat(
    request: HttpRequest, run: UUID, body: schemas.HeartbeatIn, alerts_after: AlertsAfter = 0
) -> dict[str, Any]:
    """A writer lives, though it has nothing to send."""
    found = run_of(request, run)
    state = runs.heartbeat(found, body.writer, dropped=body.dropped, errors=body.errors)
    return {"state": state.value, "alerts": _alerts(found, alerts_after), "commands": []}


def _identify(request: HttpRequest, run: Run, writer: UUID, seq: int, kind: MessageKind) -> Any:
    return identify(run.id, writer, seq, kind, request.body)


def _store_batch(run: Run, batch: Batch, body: bytes, alerts_after: int) -> Status[Any]:
    if batch.run != run.id:
        raise InvalidError(
            f"The batch belongs to run {batch.run}.", "fp8scope.run must be the run in the address."
        )
    stored = services.store_batch(run, identify(run.id, batch.writer, batch.seq, "batch", body), batch)
    return _answer(run, batch.seq, stored, alerts_after, rows=batch.rows, points=batch.points)


def _answer(
    run: Run, seq: int, stored: bool, alerts_after: int, *, rows: int = 0, points: int = 0
) -> Status[Any]:
    answer = {
        "status": "stored" if stored else "duplicate",
        "seq": seq,
        "rows": rows,
        "points": points,
        "alerts": _alerts(run, alerts_after),
        "commands": [],
    }
    return Status(201 if stored else 200, answer)


def _alerts(run: Run, after: int) -> list[dict[str, Any]]:
    from fp8scope_dashboard.alerts.services import alerts_after

    found: list[dict[str, Any]] = alerts_after(run.id, after)
    return found
