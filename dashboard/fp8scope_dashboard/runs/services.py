"""The life of a run: registered, alive, silent, over."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Case, F, Max, Q, TextField, Value, When
from django.db.models.functions import Coalesce, Greatest
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.models import DeletedRun, Run, RunState, Writer

# The first key of the pair that PostgreSQL's advisory locks take; the second is of a run's or writer's id.
CREATION = 0x66703874
# An agent sends a heartbeat at least every 10 s.
SILENT_AFTER = timedelta(seconds=60)
MOST_WRITERS = 20_000
# Characters of JSON that a run's configuration may grow to.
MOST_CONFIG = 8 << 20
MOST_SUMMARY = 1 << 20


class RunConflictError(Exception):
    """The id belongs to a run of another project."""


class RunDeletedError(Exception):
    """A run of this id was deleted."""


class TooManyWritersError(Exception):
    """The run has as many writers as it may."""


def register(
    run_id: UUID, project: Project, fields: Mapping[str, Any], *, replace_tags: bool = False
) -> tuple[Run, bool]:
    """Create the run unless it is there. What was registered first stays; what it left open is filled in, and
    configuration and summary grow with what is logged to them later. With `replace_tags` its tags are these.

    Returns the run and whether it is new.

    Raises:
        RunConflictError: the id belongs to another project.
        RunDeletedError: somebody has deleted the run of this id.
    """
    if DeletedRun.objects.filter(run_id=run_id).exists():
        raise RunDeletedError
    run, created = Run.with_deleted.filter(id=run_id).first(), False
    if run is None:
        with transaction.atomic():
            _one_at_a_time(run_id)
            run, created = Run.with_deleted.get_or_create(id=run_id, defaults={"project": project, **fields})
    if run.project_id != project.pk:
        raise RunConflictError
    if run.deleted_at is not None:
        raise RunDeletedError
    if created or _complete(run, fields, replace_tags):
        run_changed(run.id, project.pk, "state")
    return run, created


def _complete(run: Run, fields: Mapping[str, Any], replace_tags: bool) -> bool:
    """Take over what is learnt only after a run began: its recipe and precision from a model that is watched,
    what looking at the environment took a while to find, how many steps it is planned to take, configuration
    and summary that the script logged on the way (a key that is there already takes the new value), and
    changed tags. Returns whether there was anything.
    """
    environment, recipe = fields.get("environment") or {}, fields.get("recipe") or {}
    late: dict[str, Any] = {}
    if environment.keys() - run.environment.keys():
        late["environment"] = {**environment, **run.environment}
    if recipe and not run.recipe:
        late["recipe"] = recipe
        if run.precision == "unknown":
            late["precision"] = fields.get("precision", "unknown")
    for name, most in (("config", MOST_CONFIG), ("summary", MOST_SUMMARY)):
        before = getattr(run, name)
        after = {**before, **(fields.get(name) or {})}
        if after != before and len(json.dumps(after)) <= most:
            late[name] = after
    if replace_tags and fields.get("tags", []) != run.tags:
        late["tags"] = fields.get("tags", [])
    # A later attempt may have been given more steps; a message of an earlier one that comes late has fewer.
    if (fields.get("total_steps") or 0) > (run.total_steps or 0):
        late["total_steps"] = fields["total_steps"]
    if not late:
        return False
    Run.objects.filter(pk=run.pk).update(**late)
    for name, value in late.items():
        setattr(run, name, value)
    return True


def writer_of(run: Run, uuid: UUID) -> Writer:
    """The writer, created where it is new.

    Raises:
        TooManyWritersError: it would be one too many.
    """
    found = Writer.objects.filter(run=run, uuid=uuid).first()
    if found is not None:
        return found
    if Writer.objects.filter(run=run).count() >= MOST_WRITERS:
        raise TooManyWritersError
    with transaction.atomic():
        _one_at_a_time(uuid)
        return Writer.objects.get_or_create(run=run, uuid=uuid)[0]


def _one_at_a_time(key: UUID) -> None:
    """Until the transaction ends, let nobody else create what has this id: ranks begin their run all at once,
    and each insert that comes second would be an error in PostgreSQL's log.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s, %s)", [CREATION, key.int & 0x7FFFFFFF])


def note_life(run: Run, writer: Writer) -> None:
    """A writer was heard: a silent run runs again."""
    now = timezone.now()
    Writer.objects.filter(pk=writer.pk).update(seen_at=now)
    Run.objects.filter(pk=run.pk).update(heartbeat_at=now, state=alive_state())


def alive_state() -> Case:
    """For updates: silent becomes running, every other state stays."""
    return Case(When(state=RunState.SILENT, then=Value(RunState.RUNNING.value)), default=F("state"))


