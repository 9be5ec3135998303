"""The latest values of a project's runs as samples, within bounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from fp8scope.client import Client, RunVerdict, StoredRun
from fp8scope.client.plain_text import printable

MAX_RUNS: Final = 200
MAX_SCALARS: Final = 20
MAX_LABEL: Final = 128
SCALARS: Final = ("loss", "grad_norm", "learning_rate", "mfu", "memory_peak")
QUERY: Final = "state:running state:silent"
VERDICTS: Final = ("equivalent", "worse", "better", "cannot_tell", "pending", "incomplete")
Labels = tuple[tuple[str, str], ...]
"""Pairs of names and values, in the order of the names."""


@dataclass(frozen=True)
class MetricSample:
    """The value of a series now."""

    labels: Labels
    value: float


def samples_of(
    client: Client, project: str, query: str, scalars: Sequence[str], max_runs: int = MAX_RUNS
) -> list[MetricSample]:
    """The samples of at most `max_runs` runs that a search finds, newest first.

    `scalars` are at most MAX_SCALARS; a run has those of them that it logged.
    """
    samples: list[MetricSample] = []
    for run in islice(client.runs(query), max_runs):
        samples += _of_run(run, project, scalars[:MAX_SCALARS])
    return samples


def _of_run(run: StoredRun, project: str, scalars: Sequence[str]) -> list[MetricSample]:
    base = {
        "project": project,
        "run": run.id,
        "name": run.name,
        "precision": run.precision,
        "group": run.group,
    }
    verdict = RunVerdict.of(run.fields["verdict"])
    values: list[tuple[str, dict[str, str], float | None]] = [
        ("fp8scope_run_step", {}, run.last_step),
        ("fp8scope_run_open_alerts", {}, run.fields["open_alerts"]),
        ("fp8scope_run_difference", {"unit": verdict.unit}, verdict.delta),
        *(
            ("fp8scope_run_verdict", {"verdict": name}, float(verdict.verdict == name))
            for name in VERDICTS
            if verdict.verdict
        ),
    ]
    logged = run.scalars()
    values += [("fp8scope_run_scalar", {"scalar": name}, logged[name]) for name in scalars if name in logged]
    return [
        MetricSample(labels_of(metric, {**base, **more}), float(value))
        for metric, more, value in values
        if value is not None
    ]


def labels_of(metric: str, labels: Mapping[str, str]) -> Labels:
    """The labels of a series with its name, sorted; empty ones are left out, as Prometheus means them."""
    named = {name: printable(text)[:MAX_LABEL] for name, text in labels.items() if text}
    return tuple(sorted({"__name__": metric, **named}.items()))
