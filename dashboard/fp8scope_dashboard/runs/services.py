"""The life cycle of a run: registration, heartbeats, silence, the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import reduce
from operator import or_
from typing import Any
from uuid import UUID

from django.conf import settings
from django.contrib.postgres.aggregates import ArrayAgg
from django.db import connection, transaction
from django.db.models import Case, Count, F, Max, Min, Q, TextField, Value, When
from django.db.models.functions import Coalesce, Greatest, Now
from django.utils import timezone

from fp8scope_dashboard.accounts.models import ApiToken, Project
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.configuration import config_digest, recipe_name
from fp8scope_dashboard.runs.models import Choice, DeletedRun, Run, RunState, Writer

# The first key of the advisory lock; the second derives from the id of the run or writer.
CREATION = 0x66703874
# An agent sends a heartbeat at least every 10 s.
SILENT_AFTER = timedelta(seconds=60)
# Of clients that send no heartbeat between two values: MLflow's, OpenTelemetry's, and `fp8scope tail`.
WITHOUT_HEARTBEATS = ("mlflow", "otlp", "tensorboard")
SILENT_AFTER_WITHOUT_HEARTBEATS = timedelta(hours=1)
MAX_WRITERS = 20_000
# Characters of JSON.
MAX_CONFIG = 8 << 20
MAX_SUMMARY = 1 << 20
# Packages of which all processes of a run should have the same version.
VERSIONED = ("torch", "torchao", "transformer_engine", "triton", "fp8scope", "cuda", "cudnn", "driver")
MAX_VERSIONS = 8
# What the agent adds to the environment while it trains, and at the end of an attempt.
OF_THE_END = ("training", "advice", "step_times")


class RunConflictError(Exception):
    """The id belongs to a run of another project."""


class RunDeletedError(Exception):
    """The run with this id was deleted."""


class TooManyWritersError(Exception):
    """The run has the maximum number of writers."""


def register(
    run_id: UUID,
    project: Project,
    fields: Mapping[str, Any],
    *,
    replace_tags: bool = False,
    token: ApiToken | None = None,
) -> tuple[Run, bool]:
    """Create a run, or complete an existing one. Returns the run and whether it is new.

    Registered fields stay, empty ones are filled in. Later registrations may add to the configuration and the
    summary. With `replace_tags`, the tags are replaced.

    Raises:
        RunConflictError: the id belongs to another project.
        RunDeletedError: the run with this id was deleted.
    """
    if DeletedRun.objects.filter(run_id=run_id).exists():
        raise RunDeletedError
    run, created = Run.with_deleted.filter(id=run_id).first(), False
    if run is None:
        with transaction.atomic():
            _lock_creation(run_id)
            defaults = {
                "project": project,
                "registered_with": token,
                "owner_id": None if token is None else token.created_by_id,
                **fields,
                **_derived(fields),
                **_default_baseline(project, fields),
            }
            defaults |= _margin_of_seeds(project, defaults)
            run, created = Run.with_deleted.get_or_create(id=run_id, defaults=defaults)
    if run.project_id != project.pk:
        raise RunConflictError
    if run.deleted_at is not None:
        raise RunDeletedError
    if created or _complete(run, fields, replace_tags):
        run_changed(run.id, project.pk, "state")
    return run, created


def is_undoable(run_id: UUID, project: Project) -> bool:
    """Return whether a person has deleted the run so recently that the deletion can be undone."""
    hidden = Run.with_deleted.filter(pk=run_id, project=project, erase_at__gt=timezone.now())
    return hidden.exists()


def _derived(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a new run that follow from what the agent sends."""
    named = {"agent_baseline": fields["baseline"]} if fields.get("baseline") else {}
    return {
        **named,
        "agent_baseline_at": fields.get("created_at") if named else None,
        "recipe_name": recipe_name(fields.get("recipe") or {}),
        "config_digest": config_digest(fields.get("config") or {}),
    }


