"""In what the configurations of several runs differ. `differences` is a pure function."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final
from uuid import UUID

from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.runs.search.vocabulary import StoredBytes

# Bytes as stored, of each JSON column. A larger configuration is not read.
LARGEST: Final = 500_000
MAX_ENTRIES: Final = 3_000
MAX_ROWS: Final = 500
DEEPEST: Final = 12
# Runs with a column each; of more, each row lists its values with the number of runs.
MAX_SIDE_BY_SIDE: Final = 6
MAX_VALUES: Final = 12
# From so many values on that all differ, only their ends are shown.
MIN_FOLDED: Final = 4
# Longer values are folded.
SHORT: Final = 80
MAX_END: Final = 24
LONGEST: Final = 4_000
_COLUMNS: Final = ("config", "recipe", "environment")
_FIELDS: Final = ("precision", "group", "baseline", "seed", "total_steps")
# Entries of the environment that are never the same twice, and so tell nothing.
_OF_ONE_PROCESS: Final = frozenset(
    {"pid", "pbs_job_id", "lsf_job_id", "training", "advice", "step_times", "capture"}
    | {f"slurm_{name}" for name in ("job_id", "array_job_id", "array_task_id", "step_id")}
)
_MISSING: Final = object()


@dataclass(frozen=True)
class Value:
    """A value as text; `short` is its beginning if it is long. `text` is None where the run has no entry.

    `number` is that of a numeric value.
    """

    text: str | None
    number: float | None = None

    @property
    def is_long(self) -> bool:
        return self.text is not None and (len(self.text) > SHORT or "\n" in self.text)

    @property
    def short(self) -> str:
        return "" if self.text is None else self.text[:SHORT].split("\n")[0]


@dataclass(frozen=True)
class Shared:
    """A value and the runs that have it."""

    value: Value
    runs: tuple[str, ...]

    @property
    def who(self) -> str:
        """The run that has it, or how many do."""
        return self.runs[0] if len(self.runs) == 1 else f"{len(self.runs):,} runs"


@dataclass(frozen=True)
class EntryRow:
    """One entry: `values` by run, and the distinct ones, the most common first."""

    key: str
    values: tuple[Value, ...]
    distinct: tuple[Shared, ...]

    @property
    def differs(self) -> bool:
        return len(self.distinct) > 1

    @property
    def folded(self) -> str:
        """Very many values, or some of which no two are the same: `12 different: 48 … 59`; else empty."""
        number = len(self.distinct)
        if number <= MAX_VALUES and (number < MIN_FOLDED or number < len(self.values)):
            return ""
        sizes = [(shared.value.number, shared.value) for shared in self.distinct]
        if any(size is None for size, _ in sizes):
            ends = sorted(shared.value.short for shared in self.distinct if shared.value.text is not None)
        else:
            ends = [value.short for _, value in sorted(sizes, key=lambda pair: pair[0] or 0.0)]
        return f"{number:,} different: {_end(ends[0])} … {_end(ends[-1])}" if ends else ""

    @property
    def more(self) -> int:
        """The number of values beyond those shown."""
        return max(0, len(self.distinct) - MAX_VALUES)


@dataclass(frozen=True, kw_only=True)
class Differences:
    """The entries of several runs by dotted name.

    Attributes:
        rows: those that differ, or all if asked for, at most MAX_ROWS unless asked for more.
        total, differing: the number of all entries, and of those that differ.
        unread: names of runs whose configuration is too large to be read.
    """

    runs: tuple[str, ...]
    rows: tuple[EntryRow, ...]
    total: int
    differing: int
    unread: tuple[str, ...] = ()
    everything: bool = False

    @property
    def side_by_side(self) -> bool:
        return len(self.runs) <= MAX_SIDE_BY_SIDE

    @property
    def differing_rows(self) -> list[EntryRow]:
        return [row for row in self.rows if row.differs]

    @property
    def equal_rows(self) -> list[EntryRow]:
        return [row for row in self.rows if not row.differs]

    @property
    def more(self) -> int:
        """The number of rows that are left out."""
        return (self.total if self.everything else self.differing) - len(self.rows)


def differences(
    configurations: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    everything: bool = False,
    most: int = MAX_ROWS,
) -> Differences:
    """Compare flat configurations: (name of the run, values by dotted name)."""
    names = tuple(name for name, _ in configurations)
    keys = {key for _, entries in configurations for key in entries}
    rows = [_row(key, configurations) for key in sorted(keys, key=_rank)]
    differing = [row for row in rows if row.differs]
    shown = rows if everything else differing
    return Differences(
        runs=names, rows=tuple(shown[:most]), total=len(rows), differing=len(differing), everything=everything
    )


def _rank(key: str) -> tuple[int, str]:
    """The configuration first and the environment, with much that differs by chance, last."""
    return {"config": 0, "recipe": 2, "environment": 3}.get(key.partition(".")[0], 1), key


def _row(key: str, configurations: Sequence[tuple[str, Mapping[str, Any]]]) -> EntryRow:
    values, having = [], dict[Hashable, list[str]]()
    shown: dict[Hashable, Value] = {}
    for name, entries in configurations:
        entry = entries.get(key, _MISSING)
        identity = _identity(entry)
        if identity not in having:
            having[identity] = []
            shown[identity] = Value(None if entry is _MISSING else _text(entry), _number(entry))
        having[identity].append(name)
        values.append(shown[identity])
    ranked = sorted(having.items(), key=lambda item: -len(item[1]))
    distinct = tuple(Shared(shown[identity], tuple(runs)) for identity, runs in ranked)
    return EntryRow(key, tuple(values), distinct)


def _identity(entry: Any) -> Hashable:
    """Equal for equal values; most entries are plain, and many runs have thousands of them."""
    if entry is _MISSING or entry is None or isinstance(entry, str | bool):
        return type(entry), entry
    return json.dumps(_by_value(entry), sort_keys=True)


def _end(text: str) -> str:
    return text if len(text) <= MAX_END else f"{text[:MAX_END]}…"


def _number(entry: Any) -> float | None:
    return float(entry) if isinstance(entry, int | float) and not isinstance(entry, bool) else None


def flat(value: Any, prefix: str = "", depth: int = 1) -> Iterator[tuple[str, Any]]:
    """The entries of nested objects by dotted name. Lists are values."""
    if isinstance(value, Mapping) and value and depth <= DEEPEST:
        for key, item in value.items():
            yield from flat(item, f"{prefix}.{key}" if prefix else str(key), depth + 1)
    elif prefix:
        yield prefix, value


def _by_value(value: Any) -> Any:
    """The value with equal numbers made the same: 1 and 1.0 are equal, but 1 and True are not."""
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 2**53 else value
    if isinstance(value, list):
        return [_by_value(item) for item in value]
    return {key: _by_value(item) for key, item in value.items()} if isinstance(value, dict) else value


def _text(value: Any) -> str:
    # Blanks at the ends are visible only in quotes.
    is_plain = isinstance(value, str) and value.strip() == value != ""
    text = value if is_plain else json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def lasting(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of an environment that two processes may share: not the ids of processes and jobs."""
    return {name: value for name, value in environment.items() if name not in _OF_ONE_PROCESS}


