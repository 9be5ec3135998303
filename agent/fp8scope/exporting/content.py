"""The content of an export, as the pages show it: ranks merged, and repeated steps of the last attempt."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from fp8scope.client import EvaluatedScore, RunAlert, StoredRun
from fp8scope.client.history import Steps, Times, Values

Progress = Callable[[int, int], None]
"""Called with the series that are done, and all."""


class ExportError(RuntimeError):
    """The run cannot be exported; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class ExportedSeries:
    """Values over steps, of a scalar, or of a tensor's statistic.

    Attributes:
        scalar, tensor, statistic: the name of the scalar, else of both.
        steps: int64[N]; values: float64[N]; times: datetime64[us][N] in UTC, NaT where it is unknown.
        thinned: retention has left only roll-ups of some steps.
    """

    scalar: str
    tensor: str
    statistic: str
    steps: Steps
    values: Values
    times: Times
    thinned: bool

    @property
    def tag(self) -> str:
        """Its name where all series have one: loss, or amax/blocks.0.mlp.up.input."""
        return self.scalar or f"{self.statistic}/{self.tensor}"

    def seconds(self, default: float) -> Any:
        """float64[N]: seconds since 1970 of its times; `default` where a time is unknown."""
        microseconds = self.times.astype("datetime64[us]").astype(np.int64)
        return np.where(np.isnat(self.times), default, microseconds / 1e6)


@dataclass(frozen=True, kw_only=True)
class RunContent:
    """A run to export. `names` are the (scalar, tensor, statistic) of its series, which `series` reads."""

    run: StoredRun
    names: tuple[tuple[str, str, str], ...]
    scores: tuple[EvaluatedScore, ...]
    alerts: tuple[RunAlert, ...]

    @property
    def began(self) -> float:
        """Seconds since 1970 at which it began."""
        return self.run.created_at.timestamp()

    @property
    def ended(self) -> float | None:
        """Seconds since 1970 at which it ended; None while it runs."""
        return None if self.run.finished_at is None else self.run.finished_at.timestamp()

    def series(self, progress: Progress) -> Iterator[ExportedSeries]:
        """Each series with every stored step; those without values are left out."""
        for done, (scalar, tensor, statistic) in enumerate(self.names):
            progress(done, len(self.names))
            history = self.run.history(scalar, tensor=tensor, statistic=statistic, times=True)
            if len(history) and history.times is not None:
                yield ExportedSeries(
                    scalar=scalar,
                    tensor=tensor,
                    statistic=statistic,
                    steps=history.steps,
                    values=history.values,
                    times=history.times,
                    thinned=history.thinned,
                )

    def settings(self) -> dict[str, bool | int | float | str]:
        """The configuration with nested keys joined by dots, and what a run is named by."""
        run = self.run
        facts = {"precision": run.precision, "group": run.group, "baseline": run.baseline, "seed": run.seed}
        named = {f"fp8scope.{name}": value for name, value in facts.items() if value not in (None, "")}
        return {**flat(run.config), **named}


def content_of(run: StoredRun, tensors: str | None) -> RunContent:
    """Prepare the export of a run.

    Args:
        tensors: a part of the names of tensors whose statistics are exported: "" for all, None for none.
    """
    run = run.refresh()
    names = [(scalar, "", "") for scalar in run.scalars()]
    if tensors is not None:
        chosen = [tensor.name for tensor in run.tensors(filter=tensors)]
        names += [("", tensor, statistic) for statistic in run.statistics for tensor in chosen]
    return RunContent(
        run=run, names=tuple(names), scores=tuple(run.evaluations()), alerts=tuple(run.alerts())
    )


def flat(document: Mapping[str, Any], before: str = "") -> dict[str, bool | int | float | str]:
    """A document with nested keys joined by dots; lists and null as text."""
    entries: dict[str, bool | int | float | str] = {}
    for key, value in document.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            entries |= flat(value, f"{name}.")
        else:
            entries[name] = value if isinstance(value, bool | int | float | str) else str(value)
    return entries


def time_of_step(series: Mapping[int, float], step: int, default: float) -> float:
    """The seconds of a step: those of the step itself, else of the last one before it, else `default`."""
    if step in series:
        return series[step]
    before = [other for other in series if other <= step]
    return series[max(before)] if before else default


def iso(moment: datetime | None) -> str:
    """A time as text; empty for None."""
    return "" if moment is None else moment.astimezone(UTC).isoformat()
