"""The start of the training to which each stored row belongs, so that an earlier one never holds an alarm.

A generation is one pass of the training over the steps. A resume, a restart and a return to an earlier step
each begin another. Detectors start afresh in each generation, and the conditions of earlier ones end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors import State
from fp8scope_dashboard.runs.models import Run, Writer


@dataclass(frozen=True, kw_only=True)
class WriterStream:
    """The rows of one writer.

    Attributes:
        start: names the start of the training: the attempt, and a number if the attempt has several writers
            of this rank. Equal for all ranks that started together.
        leads: whether it is of the lowest rank of its attempt.
        first_step, last_step: of what it has stored; None if that is nothing.
        finished: whether its process has ended.
        ended_by: the first step of the start that has replaced it; None while it counts.
    """

    writer: UUID
    rank: int
    catalogue: tuple[int, ...]
    start: str
    leads: bool
    attempt: int
    first_step: int | None
    last_step: int | None
    finished: bool
    ended_by: int | None

    def generation(self, returns: int) -> str:
        """The name of a generation: of the start, and how often it has gone back to an earlier step."""
        return f"{self.start}.{returns}" if returns else self.start


def streams_of(run: Run) -> list[WriterStream]:
    """The streams of a run in the order in which they are judged: earlier starts first, lower ranks first.

    Imported writers are left out, because their rows were judged where they were recorded.
    """
    return streams_of_runs([run.pk])[run.pk]


def streams_of_runs(run_ids: Collection[UUID]) -> dict[UUID, list[WriterStream]]:
    """The streams of several runs; see `streams_of`."""
    writers = Writer.objects.filter(run__in=run_ids, imported=False).order_by("attempt", "created_at", "uuid")
    of_run: dict[UUID, list[Writer]] = {run_id: [] for run_id in run_ids}
    for writer in writers:
        of_run[writer.run_id].append(writer)
    return {run_id: _streams(listed) for run_id, listed in of_run.items()}


def _streams(writers: Sequence[Writer]) -> list[WriterStream]:
    of_rank: dict[tuple[int, int], list[Writer]] = defaultdict(list)
    lowest: dict[int, int] = {}
    for writer in writers:
        of_rank[writer.attempt, writer.rank].append(writer)
        lowest[writer.attempt] = min(lowest.get(writer.attempt, writer.rank), writer.rank)
    later = _first_steps_after(writers)
    streams = []
    for writer in writers:
        alike = of_rank[writer.attempt, writer.rank]
        number = alike.index(writer)
        streams.append(
            WriterStream(
                writer=writer.uuid,
                rank=writer.rank,
                catalogue=tuple(writer.catalogue),
                start=f"{writer.attempt}+{number}" if number else str(writer.attempt),
                leads=writer.rank == lowest[writer.attempt],
                attempt=writer.attempt,
                first_step=writer.first_step,
                last_step=writer.last_step,
                finished=writer.finished_at is not None,
                ended_by=_ended_by(writer, later[writer.attempt], alike[number + 1 :]),
            )
        )
    return streams


def _first_steps_after(writers: Sequence[Writer]) -> dict[int, int | None]:
    """By attempt, the first step of all later attempts; None if none has stored a step."""
    after: dict[int, int | None] = {}
    first: int | None = None
    for attempt in sorted({writer.attempt for writer in writers}, reverse=True):
        after[attempt] = first
        steps = [writer.first_step for writer in writers if writer.attempt == attempt]
        first = min((step for step in (first, *steps) if step is not None), default=None)
    return after


def _ended_by(writer: Writer, first_later: int | None, newer: Sequence[Writer]) -> int | None:
    """A later attempt ends all earlier ones; within an attempt, a newer writer one that is no longer there.

    Two writers of one rank at the same time are processes that do not know their rank: both count.
    """
    later = [first_later]
    later += [
        stream.first_step
        for stream in newer
        if writer.finished_at is not None or writer.seen_at <= stream.created_at
    ]
    return min((step for step in later if step is not None), default=None)


@dataclass(frozen=True)
class GenerationRows:
    """Rows of a chunk that belong to one generation.

    Attributes:
        first, last: positions of its rows: first..last - 1.
        returned_to: the step that the training went back to, if the segment begins another generation.
    """

    first: int
    last: int
    returned_to: int | None = None


def segments(state: Mapping[str, int], steps: NDArray[np.int64]) -> tuple[State, list[GenerationRows]]:
    """Divide the rows of a stream where the training returns to an earlier step.

    Two rows in a row below the furthest step are a return. A single one is a late row: it stays in its
    generation, where detectors ignore it. Rows that repeat the furthest step decide nothing.

    Args:
        state: `furthest`, the largest step of the generation; `late`, the step of a row below it, which may
            be the first of a return; `returns`, how many there were. Empty at first.
        steps: int64[R].
    """
    after: State = {"furthest": None, "late": None, "returns": 0, **state}
    furthest = after["furthest"]
    if not len(steps):
        return after, []
    if (furthest is None or steps[0] > furthest) and (np.diff(steps) > 0).all():
        after.update(furthest=int(steps[-1]), late=None)
        return after, [GenerationRows(0, len(steps))]
    parts: list[GenerationRows] = []
    first, returned_to = 0, None
    for i, step in enumerate(steps.tolist()):
        if after["furthest"] is None or step > after["furthest"]:
            after.update(furthest=step, late=None)
        elif step < after["furthest"] and after["late"] is None:
            after["late"] = step
        elif step < after["furthest"]:
            parts.append(GenerationRows(first, i, returned_to))
            first, returned_to = i, min(step, after["late"])
            after.update(furthest=step, late=None, returns=after["returns"] + 1)
    parts.append(GenerationRows(first, len(steps), returned_to))
    return after, [part for part in parts if part.last > part.first or part.returned_to is not None]
