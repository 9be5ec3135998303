"""Export a run as a file."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.http import HttpRequest, StreamingHttpResponse
from ninja import Router, Schema

from fp8scope_dashboard.api.auth import RUN_READER, run_of
from fp8scope_dashboard.api.responses import ERRORS
from fp8scope_dashboard.audit.log import actor_of, record
from fp8scope_dashboard.audit.models import Action
from fp8scope_dashboard.exports import formats, streaming
from fp8scope_dashboard.wire.schemas import ErrorOut

router = Router(tags=["exports"], auth=RUN_READER)


class ExportProgress(Schema):
    rows: int
    rows_written: int | None


FILE = {
    200: {
        "description": "The file; docs/operating.md shows its columns.",
        "content": {kind.partition(";")[0]: {"schema": {"type": "string", "format": "binary"}}
                    for kind in formats.MEDIA_TYPES.values()},
    }
}  # fmt: skip


@router.get("/runs/{run}/export", openapi_extra={"responses": FILE}, response={ERRORS: ErrorOut})
def export_run(
    request: HttpRequest, run: UUID, format: formats.Format = "parquet", progress: UUID | None = None
) -> StreamingHttpResponse:
    """Stream a run as a file for `fp8scope import`. The header X-Fp8scope-Rows has its number of rows."""
    stored = run_of(request, run)
    answer = streaming.respond(stored, format, progress)
    text = f"“{stored.name}”, as {format}"
    record(actor_of(request), stored.project, Action.EXPORTED, text, run=str(stored.pk))
    return answer


@router.get("/runs/{run}/export/{progress}", response={200: ExportProgress, ERRORS: ErrorOut})
def export_progress(request: HttpRequest, run: UUID, progress: UUID) -> dict[str, Any]:
    """The progress of the export that was requested with this `progress`; null if it is unknown."""
    rows_written, rows = streaming.progress_of(run_of(request, run), progress)
    return {"rows": rows, "rows_written": rows_written}
