"""Accept uploads, and find the imports that are lost: queries and changes of `ImportJob`."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final
from uuid import UUID, uuid4

from celery import current_app
from django.core.files.uploadedfile import UploadedFile
from django.db import transaction
from django.db.models import F, Q
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project, Scope, User
from fp8scope_dashboard.accounts.tokens import create_token, renew_token, revoke_token
from fp8scope_dashboard.file_imports import limits
from fp8scope_dashboard.file_imports.models import ImportAccess, ImportChunk, ImportJob, ImportState
from fp8scope_dashboard.text.numbers import count
from fp8scope_dashboard.wire.limits import MIB

logger = logging.getLogger(__name__)

TOKEN_LIFETIME: Final = timedelta(seconds=2 * limits.SECONDS)
"""A token that a killed worker could not revoke ends by itself."""
RUN_IMPORT: Final = "fp8scope_dashboard.file_imports.tasks.run_import"
# A worker says every second that it lives.
LOST_AFTER: Final = timedelta(seconds=60)
QUEUED_AFTER: Final = timedelta(seconds=30)
"""A job that has waited so long is queued again: Redis may have lost its message."""
MAX_ATTEMPTS: Final = 2
OPEN: Final = (ImportState.WAITING, ImportState.RUNNING)
MISSING: Final = (
    "The agent's package is not installed on this server, so it cannot read files of other tools. Install it "
    "there with pip install 'fp8scope[dashboard]', or run fp8scope import on another machine."
)


class UploadError(ValueError):
    """The upload is refused; the message says what to do."""


def can_import() -> bool:
    """Return whether the agent's package is there. It is never imported by a server."""
    return importlib.util.find_spec("fp8scope") is not None


def accept(
    project: Project, user: User, files: Sequence[UploadedFile[Any]], options: Mapping[str, str]
) -> ImportJob:
    """Store uploaded files and start their import.

    Raises:
        UploadError: there are none or too many, they are too large, or too many imports wait.
    """
    names = [name_of(file) for file in files]
    _check(files, names)
    with transaction.atomic():
        # So that two uploads at a time count each other.
        Project.objects.select_for_update(no_key=True).get(pk=project.pk)
        if ImportJob.objects.filter(project=project, state__in=OPEN).count() >= limits.MAX_WAITING:
            raise UploadError(
                f"{limits.MAX_WAITING} imports of this project are not done: wait for one of them."
            )
        job = ImportJob.objects.create(
            project=project,
            created_by=user,
            title=_title(names),
            bytes=sum(file.size or 0 for file in files),
            options=dict(options),
        )
        parts = enumerate(_parts(files, names))
        for number, (name, body) in parts:
            ImportChunk.objects.create(job=job, name=name, number=number, body=body)
        _forget_old(project)
        transaction.on_commit(lambda: start(job.pk))
    return job


def name_of(file: UploadedFile[Any]) -> str:
    """The name of an uploaded file. Django has left out its folders."""
    return str(file.name or "")


def start(job_id: UUID) -> None:
    """Queue an import; without Redis the sweep does it later."""
    try:
        current_app.send_task(RUN_IMPORT, args=[str(job_id)])
    except Exception as error:  # whatever Redis or Celery raises
        logger.warning("The import %s waits for the sweep: %s.", job_id, type(error).__name__)


def claim(job_id: UUID) -> ImportJob | None:
    """Take a waiting import for this worker; None if there is none, or another of its project runs.

    One at a time: a project's imports take turns, and cannot fill all workers.
    """
    with transaction.atomic():
        job = ImportJob.objects.filter(pk=job_id).select_related("project", "created_by").first()
        if job is None:
            return None
        Project.objects.select_for_update(no_key=True).get(pk=job.project_id)
        if ImportJob.objects.filter(project=job.project_id, state=ImportState.RUNNING).exists():
            return None
        values = {"state": ImportState.RUNNING, "claim": uuid4(), "seen_at": timezone.now()}
        waiting = ImportJob.objects.filter(pk=job_id, state=ImportState.WAITING)
        if not waiting.update(**values, attempts=F("attempts") + 1):
            return None
    job.refresh_from_db()
    return job


def change(job: ImportJob, **values: Any) -> bool:
    """Change a job that this worker runs. Returns False once another has it, or nobody."""
    held = ImportJob.objects.filter(pk=job.pk, claim=job.claim, state=ImportState.RUNNING)
    return bool(held.update(seen_at=timezone.now(), **values))


