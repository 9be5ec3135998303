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

from fp8scope_dashboard.telemetry.codec import Float64s
from fp8scope_dashboard.telemetry.models import Histogram as Stored
from fp8scope_dashboard.telemetry.sources import EVERY_STEP, sources_of

# As in the kernels' sampling: a bin for zeros, one for each exponent of float32, one for NaN and infinities.
MIN_EXPONENT: Final = -149
MAX_EXPONENT: Final = 127
EXPONENT_BINS: Final = MAX_EXPONENT - MIN_EXPONENT + 3


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


def _counts(row: Stored, tensor: int) -> Float64s:
    with pa.ipc.open_stream(pa.py_buffer(row.body)) as stream:
        column = stream.read_all().column("counts").combine_chunks()
    values = cast("pa.FixedSizeListArray[Any]", column).flatten().to_numpy(zero_copy_only=False)
    place = row.tensors.index(tensor)
    return np.asarray(values.reshape(-1, EXPONENT_BINS)[place], np.float64)
