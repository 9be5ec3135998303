"""Register, describe, read and delete runs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any
from uuid import UUID

from django.http import HttpRequest
from django.utils import timezone
from ninja import Query, Router, Status

from fp8scope_dashboard.accounts.addresses import server_address
from fp8scope_dashboard.alerts.services import alerts_after
from fp8scope_dashboard.analysis.precision_matrix import PrecisionMatrix, last_step, matrix_of
from fp8scope_dashboard.analysis.score_comparisons import summary_of
from fp8scope_dashboard.analysis.verdict_coverage import judged_now
from fp8scope_dashboard.api.auth import (
    ADMINISTRATOR,
    RUN_READER,
    WRITER,
    check_run,
    deleted_recently,
    project_of,
    run_of,
    take_quota,
    token_of,
)
from fp8scope_dashboard.api.responses import ERRORS
from fp8scope_dashboard.audit.log import actor_of, record
from fp8scope_dashboard.audit.models import Action
from fp8scope_dashboard.runs import catalogue, notes, services
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import deletion
from fp8scope_dashboard.telemetry.writers import position_of
from fp8scope_dashboard.wire import limits, schemas
from fp8scope_dashboard.wire.errors import (
    CatalogueGapRefusalError,
    InvalidError,
    RunConflictRefusalError,
    TooLargeError,
    WriterConflictError,
)

router = Router(tags=["runs"])
# Length of each list in GET /runs/{run}.
LATEST = 100
IDENTITY = ("id", "name", "state", "precision", "group", "baseline", "parent", "relation")
DESCRIPTION = ("recipe", "tags", "config", "summary", "statistics", "seed", "total_steps")
TIMES = ("created_at", "heartbeat_at", "finished_at", "archived_at")
COUNTERS = (
    "last_step",
    "rows_stored",
    "points_stored",
    "rows_sent",
    "points_sent",
    "rows_dropped",
    "agent_errors",
)


@router.put(
    "/runs/{run}",
    response={201: schemas.RunRegistered, 200: schemas.RunRegistered, ERRORS: schemas.ErrorOut},
    auth=WRITER,
)
def register_run(request: HttpRequest, run: UUID, body: schemas.RunIn) -> Status[Any]:
    """Register a run under an id that the client chooses. Registering the same run again is allowed."""
    if not Run.with_deleted.filter(pk=run).exists():
        take_quota(request, runs=1)
    fields = body.model_dump()
    fields["created_at"] = fields["created_at"] or timezone.now()
    replace_tags = fields.pop("replace_tags")
    try:
        registered, created = services.register(
            run, project_of(request), fields, replace_tags=replace_tags, token=token_of(request)
        )
    except services.RunConflictError as error:
        raise RunConflictRefusalError(
            f"The run {run} belongs to another project.", "Use that project's token, or another id."
        ) from error
    except services.RunDeletedError as error:
        if services.is_undoable(run, project_of(request)):
            raise deleted_recently(run) from error
        raise RunConflictRefusalError(
            f"The run {run} was deleted on the dashboard.", "Start a new run with another id."
        ) from error
    answer = {
        "id": registered.id,
        "project": registered.project.slug,
        "url": services.page_url(registered, server_address(request)),
        "state": registered.state,
        "margin": registered.equivalence_margin,
        "accepts": ["console", "evaluation_matrix", "past_note", "past_artefact", "media"],
    }
    return Status(201 if created else 200, answer)


@router.post(
    "/runs/{run}/writers/{writer}/tensors",
    response={200: schemas.CatalogueLength, ERRORS: schemas.ErrorOut},
    auth=WRITER,
)
def extend_catalogue(
    request: HttpRequest, run: UUID, writer: UUID, body: schemas.CatalogueIn
) -> dict[str, int]:
    """Append to a writer's tensor catalogue. Entries that exist already must be equal."""
    stored = run_of(request, run)
    take_quota(request, tensors=len(body.tensors))
    entries = [
        catalogue.TensorEntry(
            name=t.name, module=t.module, role=t.role, format=t.format, shape=tuple(t.shape), numel=t.numel
        )
        for t in body.tensors
    ]
    try:
        count = catalogue.extend(
            stored,
            writer,
            body.offset,
            entries,
            rank=body.rank,
            hostname=body.hostname,
            attempt=body.attempt,
            imported=body.imported,
        )
    except catalogue.CatalogueGapError as error:
        raise CatalogueGapRefusalError(
            f"The catalogue has {error.length} entries; these begin at {body.offset}.",
            "Send it from offset 0.",
        ) from error
    except catalogue.CatalogueConflictError as error:
        raise WriterConflictError(
            f"Entry {error.position} of this writer's catalogue is another tensor.",
            "Another process uses this writer's id: take a new one.",
        ) from error
    except catalogue.RepeatedTensorError as error:
        raise InvalidError(
            f"The catalogue names {error.name[:200]!r} twice.", "Send each tensor once."
        ) from error
    except catalogue.TooManyTensorsError as error:
        raise TooLargeError(
            f"The run would have more than {limits.TENSORS} tensors.", "Watch fewer tensors."
        ) from error
    return {"count": count}


