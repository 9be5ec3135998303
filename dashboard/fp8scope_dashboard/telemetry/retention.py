"""Raw values for a number of days, roll-ups for ever: a policy of each project (Project.raw_days)."""

from __future__ import annotations

from datetime import datetime, timedelta
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Max
from django.utils import timezone

from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import rolling
from fp8scope_dashboard.telemetry.aggregates import FINEST
from fp8scope_dashboard.telemetry.locks import lock_run
from fp8scope_dashboard.telemetry.models import Block, Histogram, Rolling, Tile

# Blocks deleted in one transaction: some thousands of tiles.
BLOCKS_AT_ONCE = 50
# Messages with histograms deleted in one transaction: some tens of megabytes.
HISTOGRAMS_AT_ONCE = 200


def runs_due() -> list[UUID]:
    """Runs with blocks or histograms that are older than their project keeps raw values."""
    now, found = timezone.now(), []
    runs = Run.objects.filter(project__raw_days__isnull=False).values_list("id", "project__raw_days")
    for run_id, days in runs.iterator():
        if not days:
            continue
        old = {"run_id": run_id, "received_at__lt": now - timedelta(days=days)}
        if any(model._default_manager.filter(**old).exists() for model in (Block, Histogram)):
            found.append(run_id)
    return found


def retain_run(run_id: UUID) -> int:
    """Delete the raw values that the project's policy no longer keeps. Returns the number of rows (steps).

    Only what is rolled up goes, in whole blocks: a block that holds a later step stays. Safe to be killed and
    repeated. What is not rolled up yet (a run without compaction) is kept, whatever its age. Histograms are
    never rolled up: all that are too old go.
    """
    days = Run.objects.filter(pk=run_id).values_list("project__raw_days", flat=True).first()
    if days is None:
        return 0
    rows, age = 0, timedelta(days=days)
    while deleted := _delete_some(run_id, timezone.now() - age):
        rows += deleted
    while _delete_histograms(run_id, timezone.now() - age):
        pass
    return rows


@transaction.atomic
def _delete_some(run_id: UUID, before: datetime) -> int:
    lock_run(run_id, wait=True)
    until = rolling.raw_may_go_until(run_id)
    old = Block.objects.filter(run_id=run_id, received_at__lt=before, last_step__lt=until)
    headers = old.order_by("last_step").values_list("writer", "seq", "rows", "last_step")
    chosen = list(headers[:BLOCKS_AT_ONCE])
    if not chosen:
        return 0
    for model in (Tile, Block):
        with connection.cursor() as cursor:
            cursor.execute(
                f"""
                DELETE FROM {model._meta.db_table}
                WHERE run_id = %s AND (writer, seq) IN (SELECT * FROM unnest(%s::uuid[], %s::bigint[]))
                """,
                [run_id, [writer for writer, *_ in chosen], [seq for _, seq, *_ in chosen]],
            )
    _answer_from_rollups(run_id, until, chosen[-1][3])
    return sum(rows for _, _, rows, _ in chosen)


@transaction.atomic
def _delete_histograms(run_id: UUID, before: datetime) -> int:
    lock_run(run_id, wait=True)
    with connection.cursor() as cursor:
        cursor.execute(
            """
            DELETE FROM telemetry_histogram WHERE run_id = %(run)s AND (writer, seq) IN (
                SELECT writer, seq FROM telemetry_histogram
                WHERE run_id = %(run)s AND received_at < %(before)s LIMIT %(most)s)
            """,
            {"run": run_id, "before": before, "most": HISTOGRAMS_AT_ONCE},
        )
        return int(cursor.rowcount)


def _answer_from_rollups(run_id: UUID, until: int, last_deleted: int) -> None:
    """Below the first multiple of the finest stride behind what was deleted queries ask the roll-ups."""
    raw_from = min(until, -(-(last_deleted + 1) // FINEST) * FINEST)
    known = Rolling.objects.filter(run_id=run_id).aggregate(known=Max("raw_from"))["known"]
    Rolling.objects.filter(run_id=run_id).update(raw_from=max(known or 0, raw_from))
