"""Store and query histograms of exponents: the distribution of tensor elements in sampled steps.

Messages are stored unchanged: one message has one step of one writer, and many tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast
from uuid import UUID

import numpy as np
import psycopg
import pyarrow as pa
from django.db import connection
from django.db.models import Max, QuerySet
from numpy.typing import NDArray

from fp8scope_dashboard.db import sql
from fp8scope_dashboard.telemetry.codec import TIME, Float64s, Int64s
from fp8scope_dashboard.telemetry.cold.bodies import bodies_of, fill_histograms
from fp8scope_dashboard.telemetry.models import Histogram as Stored
from fp8scope_dashboard.telemetry.writers import EVERY_STEP, Source, sources_of

# The bins of the agent: zeros, one per exponent of float32, then NaN and infinities.
MIN_EXPONENT: Final = -149
MAX_EXPONENT: Final = 127
EXPONENT_BINS: Final = MAX_EXPONENT - MIN_EXPONENT + 3
# The most messages that `histogram_rows` reads at a time.
MAX_MESSAGES: Final = 128


@dataclass(frozen=True)
class MergedHistogram:
    """The elements of a tensor in one step, over all ranks.

    Attributes:
        step: the sampled step.
        zeros: the number of zeros.
        counts: float64[277], the number of x with floor(log2 |x|) = MIN_EXPONENT + i.
        nonfinite: the number of NaN and infinities.
    """

    step: int
    zeros: float
    counts: Float64s
    nonfinite: float

    @property
    def total(self) -> float:
        return self.zeros + float(self.counts.sum()) + self.nonfinite


@dataclass(frozen=True)
class StepHistograms:
    """The histograms of all tensors that were sampled in one step, over all ranks.

    Attributes:
        step: the sampled step.
        tensors: int64[n], their Tensor.index, increasing.
        counts: float64[n, 279], zeros, then one bin per exponent, then NaN and infinities.
    """

    step: int
    tensors: Int64s
    counts: Float64s


@dataclass(frozen=True)
class HistogramRows:
    """Histograms of one writer in sending order; a row is one tensor in one message.

    Attributes:
        seqs: int64[n], the message of each row.
        steps: int64[n].
        times: datetime64[us][n], UTC, the end of each step.
        tensors: int64[n], the Tensor.index.
        counts: float64[n, 279], zeros, then one bin per exponent, then NaN and infinities.
    """

    seqs: Int64s
    steps: Int64s
    times: NDArray[np.datetime64]
    tensors: Int64s
    counts: Float64s


def append(run_id: UUID, writer: UUID, seq: int, step: int, tensors: Sequence[int], body: bytes) -> None:
    """Store a validated message unchanged, within the transaction of the caller.

    `tensors` is the Tensor.index of each row.
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


def histogram(run_id: UUID, tensor: int, step: int | None = None) -> MergedHistogram | None:
    """Return the last histogram of a tensor, at or before `step` if given; None if there is none.

    `tensor` is its Tensor.index. Ranks add up. If several attempts have the step, the latest counts.
    """
    ranks = rank_histograms(run_id, tensor, step)
    return _sum_of(list(ranks.values())) if ranks else None


def rank_histograms(run_id: UUID, tensor: int, step: int | None = None) -> dict[int, MergedHistogram]:
    """Return the histograms of a tensor by rank, of the step that `histogram` chooses; empty without any."""
    sources = sources_of(run_id)
    rows = Stored.objects.filter(run_id=run_id, tensors__contains=[tensor])
    latest = _last_sampled(rows, sources, EVERY_STEP if step is None else step)
    if latest is None:
        return {}
    chosen, writers = latest
    by_rank: dict[int, Stored] = {}
    for writer in writers:
        # A rank is represented by the last message of its most authoritative writer.
        if sources[writer].rank not in by_rank:
            row = rows.filter(writer=writer, step=chosen).order_by("-seq").first()
            if row is not None:
                by_rank[sources[writer].rank] = row
    fill_histograms(run_id, list(by_rank.values()))
    return {rank: _histogram_of(row, tensor) for rank, row in sorted(by_rank.items())}