@router.get(
    "/runs/{run}/writers/{writer}",
    response={200: schemas.WriterPositionOut, ERRORS: schemas.ErrorOut},
    auth=RUN_READER,
)
def get_writer(request: HttpRequest, run: UUID, writer: UUID) -> dict[str, Any]:
    """The stored part of a writer, for clients that have no record of what they have sent."""
    check_run(request, run)
    return asdict(position_of(run, writer))


@router.get("/runs/{run}", response={200: schemas.RunOut, ERRORS: schemas.ErrorOut}, auth=RUN_READER)
def get_run(request: HttpRequest, run: UUID) -> dict[str, Any]:
    """A run: its configuration, its attempts, and its latest verdicts and alerts."""
    stored = run_of(request, run)
    return {
        **{name: getattr(stored, name) for name in (*IDENTITY, *COUNTERS, *DESCRIPTION, *TIMES)},
        # Not `error`: clients take an answer with this key for a refusal.
        "failure": stored.error,
        "last_attempt": services.last_attempt(stored),
        "attempts": services.attempts_of(stored),
        "project": stored.project.slug,
        "owner": None if stored.owner is None else stored.owner.username,
        "comparison": _comparison(stored),
        "evaluations": _evaluations(stored),
        "evaluations_summary": _evaluations_summary(stored),
        "note": notes.note_of(stored.id),
        "step_notes": notes.step_notes_of(stored.id),
        "artefacts": notes.artefacts_of(stored.id),
        "events": alerts_after(stored.id, 0)[-LATEST:],
        "url": services.page_url(stored, server_address(request)),
    }


@router.get(
    "/runs/{run}/evaluation_matrix",
    response={200: schemas.EvaluationMatrixOut, ERRORS: schemas.ErrorOut},
    auth=RUN_READER,
)
def get_evaluation_matrix(
    request: HttpRequest,
    run: UUID,
    step: Annotated[int | None, Query(ge=0, le=limits.MAX_INT, description="Default: the last.")] = None,
) -> PrecisionMatrix:
    """The judged evaluation matrix of one of the run's checkpoints, by default the last that was measured.

    Without one, `columns` and `tasks` are empty.
    """
    stored = run_of(request, run)
    at = last_step(stored) if step is None else step
    return matrix_of(stored, at or 0)


@router.delete(
    "/runs/{run}",
    response={200: schemas.Deletion, 202: schemas.Deletion, ERRORS: schemas.ErrorOut},
    auth=ADMINISTRATOR,
)
def delete_run(request: HttpRequest, run: UUID) -> Status[Any]:
    """Delete a run. It is hidden at once (202); repeat the request until the response is 200."""
    progress = deletion.progress_of(run, project_of(request))
    if progress is None:
        stored = run_of(request, run)
        progress = deletion.begin(stored)
        record(actor_of(request), stored.project, Action.RUN_DELETED, f"“{stored.name}”", run=str(stored.pk))
    answer = {"done": progress.done, "share": progress.share, "bytes_left": progress.left}
    return Status(200 if progress.done else 202, answer)


def _comparison(run: Run) -> dict[str, Any] | None:
    comparison = getattr(run, "comparison", None)
    if comparison is None:
        return None
    return {
        "baseline": comparison.baseline,
        "to_step": comparison.to_step,
        **comparison.result,
        **judged_now(run, comparison).as_dict(),
    }


def _evaluations_summary(run: Run) -> dict[str, Any] | None:
    """One verdict over the tasks of the last compared checkpoint."""
    last = run.evaluation_comparisons.order_by("-step").first()
    if last is None:
        return None
    rows = list(run.evaluation_comparisons.filter(step=last.step).order_by("name", "metric"))
    return {"step": last.step, **summary_of(run, rows).as_dict()}


def _evaluations(run: Run) -> list[dict[str, Any]]:
    rows = run.evaluation_comparisons.order_by("-step", "name", "metric")[:LATEST]
    return [
        {
            "name": row.name,
            "metric": row.metric,
            "step": row.step,
            **row.result,
            **judged_now(run, row).as_dict(),
        }
        for row in rows
    ]
