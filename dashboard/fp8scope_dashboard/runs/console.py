"""The console log of a run: stored within bounds, read in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Any, Final
from uuid import UUID

from django.db import connection
from django.db.models import Exists, Max, OuterRef, QuerySet
from django.utils import timezone

from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.models import ConsoleLine, Run, Writer

# Of each process the first lines are kept, which show how the training began, and the newest.
FIRST_LINES: Final = 1_000
NEWEST_LINES: Final = 20_000
# Lines beyond these bounds that are tolerated, so that not every message deletes some.
SLACK: Final = 1_000
# Lines of a process that are searched, from its end, for the exception.
SEARCHED: Final = 200
# Lines of a text file that are read at a time.
PIECE: Final = 5_000
JOIN_LINES: Final = """
    SELECT string_agg(text || E'\\n', '' ORDER BY number), count(*), max(number)
    FROM (
        SELECT number, text FROM runs_consoleline
        WHERE run_id = %s AND writer_id = %s AND number >= %s
        ORDER BY number LIMIT %s
    ) AS piece
"""
# The constraint by its name: in a distributed store it has the run as well (distribution/statements.py).
STORE: Final = """
    INSERT INTO runs_consoleline (run_id, writer_id, number, time, step, stream, text, received_at)
    VALUES {} ON CONFLICT ON CONSTRAINT console_line_once DO UPDATE SET
        time = EXCLUDED.time, step = EXCLUDED.step, stream = EXCLUDED.stream, text = EXCLUDED.text
