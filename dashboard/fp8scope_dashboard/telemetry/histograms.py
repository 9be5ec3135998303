"""Histograms of exponents: how the elements of a tensor were distributed in the steps that were sampled.

Kept as they came: one message is one step of one writer, with many tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast
from uuid import UUID

import numpy as np
import psycopg
import pyarrow as pa
from django.db import connection
from django.db.models import Max
from numpy.typing import NDArray

from fp8scope_dashboard.db import sql
from fp8scope_dashboard.telemetry.codec import TIME, Float64s, Int64s
from fp8scope_dashboard.telemetry.models import Histogram as Stored
from fp8scope_dashboard.telemetry.writers import EVERY_STEP, sources_of

# As in the kernels' sampling: a bin for zeros, one for each exponent of float32, one for NaN and infinities.
MIN_EXPONENT: Final = -149
MAX_EXPONENT: Final = 127
EXPONENT_BINS: Final = MAX_EXPONENT - MIN_EXPONENT + 3
# Messages that `histogram_rows` reads together, at most.
MESSAGES_AT_ONCE: Final = 128


@dataclass(frozen=True)
class Histogram:
    """A tensor's elements in one step, of all ranks together.

    Attributes:
        step: the step that was sampled.
        zeros: how many were zero.
        counts: float64[277]: how many x had floor(log2 |x|) = MIN_EXPONENT + i.
        nonfinite: how many were NaN or infinite.
    """

    step: int
    zeros: float
    counts: Float64s
    nonfinite: float

    @property
    def total(self) -> float:
        return self.zeros + float(self.counts.sum()) + self.nonfinite


@dataclass(frozen=True)
class HistogramRows:
    """Histograms of one writer in the order in which they were sent: a row is one tensor in one message.

    Attributes:
        seqs: int64[n], the message that each came in.
        steps: int64[n].
        times: datetime64[us][n], UTC, when the step ended.
        tensors: int64[n], the Tensor.index.
        counts: float64[n, 279]: zeros, then one bin for each exponent, then NaN and infinities.
    """

    seqs: Int64s
    steps: Int64s
    times: NDArray[np.datetime64]
    tensors: Int64s
    counts: Float64s


def append(run_id: UUID, writer: UUID, seq: int, step: int, tensors: Sequence[int], body: bytes) -> None:
    """Store a validated message as it came, within the caller's transaction.

    `tensors`: the Tensor.index of each of its rows.
    """
    connection.ensure_connection()
    with connection.wrap_database_errors, psycopg.Cursor(connection.connection) as cursor:
        cursor.execute(
            """
            INSERT INTO telemetry_histogram (run_id, writer, seq, step, tensors, body, received_at)
            VALUES (%s, %s, %s, %s, %s, %s, now())
            """,
            [run_id, writer, seq, step, list(tensors), body],
        )


def histogram(run_id: UUID, tensor: int, step: int | None = None) -> Histogram | None:
    """The tensor's last histogram at or before `step` (the last of all when None); None when there is none.

    `tensor` is its Tensor.index. Ranks add up; of several attempts at a step the latest counts.
    """
    known = sources_of(run_id)
    limit = EVERY_STEP if step is None else step
    rows = Stored.objects.filter(run_id=run_id, tensors__contains=[tensor])
    by_writer = {
        writer: rows.filter(writer=writer, step__lte=min(limit, source.until - 1))
        for writer, source in known.items()
    }
    last = {writer: found.aggregate(last=Max("step"))["last"] for writer, found in by_writer.items()}
    steps = [found for found in last.values() if found is not None]
    if not steps:
        return None
    chosen = max(steps)
    writers = [writer for writer, found in last.items() if found == chosen]
    attempt = max(known[writer].attempt for writer in writers)
    ranks: dict[int, Float64s] = {}
    for writer in writers:
        source = known[writer]
        # Within a rank the most authoritative writer's last message stands for the step.
        if source.attempt == attempt and source.rank not in ranks:
            row = by_writer[writer].filter(step=chosen).order_by("-seq").first()
            if row is not None:
                ranks[source.rank] = _counts(row, tensor)
    counts = np.sum(list(ranks.values()), axis=0)
    return Histogram(chosen, float(counts[0]), counts[1:-1], float(counts[-1]))


def histogram_rows(run_id: UUID, writer: UUID, next_seq: int, most: int) -> HistogramRows | None:
    """Whole messages of one writer from next_seq on: to read every histogram once. None at the end.

    Up to `most` rows, or one message more than that. Go on at the last seq + 1.
    """
    found = sql.fetch(
        """
        SELECT seq, step, tensors, body FROM (
            SELECT *, sum(cardinality(tensors)) OVER (ORDER BY seq) - cardinality(tensors) AS before FROM (
                SELECT seq, step, tensors, body FROM telemetry_histogram
                WHERE run_id = %(run)s AND writer = %(writer)s AND seq >= %(first)s
                ORDER BY seq LIMIT %(limit)s
            ) AS next
        ) AS counted WHERE before < %(most)s ORDER BY seq
        """,
        {"run": run_id, "writer": writer, "first": next_seq, "limit": MESSAGES_AT_ONCE, "most": most},
    )
    if not found:
        return None
    seqs, steps, tensors, bodies = zip(*found, strict=True)
    tables, lengths = [_table(body) for body in bodies], [len(each) for each in tensors]
    return HistogramRows(
        np.repeat(np.array(seqs, np.int64), lengths),
        np.repeat(np.array(steps, np.int64), lengths),
        np.concatenate([table.column(TIME).to_numpy() for table in tables]),
        np.concatenate([np.asarray(each, np.int64) for each in tensors]),
        np.concatenate([_matrix(table) for table in tables]),
    )


def histogram_count(run_id: UUID) -> int:
    """How many rows the run's histograms are: one for each tensor of each message."""
    [(count,)] = sql.fetch(
        """
        SELECT coalesce(sum(cardinality(tensors)), 0)::bigint FROM telemetry_histogram
        WHERE run_id = %(run)s
        """,
        {"run": run_id},
    )
    return int(count)


def _counts(row: Stored, tensor: int) -> Float64s:
    found: Float64s = _matrix(_table(row.body))[row.tensors.index(tensor)]
    return found


def _table(body: bytes | memoryview) -> pa.Table:
    with pa.ipc.open_stream(pa.py_buffer(body)) as stream:
        return stream.read_all()


def _matrix(table: pa.Table) -> Float64s:
    column = table.column("counts").combine_chunks()
    values = cast("pa.FixedSizeListArray[Any]", column).flatten().to_numpy(zero_copy_only=False)
    return np.asarray(values, np.float64).reshape(-1, EXPONENT_BINS)
