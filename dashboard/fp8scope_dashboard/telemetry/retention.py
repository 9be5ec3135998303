"""Delete raw tensor values after a number of days (Project.raw_days), keeping roll-ups and scalars.

Scalars are kept because they are few, and because results must not get coarser with age: a run may be
compared with a baseline of last year.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Max
from django.utils import timezone

from fp8scope_dashboard.db import sql
from fp8scope_dashboard.media import services as media
from fp8scope_dashboard.media.models import MediaItem
from fp8scope_dashboard.runs import console
from fp8scope_dashboard.runs.models import ConsoleLine, Run
from fp8scope_dashboard.telemetry.aggregates import FINEST
from fp8scope_dashboard.telemetry.cold.files import release_files
from fp8scope_dashboard.telemetry.locks import lock_run
from fp8scope_dashboard.telemetry.models import Histogram, Rolling
from fp8scope_dashboard.telemetry.rollups import schedule

# Blocks processed in one transaction: some thousands of tiles.
BLOCKS_AT_ONCE = 50
TENSORS = "name LIKE 'tensor:%%'"
"""The condition for tensor tiles."""
OLD_BLOCKS = f"""
    SELECT writer, seq, rows, last_step FROM telemetry_block b
    WHERE run_id = %(run)s AND received_at < %(before)s AND EXISTS (
        SELECT FROM telemetry_tile t
        WHERE t.run_id = %(run)s AND t.writer = b.writer AND t.seq = b.seq AND {TENSORS})
"""
"""Blocks that hold raw tensor values."""
# Messages with histograms deleted in one transaction: some tens of megabytes.
HISTOGRAMS_AT_ONCE = 200
# Lines of the console log deleted in one transaction.
LINES_AT_ONCE = 5_000
# Media deleted in one transaction: some tens of megabytes.
MEDIA_AT_ONCE = 50


def runs_due() -> list[UUID]:
    """Return the runs with raw tensor values or histograms older than their project keeps them."""
    now, due = timezone.now(), []
    runs = Run.objects.filter(project__raw_days__isnull=False).values_list("id", "project__raw_days")
    for run_id, days in runs:
        if not days:
            continue
        before = now - timedelta(days=days)
        parameters = {"run": run_id, "before": before}
        if (
            sql.fetch(f"{OLD_BLOCKS} LIMIT 1", parameters)
            or Histogram.objects.filter(run_id=run_id, received_at__lt=before).exists()
            or ConsoleLine.objects.filter(run_id=run_id, received_at__lt=before).exists()
            or MediaItem.objects.filter(run_id=run_id, received_at__lt=before).exists()
        ):
            due.append(run_id)
    return due


def retain_run(run_id: UUID) -> int:
    """Delete the raw tensor values and histograms that are too old. Returns the number of affected rows.

    Deletes the values of whole blocks, and only if all their steps are rolled up; a run without compaction
    keeps its values. Histograms have no roll-ups and are always deleted. May be killed and repeated.
    """
    stored = Run.objects.filter(pk=run_id).values_list("project__raw_days", "project_id").first()
    days, project_id = stored or (None, 0)
    if days is None:
        return 0
    rows, age = 0, timedelta(days=days)
    while deleted := _delete_some(run_id, timezone.now() - age):
        rows += deleted
    while _delete_histograms(run_id, timezone.now() - age):
        pass
    while console.delete_before(run_id, timezone.now() - age, LINES_AT_ONCE):
        pass
    while media.delete_before(run_id, project_id, timezone.now() - age, MEDIA_AT_ONCE):
        pass
    return rows


@transaction.atomic
def _delete_some(run_id: UUID, before: datetime) -> int:
    lock_run(run_id, wait=True)
    until = schedule.raw_may_go_until(run_id)
    chosen = sql.fetch(
        f"{OLD_BLOCKS} AND last_step < %(until)s ORDER BY last_step LIMIT %(most)s",
        {"run": run_id, "before": before, "until": until, "most": BLOCKS_AT_ONCE},
    )
    if not chosen:
        return 0
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            DELETE FROM telemetry_tile
            WHERE run_id = %s AND {TENSORS}
                AND (writer, seq) IN (SELECT * FROM unnest(%s::uuid[], %s::bigint[]))
            """,
            [run_id, [writer for writer, *_ in chosen], [seq for _, seq, *_ in chosen]],
        )
    release_files(run_id)
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
        deleted = int(cursor.rowcount)
    release_files(run_id)
    return deleted


def _answer_from_rollups(run_id: UUID, until: int, last_deleted: int) -> None:
    """Answer queries from roll-ups up to the end of the finest bucket with deleted values."""
    raw_from = min(until, -(-(last_deleted + 1) // FINEST) * FINEST)
    first_raw = Rolling.objects.filter(run_id=run_id).aggregate(known=Max("raw_from"))["known"]
    Rolling.objects.filter(run_id=run_id).update(raw_from=max(first_raw or 0, raw_from))