def finish(job: ImportJob, **values: Any) -> None:
    """End a job that this worker runs: its files are deleted, and its token is revoked."""
    with transaction.atomic():
        state = (
            ImportState.FAILED if values.get("problems") and not values.get("results") else ImportState.DONE
        )
        if not change(job, finished_at=timezone.now(), **values):
            return
        ImportJob.objects.filter(pk=job.pk).update(state=state, claim=None, stage="")
        ImportChunk.objects.filter(job=job).delete()
        revoke(job.project_id)
        _start_next(job.project_id)


def give_token(job: ImportJob) -> str:
    """Let the token of the project's imports work, on behalf of who has uploaded. Returns its new secret.

    Raises:
        TokenError: the project has no room for the first one.
    """
    with transaction.atomic():
        access = ImportAccess.objects.select_related("token").filter(project=job.project_id).first()
        if access is not None:
            return renew_token(access.token, job.created_by, TOKEN_LIFETIME)
        token, secret = create_token(
            job.project, "imports of files", job.created_by, scopes=(Scope.WRITE,), lifetime=TOKEN_LIFETIME
        )
        ImportAccess.objects.create(project=job.project, token=token)
    return secret


def revoke(project: int) -> None:
    """Revoke the token of a project's imports."""
    access = ImportAccess.objects.select_related("token").filter(project=project).first()
    if access is not None:
        revoke_token(access.token)


def recover() -> int:
    """Queue waiting imports again, and those of killed workers, or end these. Returns their number."""
    lost = Q(state=ImportState.RUNNING, seen_at__lt=timezone.now() - LOST_AFTER)
    waiting = Q(state=ImportState.WAITING, seen_at__lt=timezone.now() - QUEUED_AFTER)
    jobs = list(ImportJob.objects.filter(lost | waiting).order_by("created_at"))
    for job in jobs:
        if job.state == ImportState.RUNNING:
            _recover(job)
        start(job.pk)
    return len(jobs)


def _recover(job: ImportJob) -> None:
    """Let a killed import wait again; what is stored of it is not stored twice."""
    with transaction.atomic():
        held = ImportJob.objects.filter(pk=job.pk, claim=job.claim, state=ImportState.RUNNING)
        if job.attempts < MAX_ATTEMPTS:
            held.update(state=ImportState.WAITING, claim=None, seen_at=timezone.now(), stage="")
        elif held.update(
            state=ImportState.FAILED,
            claim=None,
            finished_at=timezone.now(),
            problems=["The import was interrupted twice. Import the file again: what is stored stays."],
        ):
            ImportChunk.objects.filter(job=job).delete()
        revoke(job.project_id)


def _start_next(project: int) -> None:
    following = ImportJob.objects.filter(project=project, state=ImportState.WAITING).order_by("created_at")
    if (job_id := following.values_list("pk", flat=True).first()) is not None:
        transaction.on_commit(lambda: start(job_id))


def _check(files: Sequence[UploadedFile[Any]], names: Sequence[str]) -> None:
    if not files:
        raise UploadError("Choose a file, several files, or a .zip file of a folder.")
    if len(files) > limits.MAX_FILES:
        raise UploadError(f"These are {len(files)} files: upload at most {limits.MAX_FILES}, or a .zip file.")
    if sum(file.size or 0 for file in files) > limits.MAX_BYTES:
        raise UploadError(
            f"The files are larger than {limits.MAX_BYTES // MIB} MiB: pack them, or run fp8scope import."
        )
    for name in names:
        if not name or len(name) > limits.MAX_NAME or name.startswith(".") or not name.isprintable():
            raise UploadError(f"{name[:60]!r} is no name for a file here: rename it.")
    if len(set(names)) < len(names):
        raise UploadError(
            "Two files have the same name: upload them apart, or as a .zip file of their folder."
        )


def _title(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {count(len(names) - 1, 'other file')}"


def _parts(files: Sequence[UploadedFile[Any]], names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    for file, name in zip(files, names, strict=True):
        empty = True
        for body in file.chunks(limits.CHUNK_BYTES):
            empty = False
            yield name, body
        if empty:
            yield name, b""


def _forget_old(project: Project) -> None:
    over = ImportJob.objects.filter(project=project).exclude(state__in=OPEN).order_by("-created_at")
    old = list(over.values_list("pk", flat=True)[limits.KEPT_JOBS :])
    ImportJob.objects.filter(pk__in=old).delete()
