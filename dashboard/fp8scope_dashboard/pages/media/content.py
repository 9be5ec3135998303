"""Media of runs beside each other: one name, at one step, a column for each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from django.http import QueryDict

from fp8scope_dashboard.media import contents
from fp8scope_dashboard.media.contents import MediaTable
from fp8scope_dashboard.media.models import MediaItem, MediaKind
from fp8scope_dashboard.media.queries import MediaName, items_at, names_of, nearest, runs_with_media
from fp8scope_dashboard.pages.charts.series import step_of
from fp8scope_dashboard.pages.formatting import count
from fp8scope_dashboard.pages.media.serving import address_of
from fp8scope_dashboard.pages.media.text_differences import MarkedText, TextPiece, marked
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.text.natural_order import natural_key

MAX_RUNS: Final = 8
"""Columns of a page; further runs of a comparison are left out, and the page says so."""
SHOWN_ROWS: Final = 200


@dataclass(frozen=True, kw_only=True)
class ShownMedia:
    """A media as the page shows it.

    `reference` is the address of the image of the first run, if this one can be laid over it. `text` and
    `table` are None for other kinds.
    """

    item: MediaItem
    address: str
    reference: str = ""
    text: MarkedText | None = None
    table: MediaTable | None = None

    @property
    def is_image(self) -> bool:
        """Return whether a page may show it."""
        return bool(self.item.content.type)

    @property
    def more_rows(self) -> int:
        """The rows of the table that are not shown."""
        return 0 if self.table is None else max(0, len(self.table.rows) - SHOWN_ROWS)

    @property
    def rows(self) -> list[list[contents.Cell]]:
        """The rows that are shown."""
        return [] if self.table is None else self.table.rows[:SHOWN_ROWS]


@dataclass(frozen=True, kw_only=True)
class MediaColumn:
    """The media of one run. `step` is before the chosen one if the run has none there."""

    run: Run
    step: int
    is_earlier: bool
    media: list[ShownMedia] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class MediaSheet:
    """The media of some runs under one name at one step. `current` is None if the runs have none.

    Attributes:
        runs: those with media, the BF16 runs first.
        addressed: the runs in the addresses of the page.
        left_out: says how many runs with media are beyond MAX_RUNS; empty if none are.
        without: the names of runs that have media, and none of this name at this step or before.
    """

    runs: list[Run]
    addressed: list[Run]
    left_out: str
    names: list[MediaName]
    current: MediaName | None
    index: int
    columns: list[MediaColumn]
    without: list[str]

    @property
    def step(self) -> int:
        """The chosen step."""
        return 0 if self.current is None else self.current.steps[self.index]

    @property
    def last_index(self) -> int:
        """The index of the last step."""
        return 0 if self.current is None else len(self.current.steps) - 1

    @property
    def is_comparison(self) -> bool:
        """Return whether several runs are shown."""
        return len(self.runs) > 1

    @property
    def query(self) -> str:
        """The address of these runs."""
        query = QueryDict(mutable=True)
        query.setlist("runs", [str(run.id) for run in self.addressed])
        return query.urlencode()

    @property
    def position(self) -> str:
        """The chosen step among all, in words."""
        total = self.last_index + 1
        return f"step {count(self.step)}" + (f", {self.index + 1} of {count(total)}" if total > 1 else "")


def sheet_of(runs: Sequence[Run], query: Mapping[str, Any]) -> MediaSheet:
    """The media that an address asks for: `name`, and `step`, or `at`, the index of a step.

    Without a name it is the first, and without a step the last. `last` is the index that was the last when
    the page was made: who is there stays at the end when newer steps come.
    """
    having = runs_with_media(runs)
    # The order of BF16 and FP8 is that of reading: what it should be, and what it is.
    with_media = sorted((run for run in runs if run.pk in having), key=lambda run: not run.is_high_precision)
    shown = with_media[:MAX_RUNS]
    names = sorted(names_of(shown), key=lambda name: natural_key(name.name))
    asked = query.get("name", "")
    current = next((name for name in names if name.name == asked), names[0] if names else None)
    index = 0 if current is None else _index(current.steps, query)
    columns = [] if current is None else _columns(shown, current, current.steps[index])
    left_out = len(with_media) - len(shown)
    return MediaSheet(
        runs=shown,
        addressed=list(runs) if len(runs) <= MAX_RUNS else shown,
        left_out=_left_out(left_out, len(shown)) if left_out else "",
        names=names,
        current=current,
        index=index,
        columns=[column for column in columns if column.media],
        without=[column.run.name for column in columns if not column.media],
    )


def _left_out(others: int, shown: int) -> str:
    rest = "1 other is" if others == 1 else f"{count(others)} others are"
    return f"{shown} runs with media are shown; {rest} left out."


def _index(steps: Sequence[int], query: Mapping[str, Any]) -> int:
    at, step = step_of(query.get("at")), step_of(query.get("step"))
    if at is not None and at != step_of(query.get("last")):
        return min(at, len(steps) - 1)
    return len(steps) - 1 if step is None or at is not None else nearest(steps, step)


def _columns(runs: Sequence[Run], name: MediaName, step: int) -> list[MediaColumn]:
    items = [items_at(run, name.name, step) for run in runs]
    small = [
        item.content for column in items for item in column if item.kind in (MediaKind.TEXT, MediaKind.TABLE)
    ]
    bodies = contents.read_many(small)
    first = next((column for column in items if column), [])
    having = sum(1 for column in items if column)
    columns = []
    for run, column in zip(runs, items, strict=True):
        reference = first if column is not first else []
        columns.append(
            MediaColumn(
                run=run,
                step=column[0].step if column else step,
                is_earlier=bool(column) and column[0].step < step,
                media=[
                    _shown(
                        run,
                        item,
                        reference[index] if index < len(reference) else None,
                        bodies,
                        is_first=column is first and having > 1,
                    )
                    for index, item in enumerate(column)
                ],
            )
        )
    return columns


def _shown(
    run: Run, item: MediaItem, reference: MediaItem | None, bodies: Mapping[int, bytes], *, is_first: bool
) -> ShownMedia:
    body = bodies.get(item.content_id, b"")
    other = None if reference is None or reference.kind != item.kind else reference
    return ShownMedia(
        item=item,
        address=address_of(run, item),
        reference="" if other is None or not _fits(other, item) else _address(other, run),
        text=None if item.kind != MediaKind.TEXT else _text(body, other, bodies, is_first=is_first),
        table=None if item.kind != MediaKind.TABLE else contents.table_in(body),
    )


def _fits(reference: MediaItem, item: MediaItem) -> bool:
    """Return whether one image can be laid over the other: they have the same size and differ."""
    size = (item.content.width, item.content.height)
    is_image = bool(item.content.type and reference.content.type)
    is_other = item.content_id != reference.content_id
    return is_image and is_other and size == (reference.content.width, reference.content.height)


def _address(item: MediaItem, beside: Run) -> str:
    """The address of an item of another run of the project."""
    owner = item.run
    owner.project = beside.project
    return address_of(owner, item)


def _text(
    body: bytes, reference: MediaItem | None, bodies: Mapping[int, bytes], *, is_first: bool
) -> MarkedText:
    """The text. `is_first`: others are compared with it."""
    text = body.decode()
    if reference is None:
        return MarkedText((TextPiece(text, False),), "The others are compared with this." if is_first else "")
    return marked(bodies.get(reference.content_id, b"").decode(), text)
