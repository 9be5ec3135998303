"""Store media with the receipts of their messages, and delete contents that no run names any more."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.db import transaction
from django.db.models import Exists, OuterRef, Sum

from fp8scope_dashboard.media import contents, limits
from fp8scope_dashboard.media.models import MediaContent, MediaItem
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.receipts import dedup
from fp8scope_dashboard.runs import services as runs
from fp8scope_dashboard.runs.models import Run, Writer
from fp8scope_dashboard.wire.errors import ContentNeededError, InvalidError, MediaFullError
from fp8scope_dashboard.wire.limits import MIB


@dataclass(frozen=True, kw_only=True)
class NewMedia:
    """An image, a text, a table or a file as it was sent. `body` is None if only its hash was sent."""

    name: str
    kind: str
    step: int
    sha256: bytes
    body: bytes | None
    caption: str = ""
    file_name: str = ""


@transaction.atomic
def store(run: Run, message: dedup.MessageId, media: NewMedia) -> bool:
    """Store a message with media. Returns False if it is already stored.

    Raises:
        ContentNeededError: the message has only the hash of a content that the project does not have.
        InvalidError: the content is not what the message says.
        MediaFullError: the run or the project has no room for it.
        WriterConflictError: another message is stored under this seq.
    """
    writer = runs.writer_of(run, message.writer)
    if not dedup.record(message):
        return False
    contents.lock(run.project_id)
    content = MediaContent.objects.filter(project_id=run.project_id, sha256=media.sha256).first()
    if content is None and media.body is None:
        raise ContentNeededError(
            "The project does not have a content with this SHA-256.", "Send the message with its content."
        )
    body = media.body
    if body is None:
        assert content is not None
        body = contents.read(content)
    image = contents.check(media.kind, body)
    _check_items(run, writer, media)
    _check_room(run, media.sha256, len(body), is_new=content is None)
    if content is None:
        content = contents.create(run.project_id, body, image)
    MediaItem.objects.create(
        run=run,
        writer=writer,
        content=content,
        name=media.name,
        kind=media.kind,
        step=media.step,
        caption=media.caption,
        file_name=media.file_name,
    )
    run_changed(run.id, run.project_id, "media", media.step)
    return True


def _check_items(run: Run, writer: Writer, media: NewMedia) -> None:
    mine = MediaItem.objects.filter(run=run)
    same = mine.filter(name=media.name)
    if not same.exists() and mine.order_by().values("name").distinct().count() >= limits.NAMES:
        raise InvalidError(
            f"The run has media of {limits.NAMES} names, which is the most.",
            "Keep step numbers and other changing values out of the names.",
        )
    at_step = same.filter(step=media.step, writer__attempt=writer.attempt)
    if at_step.count() >= limits.ITEMS_AT_STEP:
        raise InvalidError(
            f"“{media.name}” has {limits.ITEMS_AT_STEP} items at step {media.step}, which is the most.",
            "Log fewer at a step, or under other names.",
        )
    if mine.count() >= limits.ITEMS:
        raise MediaFullError(
            f"The run has {limits.ITEMS:,} media, which is the most.", "Log them at fewer steps."
        )


def _check_room(run: Run, sha256: bytes, size: int, *, is_new: bool) -> None:
    """Check the quotas. A content that the run or the project has already takes no room again."""
    has_it = MediaItem.objects.filter(run=run, content__sha256=sha256).exists()
    if not has_it and bytes_of_run(run.id) + size > limits.RUN_BYTES:
        raise MediaFullError(
            f"The run has media of {limits.RUN_BYTES // MIB} MiB, which is the most.",
            "Log fewer or smaller ones, or raise FP8SCOPE_MEDIA_RUN_MIB of the server.",
        )
    if is_new and bytes_of_project(run.project_id) + size > limits.PROJECT_BYTES:
        raise MediaFullError(
            f"The project has media of {limits.PROJECT_BYTES // MIB:,} MiB, which is the most.",
            "Delete runs with media, or raise FP8SCOPE_MEDIA_PROJECT_MIB of the server.",
        )


def bytes_of_run(run_id: UUID) -> int:
    """The bytes of the contents that a run names, each counted once."""
    is_named = Exists(MediaItem.objects.filter(run_id=run_id, content=OuterRef("pk")))
    return MediaContent.objects.filter(is_named).aggregate(total=Sum("size"))["total"] or 0


def bytes_of_project(project_id: int) -> int:
    """The bytes of all contents of a project."""
    return MediaContent.objects.filter(project_id=project_id).aggregate(total=Sum("size"))["total"] or 0


@transaction.atomic
def delete_unnamed(project_id: int) -> None:
    """Delete the contents that no run of the project names any more."""
    contents.lock(project_id)
    is_named = Exists(MediaItem.objects.filter(content=OuterRef("pk")))
    MediaContent.objects.filter(~is_named, project_id=project_id).delete()


@transaction.atomic
def delete_before(run_id: UUID, project_id: int, before: datetime, most: int) -> int:
    """Delete up to `most` media of a run that were received before a time. Returns how many."""
    old = MediaItem.objects.filter(run_id=run_id, received_at__lt=before).values("pk")[:most]
    deleted = MediaItem.objects.filter(pk__in=old).delete()[0]
    if deleted:
        delete_unnamed(project_id)
    return deleted