"""
VALUES: Final = "(%s, %s, %s, %s, %s, %s, %s, %s)"
LINES_AT_ONCE: Final = 2_000
_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w]*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt|Exit|Warning)\b")


@dataclass(frozen=True)
class NewLine:
    """A line as it was sent; see docs/wire.md."""

    number: int
    time: datetime
    step: int
    stream: str
    text: str


def store(run: Run, writer: Writer, lines: Sequence[NewLine]) -> None:
    """Store lines; one with a stored number replaces it. Call within the transaction of the receipt."""
    # Of a number that occurs twice the last counts: PostgreSQL updates no row twice in a statement.
    last, now = {line.number: line for line in lines}, timezone.now()
    rows = [
        (run.pk, writer.pk, line.number, line.time, line.step, line.stream, line.text, now)
        for line in last.values()
    ]
    with connection.cursor() as cursor:
        for first in range(0, len(rows), LINES_AT_ONCE):
            part = rows[first : first + LINES_AT_ONCE]
            cursor.execute(STORE.format(", ".join([VALUES] * len(part))), list(chain.from_iterable(part)))
    _trim(writer)
    run_changed(run.id, run.project_id, "console", max((line.step for line in lines), default=None))


def _trim(writer: Writer) -> None:
    """Delete the lines between the first and the newest ones."""
    mine = ConsoleLine.objects.filter(run=writer.run_id, writer=writer)
    last = mine.aggregate(last=Max("number"))["last"] or 0
    end = last - NEWEST_LINES
    if end - FIRST_LINES < SLACK:
        return
    oldest = mine.filter(number__gte=FIRST_LINES, number__lt=end)
    if oldest.filter(number__lt=end - SLACK).exists():
        oldest.delete()


def writers_with_lines(run: Run, rank: int | None = None) -> list[Writer]:
    """The processes that have a console log, by attempt; of one rank, if given."""
    has_lines = Exists(ConsoleLine.objects.filter(run=OuterRef("run"), writer=OuterRef("pk")))
    writers = Writer.objects.filter(has_lines, run=run).order_by("attempt", "rank", "created_at", "pk")
    return list(writers if rank is None else writers.filter(rank=rank))


def lines_of(writers: Sequence[Writer], query: str = "") -> QuerySet[ConsoleLine]:
    """The lines of these processes that contain the text `query`, whatever its capitals."""
    lines = _of_run(writers).filter(writer__in=list(writers))
    if query:
        lines = lines.filter(text__icontains=query)
    return lines.order_by("writer__attempt", "writer_id", "number")


def _of_run(writers: Sequence[Writer]) -> QuerySet[ConsoleLine]:
    """The lines of the run of these processes, of which there may be none, with their processes."""
    runs = {writer.run_id for writer in writers}
    return ConsoleLine.objects.filter(run__in=runs, writer__run__in=runs).select_related("writer")


def line_of(writers: Sequence[Writer], key: int) -> ConsoleLine | None:
    """The line with this id of one of these processes."""
    return _of_run(writers).filter(writer__in=list(writers), pk=key).first()


def newest(writers: Sequence[Writer], count: int, query: str = "") -> list[ConsoleLine]:
    """The last `count` lines of these processes that contain `query`, in their order.

    Reads the last processes first: PostgreSQL would sort the lines of all.
    """
    newest: list[ConsoleLine] = []
    left, size = sorted(writers, key=_place), 1
    while left and len(newest) < count:
        lines = lines_of(left[-size:], query).reverse()[: count - len(newest)]
        newest = [*reversed(lines), *newest]
        # Many short starts need few queries.
        left, size = left[:-size], 2 * size
    return newest


def before(writers: Sequence[Writer], line: ConsoleLine, count: int, query: str = "") -> list[ConsoleLine]:
    """The last `count` lines before a line of these processes that contain `query`, in their order."""
    same = lines_of([line.writer], query).filter(number__lt=line.number)
    after = list(same.reverse()[:count])[::-1]
    earlier = [writer for writer in writers if _place(writer) < _place(line.writer)]
    return newest(earlier, count - len(after), query) + after


def _place(writer: Writer) -> tuple[int, int]:
    """Return where the lines of a process stand among those of others."""
    return writer.attempt, writer.pk


def around(line: ConsoleLine, count: int) -> list[ConsoleLine]:
    """About `count` lines of the process of `line`, half of them before it."""
    mine = _of_run([line.writer]).filter(writer=line.writer).order_by("number")
    before = list(mine.filter(number__lt=line.number).reverse()[: count // 2])[::-1]
    return before + list(mine.filter(number__gte=line.number)[: count - len(before)])


def as_text(run: Run, rank: int) -> Iterator[str]:
    """The log of a rank as text, one line each, with a heading for each start of the training."""
    for writer in writers_with_lines(run, rank):
        yield f"--- rank {writer.rank}, start {writer.attempt + 1}, {writer.hostname or 'unknown host'}\n"
        next_number: int | None = 0
        while next_number is not None:
            text, next_number = _piece(writer, next_number)
            if text:
                yield text


def _piece(writer: Writer, first: int) -> tuple[str, int | None]:
    """The text of up to PIECE lines from `first` on, and the number to go on from; None after the last.

    PostgreSQL joins the lines: one value for thousands of rows costs Python next to nothing.
    """
    with connection.cursor() as cursor:
        cursor.execute(JOIN_LINES, [writer.run_id, writer.pk, first, PIECE])
        text, count, last = cursor.fetchone()
    return text or "", last + 1 if count == PIECE else None


def pieces_of(run_id: UUID, writer: UUID, count: int) -> Iterator[list[ConsoleLine]]:
    """All lines of a process, `count` at a time: a cursor would hold a connection while the client reads."""
    lines = ConsoleLine.objects.filter(run_id=run_id, writer__run=run_id, writer__uuid=writer).order_by(
        "number"
    )
    next_number = 0
    while piece := list(lines.filter(number__gte=next_number)[:count]):
        yield piece
        next_number = piece[-1].number + 1


def as_json(line: ConsoleLine) -> dict[str, Any]:
    """A line as in docs/wire.md."""
    named = {name: getattr(line, name) for name in ("number", "step", "stream", "text")}
    return {**named, "time": line.time.isoformat()}


def last_exception(run: Run) -> str:
    """The exception of the last traceback in the newest lines of the run's last start; empty without one."""
    writers = writers_with_lines(run)
    if not writers:
        return ""
    last = [writer for writer in writers if writer.attempt == writers[-1].attempt]
    lines = newest(last, SEARCHED)
    begins = [index for index, line in enumerate(lines) if line.text.startswith("Traceback (most recent")]
    for line in lines[begins[-1] + 1 :] if begins else ():
        if _EXCEPTION.match(line.text):
            return line.text.strip()
    return ""


def delete_before(run_id: UUID, before: datetime, most: int) -> int:
    """Delete up to `most` lines that were received before a time. Returns how many."""
    old = ConsoleLine.objects.filter(run_id=run_id, received_at__lt=before).values_list("pk", flat=True)[
        :most
    ]
    return ConsoleLine.objects.filter(run_id=run_id, pk__in=list(old)).delete()[0]
