"""A run as a reader of files yields it: what it is, then tables of values and evaluations in their order."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fp8scope.recording.media import MediaKind

Steps = NDArray[np.int64]
Values = NDArray[np.float64]
EndState = Literal["finished", "failed", "running"]


class UnreadableError(ValueError):
    """A file cannot be read as a run; the message says why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class SourceTensor:
    """A tensor that a tool has statistics of."""

    name: str
    module: str = ""
    role: str = ""
    format: str = ""


@dataclass(frozen=True, kw_only=True)
class ValueTable:
    """Rows of one process.

    Attributes:
        steps: int64[N], not decreasing.
        times: int64[N], microseconds since 1970 (UTC); None where the file has no times.
        scalars: float64[N] by name; NaN and infinities are values.
        missing: bool[N] by name, True where a scalar has no value; a name that is not here has all.
        statistics: float64[N, T] by statistic; NaN where a tensor was not observed.
        tensors: the T tensors: a prefix of those of the process's later tables.
        rank, attempt: the process.
    """

    steps: Steps
    times: Steps | None
    scalars: Mapping[str, Values]
    missing: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    statistics: Mapping[str, Values] = field(default_factory=dict)
    tensors: Sequence[SourceTensor] = ()
    rank: int = 0
    attempt: int = 0

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, kw_only=True)
class SourceEvaluation:
    """The scores of one task and metric, item by item; the arguments of `Run.log_eval`."""

    name: str
    metric: str
    items: Sequence[float]
    item_ids: Sequence[str] | None
    kind: str
    step: int
    higher_is_better: bool = True
    precision: str | None = None


@dataclass(frozen=True, kw_only=True)
class SourceMedia:
    """An image, a text, a table or a file at a step, of the first process."""

    kind: MediaKind
    name: str
    step: int
    content: bytes
    caption: str = ""
    file_name: str = ""


SourcePart = ValueTable | SourceEvaluation | SourceMedia


@dataclass(kw_only=True)
class SourceRun:
    """A run in a file of another tool.

    Attributes:
        key: identifies the run among all runs of its format; the id on the server is computed from it.
        parts: the rows, the evaluations and the media. The reader reads on while they are taken, so they are
            taken once, and before the next run.
        created_at, finished_at: seconds since 1970; None if the file does not say.
        failure: why the run failed.
        notes: what was left out, for the person who imports; complete when the parts are taken.
        late: fields of the run that are only known when the parts are taken: config and summary.
    """

    key: str
    name: str
    parts: Iterator[SourcePart]
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    group: str = ""
    precision: str = "unknown"
    seed: int | None = None
    total_steps: int | None = None
    created_at: float | None = None
    finished_at: float | None = None
    state: EndState = "finished"
    failure: str = ""
    notes: list[str] = field(default_factory=list)
