"""Store validated messages, each in one transaction with its receipt and the counters of its run."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.db import transaction

from fp8scope_dashboard.ingest import statements
from fp8scope_dashboard.ingest.batch import Batch
from fp8scope_dashboard.ingest.urgency import is_urgent
from fp8scope_dashboard.instrumentation import metrics
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.receipts import dedup
from fp8scope_dashboard.runs import services as runs
from fp8scope_dashboard.runs.models import Run, Tensor, Writer
from fp8scope_dashboard.wire import limits
from fp8scope_dashboard.wire.errors import CatalogueGapRefusalError, InvalidError


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The final message of a writer; see docs/wire.md."""

    failed: bool
    error: str
    rows_sent: int
    points_sent: int
    dropped: int
    errors: int
    ends_run: bool = True
    finished_at: datetime | None = None


# Every transaction takes its locks in the same order: receipt, writer, run.


def store_batch(
    run: Run,
    message: dedup.MessageId,
    batch: Batch,
    *,
    urgent: bool = False,
    writer: statements.KnownWriter | None = None,
) -> bool:
    """Store a batch. Returns False if it is already stored.

    It takes one statement, except for the first batch of a writer and after losses. Only its end locks the
    row of the run, which all ranks compete for.

    Args:
        urgent: the sender asks that the batch is judged before those of other runs.
        writer: the writer of the batch, if it was read with the run.

    Raises:
        WriterConflictError, CatalogueGapRefusalError, InvalidError: see docs/wire.md.
    """
    _check_names(run, batch)
    stored_writer = writer or statements.known_writer(run.id, batch.writer)
    if batch.width > (0 if stored_writer is None else stored_writer.catalogued):
        raise _catalogue_gap(0 if stored_writer is None else stored_writer.catalogued, batch)
    if stored_writer is None:
        stored_writer = statements.KnownWriter(
            runs.writer_of(run, batch.writer).pk, rows_dropped=0, catalogued=0
        )
    if batch.dropped > stored_writer.rows_dropped:
        with transaction.atomic():
            is_new = statements.store(run.id, stored_writer.id, message, batch)
            if is_new:
                runs.count_losses(
                    run, Writer.objects.get(run=run, pk=stored_writer.id), dropped=batch.dropped
                )
    else:
        is_new = statements.store(run.id, stored_writer.id, message, batch)
    if not is_new:
        dedup.check_same(message)
        metrics.REPEATED.add()
        return False
    run_changed(run.id, run.project_id, "rows", batch.last_step, urgent=is_urgent(run, batch, said=urgent))
    _count(batch)
    return True


def _count(batch: Batch) -> None:
    """Count a stored batch for the metrics of the server."""
    metrics.MESSAGES.add()
    metrics.ROWS.add(amount=batch.rows)
    metrics.POINTS.add(amount=batch.points)
    metrics.BYTES.add(amount=len(batch.body))
    # A sender's clock may be ahead.
    metrics.STEP_LAG.observe(max(0.0, time.time() - batch.last_time / 1e6))


@transaction.atomic
def store_finish(run: Run, message: dedup.MessageId, ending: Ending) -> bool:
    """Store the end of a writer. Returns False if it is already stored.

    Raises:
        WriterConflictError: another message is stored under this seq.
    """
    writer = runs.writer_of(run, message.writer)
    if not dedup.record(message):
        return False
    runs.count_losses(run, writer, dropped=ending.dropped, errors=ending.errors)
    runs.finish(
        run,
        writer,
        failed=ending.failed,
        error=ending.error,
        rows_sent=ending.rows_sent,
        points_sent=ending.points_sent,
        ends_run=ending.ends_run,
        finished_at=ending.finished_at,
    )
    return True


def tensor_positions(run: Run, writer: UUID) -> dict[str, int]:
    """Return the position of each tensor in the catalogue of a writer, by name. Empty for a new writer."""
    catalogue = Writer.objects.filter(run=run, uuid=writer).values_list("catalogue", flat=True).first()
    if not catalogue:
        return {}
    names = dict(Tensor.objects.filter(run=run).values_list("index", "name"))
    return {names[index]: position for position, index in enumerate(catalogue)}


def _catalogue_gap(length: int, batch: Batch) -> CatalogueGapRefusalError:
    return CatalogueGapRefusalError(
        f"The tensor lists have {batch.width} entries, the catalogue of this writer {length}.",
        "Send the catalogue from offset 0, then this batch again.",
    )


def _check_names(run: Run, batch: Batch) -> None:
    """Bound the number of names that a run accumulates over its steps."""
    _check_count("scalars", run.last_scalars, batch.last_scalars, limits.SCALARS)
    _check_count("statistics", run.statistics, batch.statistics, limits.STATISTICS)


def _check_count(what: str, names: Iterable[str], new: Iterable[str], most: int) -> None:
    count = len(set(names) | set(new))
    if count > most:
        raise InvalidError(
            f"The run would have {count} different {what}; at most {most} are allowed.",
            "Keep step numbers and other changing values out of the names.",
        )