def _default_baseline(project: Project, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The project's default baseline, for an FP8 run that names none and does not belong to it."""
    default = project.default_baseline
    takes_it = fields.get("precision") == "fp8" and not fields.get("baseline")
    return {"baseline": default} if default and takes_it and fields.get("group") != default else {}


def _margin_of_seeds(project: Project, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The margin that a member has chosen for the seeds of a new run, so that they share a verdict."""
    group, baseline = fields.get("group"), fields.get("baseline")
    if not group or not baseline:
        return {}
    seeds = Run.objects.filter(project=project, group=group, baseline=baseline).order_by("-created_at")
    return dict(seeds.values("margin", "margin_nats").first() or {})


def _complete(run: Run, fields: Mapping[str, Any], replace_tags: bool) -> bool:
    """Store what the agent learns after registration. Returns whether anything changed.

    This is the recipe and precision of a watched model, the environment, the planned number of steps, the
    latest process's baseline, the parent, configuration and summary (new values replace old ones) and, with
    `replace_tags`, the tags.
    """
    environment, recipe = fields.get("environment") or {}, fields.get("recipe") or {}
    changes: dict[str, Any] = {}
    if (completed := _environment(run.environment, environment)) != run.environment:
        changes["environment"] = completed
    if recipe and not run.recipe:
        changes |= {"recipe": recipe, "recipe_name": recipe_name(recipe)}
    if run.precision == "unknown" and fields.get("precision", "unknown") != "unknown":
        changes["precision"] = fields["precision"]
        if not run.baseline:
            changes |= _default_baseline(run.project, {"group": run.group, **fields})
    for name, max_size in (("config", MAX_CONFIG), ("summary", MAX_SUMMARY)):
        before = getattr(run, name)
        after = {**before, **(fields.get(name) or {})}
        if after != before and len(json.dumps(after)) <= max_size:
            changes[name] = after
    if "config" in changes and (digest := config_digest(changes["config"])) != run.config_digest:
        changes["config_digest"] = digest
    changes |= _new_baseline(run, fields)
    if fields.get("parent") and not run.parent:
        changes |= {"parent": fields["parent"], "relation": fields.get("relation", "")}
    if replace_tags and fields.get("tags", []) != run.tags:
        changes["tags"] = fields.get("tags", [])
    # A later attempt may plan more steps; a late message of an earlier attempt has fewer.
    if (fields.get("total_steps") or 0) > (run.total_steps or 0):
        changes["total_steps"] = fields["total_steps"]
    if not changes:
        return False
    Run.objects.filter(pk=run.pk).update(**changes)
    for name, value in changes.items():
        setattr(run, name, value)
    return True


def _environment(stored: Mapping[str, Any], sent: Mapping[str, Any]) -> dict[str, Any]:
    """The stored environment with what another process adds, and the versions in which the two differ.

    What an attempt knows at its end replaces that of an earlier attempt. `mixed_versions` has all versions of
    a package that processes of the run have sent.
    """
    completed = {**sent, **stored, **{name: sent[name] for name in OF_THE_END if name in sent}}
    mixed = dict(stored.get("mixed_versions") or {})
    for name in VERSIONED:
        versions = {str(document[name]) for document in (stored, sent) if document.get(name)}
        if len(versions) > 1:
            mixed[name] = sorted({*mixed.get(name, ()), *versions})[:MAX_VERSIONS]
    return {**completed, "mixed_versions": mixed} if mixed else completed


def _new_baseline(run: Run, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The changes for a baseline that the agent names. One that a person has chosen stays.

    A resumed run may name another baseline than before; a late message of an earlier process, which began
    before, changes nothing.
    """
    baseline, began = fields.get("baseline", ""), fields.get("created_at")
    if not baseline or baseline == run.agent_baseline:
        return {}
    if began is not None and run.agent_baseline_at is not None and began < run.agent_baseline_at:
        return {}
    is_chosen = Choice.objects.filter(run=run, field=Choice.Field.BASELINE, undone_at=None).exists()
    effective = {} if is_chosen else {"baseline": baseline}
    return {"agent_baseline": baseline, "agent_baseline_at": began, **effective}


def writer_of(run: Run, uuid: UUID) -> Writer:
    """Return the writer with this id, creating it if it is new.

    Raises:
        TooManyWritersError: the run already has the maximum number of writers.
    """
    writer = Writer.objects.filter(run=run, uuid=uuid).first()
    if writer is not None:
        return writer
    if Writer.objects.filter(run=run).count() >= MAX_WRITERS:
        raise TooManyWritersError
    with transaction.atomic():
        _lock_creation(uuid)
        return Writer.objects.get_or_create(run=run, uuid=uuid)[0]


def _lock_creation(key: UUID) -> None:
    """Serialise the creation of this id until the transaction ends.

    Ranks register their run concurrently; without the lock, PostgreSQL would log an error for every duplicate
    insert.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s, %s)", [CREATION, key.int & 0x7FFFFFFF])


def note_contact(run: Run, writer: Writer) -> None:
    """Record that a writer is alive. A silent run becomes running.

    The clock is PostgreSQL's, as for batches and in `mark_silent`: those of the machines may differ.
    """
    Writer.objects.filter(run=run, pk=writer.pk).update(seen_at=Now())
    Run.objects.filter(pk=run.pk).update(heartbeat_at=Now(), state=alive_state())


def alive_state() -> Case:
    """For updates: silent becomes running, any other state stays."""
    return Case(When(state=RunState.SILENT, then=Value(RunState.RUNNING.value)), default=F("state"))


def count_losses(run: Run, writer: Writer, *, dropped: int, errors: int | None = None) -> None:
    """Store the counts of a writer and add the difference to the run. Call within a transaction.

    Counts only grow: the smaller counts of a late message change nothing.
    """
    if dropped <= writer.rows_dropped and (errors is None or errors <= writer.errors):
        return
    locked = Writer.objects.select_for_update(no_key=True).get(run=run, pk=writer.pk)
    more_dropped = max(0, dropped - locked.rows_dropped)
    more_errors = max(0, (errors or 0) - locked.errors)
    Writer.objects.filter(run=run, pk=writer.pk).update(
        rows_dropped=F("rows_dropped") + more_dropped, errors=F("errors") + more_errors
    )
    Run.objects.filter(pk=run.pk).update(
        rows_dropped=F("rows_dropped") + more_dropped, agent_errors=F("agent_errors") + more_errors
    )


@transaction.atomic
def heartbeat(run: Run, writer_uuid: UUID, *, dropped: int, errors: int) -> RunState:
    """Record a heartbeat of a writer. Returns the state of the run."""
    writer = writer_of(run, writer_uuid)
    note_contact(run, writer)
    count_losses(run, writer, dropped=dropped, errors=errors)
    state = Run.objects.values_list("state", flat=True).get(pk=run.pk)
    if state != run.state:
        run_changed(run.id, run.project_id, "state")
    return RunState(state)


def last_attempt(run: Run) -> int | None:
    """The number of the latest attempt; None if the run has no writer."""
    latest: int | None = Writer.objects.filter(run=run).aggregate(latest=Max("attempt"))["latest"]
    return latest


def attempts_of(run: Run) -> list[dict[str, Any]]:
    """The starts of the run with their processes, hosts and stored steps; the first one first."""
    writers = Writer.objects.filter(run=run).order_by().values("attempt")
    attempts = writers.annotate(
        processes=Count("pk"),
        hosts=ArrayAgg("hostname", distinct=True, order_by="hostname"),
        first_step=Min("first_step"),
        last_step=Max("last_step"),
        started_at=Min("created_at"),
        seen_at=Max("seen_at"),
    )
    return [dict(attempt) for attempt in attempts.order_by("attempt")]


def reopen(run: Run, writer: Writer) -> None:
    """Set an ended run to running for the first writer of a later attempt. Call within a transaction."""
    others = Writer.objects.filter(run=run, attempt__gte=writer.attempt).exclude(pk=writer.pk)
    ended = Run.objects.filter(pk=run.pk, state__in=(RunState.FINISHED, RunState.FAILED))
    if others.exists() or writer.finished_at is not None:
        return
    if ended.update(state=RunState.RUNNING, finished_at=None, error="", heartbeat_at=timezone.now()):
        run_changed(run.id, run.project_id, "state")


def finish(
    run: Run,
    writer: Writer,
    *,
    failed: bool,
    error: str,
    rows_sent: int,
    points_sent: int,
    ends_run: bool = True,
    finished_at: datetime | None = None,
) -> None:
    """End a writer, and its run if it is the last. Call within the transaction that stores the receipt.

    The run finishes when no other writer of the latest attempt is alive. It fails as soon as one of them
    fails; the first error stays, because it usually causes the others. Without `ends_run`, and for a writer
    of an earlier attempt, the run stays open. `finished_at` is when the training ended, which may be
    long before its last data arrives: not before the run began, and not in the future.
    """
    now = timezone.now()
    ended = now if finished_at is None else min(now, max(run.created_at, finished_at))
    stored = Writer.objects.filter(run=run, pk=writer.pk)
    stored.update(finished_at=ended, seen_at=now, failed=failed, error=error)
    changes: dict[str, Any] = {
        "heartbeat_at": now,
        "rows_sent": Coalesce(F("rows_sent"), 0) + rows_sent,
        "points_sent": Coalesce(F("points_sent"), 0) + points_sent,
    }
    later = Writer.objects.filter(run=run, attempt__gt=writer.attempt)
    alive = Writer.objects.filter(
        run=run, attempt=writer.attempt, finished_at=None, seen_at__gt=now - SILENT_AFTER
    ).exclude(pk=writer.pk)
    if not ends_run or later.exists():
        pass
    elif failed:
        first = Case(When(state=RunState.FAILED, then=F("error")), default=Value(error, TextField()))
        changes |= {"state": RunState.FAILED, "error": first, "finished_at": ended}
    elif not alive.exists():
        changes |= {
            "state": Case(
                When(state=RunState.FAILED, then=F("state")), default=Value(RunState.FINISHED.value)
            ),
            "finished_at": Greatest(Coalesce(F("finished_at"), ended), Value(ended)),
        }
    Run.objects.filter(pk=run.pk).update(**changes)
    run_changed(run.id, run.project_id, "state")


def mark_silent() -> int:
    """Mark running runs without a heartbeat for SILENT_AFTER as silent. Returns how many.

    Those of WITHOUT_HEARTBEATS, which send none, are marked after SILENT_AFTER_WITHOUT_HEARTBEATS.

    If the process that began the run has finished, the run is marked as finished instead: the other processes
    were killed or lost their connection.
    """
    # Not `environment__client__in`, which is neither true nor false for a run without this entry.
    clients = [Q(environment__contains={"client": client}) for client in WITHOUT_HEARTBEATS]
    sends_heartbeats = ~reduce(or_, clients)
    overdue = Q(state=RunState.RUNNING, heartbeat_at__lt=Now() - SILENT_AFTER) & (
        sends_heartbeats | Q(heartbeat_at__lt=Now() - SILENT_AFTER_WITHOUT_HEARTBEATS)
    )
    count = 0
    for run_id, project_id in list(Run.objects.filter(overdue).values_list("id", "project_id")):
        first = Writer.objects.filter(run=run_id).order_by("-attempt", "rank", "created_at").first()
        is_finished = first is not None and first.finished_at is not None
        changes: dict[str, Any] = {"state": RunState.FINISHED if is_finished else RunState.SILENT}
        if is_finished and first is not None:
            changes["finished_at"] = first.finished_at
        # Check again in the update: a heartbeat may have arrived in between.
        if Run.objects.filter(overdue, pk=run_id).update(**changes):
            run_changed(run_id, project_id, "state")
            count += 1
    return count


def page_url(run: Run, server: str = "") -> str:
    """The URL of the run page. `server`: the server's address for the client, by default BASE_URL."""
    return f"{server or settings.BASE_URL}/p/{run.project.slug}/runs/{run.id}/"