def tensor_histograms(
    run_id: UUID, tensor: int, first: int | None = None, last: int | None = None, most: int = 64
) -> list[MergedHistogram]:
    """Return the histograms of a tensor in the steps first..last (inclusive), by increasing step.

    Ranks add up. Reads at most `most` messages, but at least two steps: of many sampled steps, some that are
    evenly spread, with the first and the last.

    Raises:
        ValueError: `most` is not positive.
    """
    if most < 1:
        raise ValueError(f"most must be positive, not {most}")
    sources = sources_of(run_id)
    rows = Stored.objects.filter(run_id=run_id, tensors__contains=[tensor])
    rows = rows.filter(
        step__gte=-1 if first is None else first, step__lte=EVERY_STEP if last is None else last
    )
    # By step, the message of each rank: of the latest attempt, its most authoritative writer's last one.
    chosen: dict[int, dict[int, tuple[UUID, int]]] = {}
    for writer, source in sources.items():
        mine = rows.filter(writer=writer, step__lt=source.until).order_by("seq")
        for step, seq in mine.values_list("step", "seq"):
            ranks = chosen.setdefault(step, {})
            if source.rank not in ranks or ranks[source.rank][0] == writer:
                ranks[source.rank] = writer, seq
    steps = sorted(chosen)
    per_step = max((len(ranks) for ranks in chosen.values()), default=1)
    positions = np.unique(np.linspace(0, len(steps) - 1, max(2, most // per_step)).round().astype(int))
    messages = [
        [rows.get(writer=writer, seq=seq) for writer, seq in chosen[steps[i]].values()]
        for i in (positions if steps else [])
    ]
    fill_histograms(run_id, [row for of_step in messages for row in of_step])
    return [_sum_of([_histogram_of(row, tensor) for row in of_step]) for of_step in messages]


def _histogram_of(row: Stored, tensor: int) -> MergedHistogram:
    counts = _counts(row, tensor)
    return MergedHistogram(row.step, float(counts[0]), counts[1:-1], float(counts[-1]))


def _sum_of(parts: Sequence[MergedHistogram]) -> MergedHistogram:
    """One histogram of the parts of all ranks."""
    return MergedHistogram(
        parts[0].step,
        sum(part.zeros for part in parts),
        np.sum([part.counts for part in parts], axis=0),
        sum(part.nonfinite for part in parts),
    )


def step_histograms(run_id: UUID, step: int | None = None) -> StepHistograms | None:
    """Return the histograms of the last sampled step, at or before `step` if given; None if there is none.

    Ranks add up. If several attempts have the step, the latest counts; of several messages about a tensor,
    the last one of its writer.
    """
    sources = sources_of(run_id)
    every = Stored.objects.filter(run_id=run_id)
    latest = _last_sampled(every, sources, EVERY_STEP if step is None else step)
    if latest is None:
        return None
    last_step, writers = latest
    rows = list(every.filter(writer__in=writers, step=last_step).order_by("seq"))
    fill_histograms(run_id, rows)
    by_rank: dict[int, tuple[UUID, dict[int, Float64s]]] = {}
    for row in rows:
        # A rank is represented by its most authoritative writer.
        rank = sources[row.writer].rank
        representing, counts = by_rank.get(rank, (None, {}))
        if representing is None or sources[row.writer].order < sources[representing].order:
            representing, counts = row.writer, {}
        if representing == row.writer:
            counts |= zip(row.tensors, _matrix(_table(row.body)), strict=True)
            by_rank[rank] = representing, counts
    total: dict[int, Float64s] = {}
    for _, counts in by_rank.values():
        for tensor, values in counts.items():
            total[tensor] = total[tensor] + values if tensor in total else values
    tensors = sorted(total)
    matrix = np.stack([total[tensor] for tensor in tensors]) if tensors else np.zeros((0, EXPONENT_BINS))
    return StepHistograms(last_step, np.array(tensors, np.int64), matrix)


def sampled_steps(run_id: UUID, most: int) -> list[int]:
    """The last `most` steps that have histograms, increasing."""
    steps: set[int] = set()
    for writer, source in sources_of(run_id).items():
        mine = Stored.objects.filter(run_id=run_id, writer=writer, step__lt=source.until)
        steps |= set(mine.order_by("-step").values_list("step", flat=True).distinct()[:most])
    return sorted(steps)[-most:]


def _last_sampled(
    rows: QuerySet[Stored], sources: Mapping[UUID, Source], limit: int
) -> tuple[int, list[UUID]] | None:
    """The last step of `rows` up to `limit`, and the writers of its latest attempt, by authority."""
    last_steps: dict[UUID, int] = {}
    for writer, source in sources.items():
        mine = rows.filter(writer=writer, step__lte=min(limit, source.until - 1))
        last = mine.aggregate(last=Max("step"))["last"]
        if last is not None:
            last_steps[writer] = last
    if not last_steps:
        return None
    chosen = max(last_steps.values())
    writers = [writer for writer, last in last_steps.items() if last == chosen]
    attempt = max(sources[writer].attempt for writer in writers)
    return chosen, [writer for writer in writers if sources[writer].attempt == attempt]


def histogram_rows(run_id: UUID, writer: UUID, next_seq: int, max_rows: int) -> HistogramRows | None:
    """Read whole messages of a writer from seq `next_seq` on. None at the end.

    Stops after the message that reaches `max_rows` rows. Continue at the last seq + 1.
    """
    messages = sql.fetch(
        """
        SELECT seq, step, tensors, body, location FROM (
            SELECT *, sum(cardinality(tensors)) OVER (ORDER BY seq) - cardinality(tensors) AS before FROM (
                SELECT seq, step, tensors, body, location FROM telemetry_histogram
                WHERE run_id = %(run)s AND writer = %(writer)s AND seq >= %(first)s
                ORDER BY seq LIMIT %(limit)s
            ) AS next
        ) AS counted WHERE before < %(max_rows)s ORDER BY seq
        """,
        {"run": run_id, "writer": writer, "first": next_seq, "limit": MAX_MESSAGES, "max_rows": max_rows},
    )
    if not messages:
        return None
    seqs, steps, tensors, *stored = zip(*messages, strict=True)
    tables = [_table(body) for body in bodies_of(run_id, list(zip(*stored, strict=True)))]
    lengths = [len(index) for index in tensors]
    return HistogramRows(
        np.repeat(np.array(seqs, np.int64), lengths),
        np.repeat(np.array(steps, np.int64), lengths),
        np.concatenate([table.column(TIME).to_numpy() for table in tables]),
        np.concatenate([np.asarray(index, np.int64) for index in tensors]),
        np.concatenate([_matrix(table) for table in tables]),
    )


def histogram_count(run_id: UUID) -> int:
    """The number of histograms of a run: one per tensor and message."""
    [(count,)] = sql.fetch(
        """
        SELECT coalesce(sum(cardinality(tensors)), 0)::bigint FROM telemetry_histogram
        WHERE run_id = %(run)s
        """,
        {"run": run_id},
    )
    return int(count)


def _counts(row: Stored, tensor: int) -> Float64s:
    # Only the row of the tensor is converted: a message has those of thousands.
    counts: Float64s = _matrix(_table(row.body).slice(row.tensors.index(tensor), 1))[0]
    return counts


def _table(body: bytes | memoryview) -> pa.Table:
    with pa.ipc.open_stream(pa.py_buffer(body)) as stream:
        return stream.read_all()


def _matrix(table: pa.Table) -> Float64s:
    column = table.column("counts").combine_chunks()
    values = cast("pa.FixedSizeListArray[Any]", column).flatten().to_numpy(zero_copy_only=False)
    return np.asarray(values, np.float64).reshape(-1, EXPONENT_BINS)
