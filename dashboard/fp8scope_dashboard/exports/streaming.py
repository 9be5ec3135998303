"""Sending an export while it is written: bounded memory, no connection held, progress for who asks."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from uuid import UUID

from asgiref.sync import sync_to_async
from django.core.cache import cache
from django.db import connections
from django.http import StreamingHttpResponse
from django.utils.text import slugify

from fp8scope_dashboard.exports import formats
from fp8scope_dashboard.exports.content import content_of
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.wire.errors import SlowDownError

# Of one web process: each takes a thread and some hundred megabytes at most.
MOST_EXPORTS = 3
PROGRESS_SECONDS = 3600
_lock = threading.Lock()
_under_way = 0


def respond(run: Run, form: formats.Format, progress: UUID | None = None) -> StreamingHttpResponse:
    """The file as an answer. `progress` is a name of the client's choice, for `progress_of`.

    Raises:
        SlowDownError: this process sends as many exports as it may.
    """
    if _under_way >= MOST_EXPORTS:
        raise SlowDownError("Other exports are being written.", "Try again when one of them is done.")
    content = content_of(run, with_histograms=form == "parquet")

    def note(rows: int) -> None:
        # Redis may be away: an export without progress is an export all the same.
        with suppress(Exception):
            cache.set(_key(run.pk, progress), (rows, content.rows), PROGRESS_SECONDS)

    parts = formats.write(content, form, note if progress else lambda rows: None)
    answer = StreamingHttpResponse(_stream(parts), content_type=formats.MEDIA_TYPES[form])
    name = f"{slugify(run.name)[:80] or 'run'}-{str(run.pk)[:8]}.{form}"
    answer["Content-Disposition"] = f'attachment; filename="{name}"'
    answer["X-Fp8scope-Rows"] = str(content.rows)
    return answer


def progress_of(run: Run, progress: UUID) -> tuple[int | None, int]:
    """How many rows of an export are written (None where that is not known), and how many it will have."""
    try:
        found = cache.get(_key(run.pk, progress))
    except Exception:  # whatever a Redis that is away raises
        found = None
    return found or (None, run.rows_stored)


def _key(run_id: UUID, progress: UUID | None) -> str:
    return f"export:{run_id}:{progress}"


async def _stream(parts: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Each part is made in a thread, which gives its database connection back afterwards."""

    def make() -> bytes | None:
        try:
            return next(parts, None)
        finally:
            connections.close_all()

    global _under_way
    # Counted from the first part on: an answer that nobody reads would never be counted off.
    with _lock:
        _under_way += 1
    try:
        while (part := await sync_to_async(make, thread_sensitive=False)()) is not None:
            if part:
                yield part
    finally:
        with _lock:
            _under_way -= 1
