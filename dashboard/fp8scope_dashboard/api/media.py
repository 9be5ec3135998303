"""Media of runs: images, texts, tables and files at a step."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import UUID

from django.http import HttpRequest, HttpResponse
from ninja import Query, Router, Status

from fp8scope_dashboard.accounts.addresses import server_address
from fp8scope_dashboard.api.auth import RUN_READER, WRITER, run_of, run_of_message
from fp8scope_dashboard.api.responses import ANSWERS, ERRORS, Known, answer
from fp8scope_dashboard.edge.backpressure import gate
from fp8scope_dashboard.media import services
from fp8scope_dashboard.media.messages import CONTENT_TYPE, read_message
from fp8scope_dashboard.media.models import MediaItem
from fp8scope_dashboard.media.queries import media_of
from fp8scope_dashboard.pages.media.serving import address_of, respond
from fp8scope_dashboard.receipts.dedup import identify
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.wire import limits, schemas
from fp8scope_dashboard.wire.errors import MalformedError, UnknownNameError

router = Router(tags=["media"])
BODY = {
    "required": True,
    "description": "One line of JSON, then the content; see docs/wire.md.",
    "content": {CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}},
}
FILE = {
    200: {
        "description": "The content. What is no image is a download.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
Step = Annotated[int | None, Query(ge=0, le=limits.MAX_INT, description="Only media at these steps.")]
Kind = Literal["image", "text", "table", "file"]


@router.post("/runs/{run}/media", response=ANSWERS, auth=WRITER, openapi_extra={"requestBody": BODY})
def send_media(request: HttpRequest, run: UUID, received: Query[Known]) -> Status[Any]:
    """Store an image, a text, a table or a file at a step.

    Without the content, it is stored if the project has that content; else the answer is 409 content_needed.
    """
    registered = run_of_message(request, run)
    if request.headers.get("Content-Type", "").partition(";")[0].strip().lower() != CONTENT_TYPE:
        raise MalformedError("Media have a type of their own.", f"Set Content-Type to {CONTENT_TYPE}.")
    with gate.admit(2 * len(request.body), registered.project_id):
        sent = read_message(request.body)
        message = identify(registered.id, sent.head.writer, sent.head.seq, "media", sent.line)
        stored = services.store(registered, message, sent.media)
    return answer(registered, message, stored, received)


@router.get(
    "/runs/{run}/media",
    response={200: schemas.MediaListOut, ERRORS: schemas.ErrorOut},
    auth=RUN_READER,
)
def list_media(
    request: HttpRequest,
    run: UUID,
    name: Annotated[str | None, Query(max_length=128, description="Only media of this name.")] = None,
    kind: Annotated[Kind | None, Query(description="Only media of this kind.")] = None,
    first: Step = None,
    last: Step = None,
    after: Annotated[int, Query(ge=0, le=limits.MAX_INT, description="Only media with a greater id.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1_000)] = 1_000,
) -> dict[str, Any]:
    """The media of a run, in the order in which they were stored."""
    stored, server = run_of(request, run), server_address(request)
    chosen: dict[str, Any] = {"name": name, "kind": kind, "step__gte": first, "step__lte": last}
    asked = {field: value for field, value in chosen.items() if value is not None}
    items = list(media_of(stored).filter(pk__gt=after, **asked).order_by("pk")[: limit + 1])
    return {"items": [_as_json(stored, item, server) for item in items[:limit]], "more": len(items) > limit}


@router.get(
    "/runs/{run}/media/{item}",
    response={ERRORS: schemas.ErrorOut},
    auth=RUN_READER,
    openapi_extra={"responses": FILE},
)
def get_media(request: HttpRequest, run: UUID, item: int) -> HttpResponse:
    """The content of one media, as it was sent."""
    stored = run_of(request, run)
    chosen = None
    if 0 < item <= limits.MAX_INT:
        chosen = MediaItem.objects.filter(run=stored, pk=item).select_related("content").first()
    if chosen is None:
        raise UnknownNameError(f"The run has no media {item}.", f"See GET /api/v1/runs/{run}/media.")
    return respond(request, chosen)


def _as_json(run: Run, item: MediaItem, server: str) -> dict[str, Any]:
    own = ("name", "kind", "step", "caption", "file_name", "received_at")
    return {
        "id": item.pk,
        **{field: getattr(item, field) for field in own},
        **{field: getattr(item.content, field) for field in ("type", "width", "height", "size")},
        "rank": item.writer.rank,
        "sha256": item.hex,
        "url": f"{server}{address_of(run, item)}",
    }
