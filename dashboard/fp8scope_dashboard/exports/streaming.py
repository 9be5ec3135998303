"""Stream an export while it is written: bounded memory, and no database connection held between parts."""

from __future__ import annotations

import threading
import weakref
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from typing import Any
from uuid import UUID

import redis
from asgiref.sync import sync_to_async
from django.core.cache import cache
from django.db import connections
from django.http import StreamingHttpResponse
from django.utils.text import slugify

from fp8scope_dashboard.exports import formats
from fp8scope_dashboard.exports.content import content_of
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.wire.errors import SlowDownError

# Per web process: each export takes a thread and up to some hundred megabytes.
MAX_EXPORTS = 3
PROGRESS_SECONDS = 3600


class Slots:
    """A bounded number of exports at a time. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0
        # Reentrant: a response that is collected as garbage within `take` gives its slot back there.
        self._lock = threading.RLock()

    def take(self) -> None:
        """Take a slot; check and count are one step, so that simultaneous requests cannot all pass.

        Raises:
            SlowDownError: if no slot is free.
        """
        with self._lock:
            if self._taken >= self._most:
                raise SlowDownError(
                    "The server is busy with other exports.", "Try again when one of them is done."
                )
            self._taken += 1

    def give_back(self) -> None:
        with self._lock:
            self._taken -= 1


slots = Slots(MAX_EXPORTS)


class ExportResponse(StreamingHttpResponse):
    """A file in parts. Holds its slot until it is closed, or collected where it was never sent."""

    def __init__(self, parts: Iterator[bytes], slots: Slots, **options: Any) -> None:
        super().__init__(_in_threads(parts), **options)
        # Called once at most, however often the response is closed.
        self._give_back = weakref.finalize(self, slots.give_back)

    def close(self) -> None:
        self._give_back()
        super().close()


def respond(run: Run, form: formats.Format, progress: UUID | None = None) -> ExportResponse:
    """The file as a response. `progress` is an id that the client chooses, for `progress_of`.

    Raises:
        SlowDownError: if this process already sends as many exports as it may.
    """
    slots.take()
    try:
        content = content_of(run, with_binary=form == "parquet")

        def on_rows(rows: int) -> None:
            # Without Redis there is no progress, but still an export.
            with suppress(redis.RedisError):
                cache.set(_key(run.pk, progress), (rows, content.rows), PROGRESS_SECONDS)

        parts = formats.write(content, form, on_rows if progress else lambda rows: None)
        response = ExportResponse(parts, slots, content_type=formats.MEDIA_TYPES[form])
    except BaseException:
        slots.give_back()
        raise
    name = f"{slugify(run.name)[:80] or 'run'}-{str(run.pk)[:8]}.{form}"
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    response["X-Fp8scope-Rows"] = str(content.rows)
    return response


def respond_text(parts: Iterator[bytes], name: str) -> ExportResponse:
    """A text file as a response, in UTF-8.

    Raises:
        SlowDownError: if this process already sends as many exports as it may.
    """
    slots.take()
    try:
        response = ExportResponse(parts, slots, content_type="text/plain; charset=utf-8")
    except BaseException:
        slots.give_back()
        raise
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    response["X-Content-Type-Options"] = "nosniff"
    return response


def progress_of(run: Run, progress: UUID) -> tuple[int | None, int]:
    """The number of rows that an export has written (None if unknown), and the number it will have."""
    try:
        stored: tuple[int, int] | None = cache.get(_key(run.pk, progress))
    except redis.RedisError:  # the export goes on; notifications.py logs that Redis is away
        stored = None
    return stored or (None, run.rows_stored)


def _key(run_id: UUID, progress: UUID | None) -> str:
    return f"export:{run_id}:{progress}"


async def _in_threads(parts: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Make each part in a thread, which then closes its database connections."""

    def make() -> bytes | None:
        try:
            return next(parts, None)
        finally:
            connections.close_all()

    while (part := await sync_to_async(make, thread_sensitive=False)()) is not None:
        if part:
            yield part
