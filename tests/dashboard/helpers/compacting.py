"""Recording a run, compacting it, and reading everything that queries return."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from dashboard.helpers.recorder import Recorder

from fp8scope_dashboard.runs.models import Run, RunState
from fp8scope_dashboard.telemetry import compaction, queries
from fp8scope_dashboard.telemetry.models import Block


def record(recorder: Recorder, batches: int, rows: int = 3) -> None:
    rng = np.random.default_rng(batches)
    for _ in range(batches):
        begin = recorder.seq * rows
        values = rng.integers(0, 9, (rows, 2)).astype(float)
        values[rng.random((rows, 2)) < 0.2] = math.nan
        loss = [None if rng.random() < 0.2 else float(v) for v in rng.random(rows)]
        recorder.send(
            range(begin, begin + rows),
            {"loss": loss, f"sometimes_{recorder.seq % 3}": [math.nan] * rows},
            {"amax": values, "numel": np.full((rows, 2), 8.0)},
        )


def over(recorder: Recorder | None = None) -> None:
    runs = Run.objects.all() if recorder is None else Run.objects.filter(pk=recorder.run.pk)
    runs.update(state=RunState.FINISHED)


def compact(recorder: Recorder) -> int:
    """Compact until nothing is left to do. Returns the number of changes."""
    total = 0
    while changes := compaction.compact_run(recorder.run.id):
        total += changes
    return total


def everything(recorder: Recorder) -> list[Any]:
    """The results of all queries, in a form that compares NaN as equal."""
    run = recorder.run.id
    results: list[Any] = [run]
    for name in queries.scalar_names(run):
        series = queries.scalar(run, name)
        results.append((name, series.steps.tolist(), repr(series.values.tolist()), series.times.tolist()))
    for name in queries.statistic_names(run):
        for index in range(2):
            series = queries.tensor_series(run, index, name)
            results.append((name, index, series.steps.tolist(), series.values.tolist()))
        results.append(repr(queries.heatmap(run, name, columns=7).values.tolist()))
        results.append(queries.top(run, name))
    results.append(repr(queries.latest_statistics(run)))
    for writer in queries.writers(run):
        rows = queries.stream(run, writer, 0, 1000)
        results.append(np.concatenate([data.steps for _, data in rows]).tolist() if rows else [])
        loss = [
            (value, logged)
            for _, data in rows
            if "loss" in data.scalars
            for value, logged in zip(data.scalars["loss"].tolist(), data.logged["loss"].tolist(), strict=True)
        ]
        results.append(repr(loss))
    return results


def spans() -> list[tuple[int, int, int]]:
    return list(Block.objects.order_by("seq").values_list("seq", "last_seq", "rows"))