def repeated(
    runs: Sequence[Run],
    entries: Mapping[UUID, Mapping[str, Any]],
    fields: Sequence[str] = ("name", *_FIELDS),
    prefix: str = "",
) -> set[str]:
    """Entries of configurations that in every run repeat one of its fields, such as `seed`.

    Args:
        entries: by run, with keys that begin with `prefix`.
        fields: those of the run that are shown beside the entries.
    """

    def says_the_same(run: Run, name: str) -> bool:
        entry = entries[run.pk].get(prefix + name, _MISSING)
        own = getattr(run, name)
        return entry is _MISSING or entry == own or (entry in ("", None) and own in ("", None))

    return {prefix + name for name in fields if all(says_the_same(run, name) for run in runs)}


def differences_of(runs: Sequence[Run], *, everything: bool = False) -> Differences:
    """Compare the configurations, recipes and environments of stored runs."""
    ids = [run.pk for run in runs]
    sizes = {f"{column}_size": StoredBytes(column) for column in _COLUMNS}
    stored = Run.objects.filter(pk__in=ids).annotate(**sizes)
    small: dict[UUID, dict[str, Any]] = {pk: {} for pk in ids}
    unread: set[UUID] = set()
    for column in _COLUMNS:
        readable = stored.filter(**{f"{column}_size__lte": LARGEST})
        values = dict(readable.values_list("pk", column))
        unread.update(pk for pk in ids if pk not in values)
        for pk, value in values.items():
            value = lasting(value) if value and column == "environment" else value
            if value:
                small[pk].update(islice(flat(value, column), MAX_ENTRIES))
    configurations = []
    left_out = repeated(runs, small, prefix="config.")
    for run in runs:
        own = {name: getattr(run, name) for name in _FIELDS}
        named = {name: value for name, value in own.items() if value not in ("", None)}
        read = {key: value for key, value in small[run.pk].items() if key not in left_out}
        configurations.append((run.name, {**named, **read}))
    compared = differences(configurations, everything=everything)
    names = tuple(run.name for run in runs if run.pk in unread)
    return Differences(
        runs=compared.runs,
        rows=compared.rows,
        total=compared.total,
        differing=compared.differing,
        unread=names,
        everything=everything,
    )