def count_losses(run: Run, writer: Writer, *, dropped: int, errors: int | None = None) -> None:
    """Take over a writer's counts, which only grow; the run's are the sums. Within a transaction.

    A message that comes late brings smaller counts than are known: these change nothing.
    """
    if dropped <= writer.rows_dropped and (errors is None or errors <= writer.errors):
        return
    locked = Writer.objects.select_for_update(no_key=True).get(pk=writer.pk)
    more_dropped = max(0, dropped - locked.rows_dropped)
    more_errors = max(0, (errors or 0) - locked.errors)
    Writer.objects.filter(pk=writer.pk).update(
        rows_dropped=F("rows_dropped") + more_dropped, errors=F("errors") + more_errors
    )
    Run.objects.filter(pk=run.pk).update(
        rows_dropped=F("rows_dropped") + more_dropped, agent_errors=F("agent_errors") + more_errors
    )


@transaction.atomic
def heartbeat(run: Run, writer_uuid: UUID, *, dropped: int, errors: int) -> RunState:
    """A writer lives. Returns the state of the run."""
    writer = writer_of(run, writer_uuid)
    note_life(run, writer)
    count_losses(run, writer, dropped=dropped, errors=errors)
    state = Run.objects.values_list("state", flat=True).get(pk=run.pk)
    if state != run.state:
        run_changed(run.id, run.project_id, "state")
    return RunState(state)


def last_attempt(run: Run) -> int | None:
    """The number of the run's latest attempt; None before the first writer."""
    latest: int | None = Writer.objects.filter(run=run).aggregate(latest=Max("attempt"))["latest"]
    return latest


def reopen(run: Run, writer: Writer) -> None:
    """A writer of a later attempt has come: a run that was over runs again. Within a transaction."""
    others = Writer.objects.filter(run=run, attempt__gte=writer.attempt).exclude(pk=writer.pk)
    over = Run.objects.filter(pk=run.pk, state__in=(RunState.FINISHED, RunState.FAILED))
    if others.exists() or writer.finished_at is not None:
        return
    if over.update(state=RunState.RUNNING, finished_at=None, error="", heartbeat_at=timezone.now()):
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
) -> None:
    """One writer is done: within the transaction that stores its receipt.

    The run is over when no other writer of the latest attempt is still at it, and at once when one of these
    failed; then the first one's error stays, because it is what made the others fail. Without `ends_run`, and
    for a writer of an earlier attempt, only the writer is done.
    """
    now = timezone.now()
    Writer.objects.filter(pk=writer.pk).update(finished_at=now, seen_at=now, failed=failed, error=error)
    changes: dict[str, Any] = {
        "heartbeat_at": now,
        "rows_sent": Coalesce(F("rows_sent"), 0) + rows_sent,
        "points_sent": Coalesce(F("points_sent"), 0) + points_sent,
    }
    later = Writer.objects.filter(run=run, attempt__gt=writer.attempt)
    at_it = Writer.objects.filter(
        run=run, attempt=writer.attempt, finished_at=None, seen_at__gt=now - SILENT_AFTER
    ).exclude(pk=writer.pk)
    if not ends_run or later.exists():
        pass
    elif failed:
        first = Case(When(state=RunState.FAILED, then=F("error")), default=Value(error, TextField()))
        changes |= {"state": RunState.FAILED, "error": first, "finished_at": now}
    elif not at_it.exists():
        changes |= {
            "state": Case(
                When(state=RunState.FAILED, then=F("state")), default=Value(RunState.FINISHED.value)
            ),
            "finished_at": Greatest(Coalesce(F("finished_at"), now), Value(now)),
        }
    Run.objects.filter(pk=run.pk).update(**changes)
    run_changed(run.id, run.project_id, "state")


def mark_silent() -> int:
    """Runs that nobody has heard of for SILENT_AFTER become silent. Returns how many.

    Where the process that began the run has finished, and others have only not said so (a killed child, a
    rank that was cut off), the run is finished.
    """
    overdue = Q(state=RunState.RUNNING, heartbeat_at__lt=timezone.now() - SILENT_AFTER)
    count = 0
    for run_id, project_id in list(Run.objects.filter(overdue).values_list("id", "project_id")):
        # Asked again in the update: it may have spoken meanwhile.
        first = Writer.objects.filter(run=run_id).order_by("-attempt", "rank", "created_at").first()
        is_over = first is not None and first.finished_at is not None
        changes: dict[str, Any] = {"state": RunState.FINISHED if is_over else RunState.SILENT}
        if is_over and first is not None:
            changes["finished_at"] = first.finished_at
        if Run.objects.filter(overdue, pk=run_id).update(**changes):
            run_changed(run_id, project_id, "state")
            count += 1
    return count


def page_url(run: Run) -> str:
    """The address of the run's page, for people."""
    return f"{settings.BASE_URL}/p/{run.project.slug}/runs/{run.id}/"
