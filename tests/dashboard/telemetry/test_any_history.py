"""Queries equal a plain loop over all rows, for any ranks, attempts, gaps, late batches and compaction."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from dashboard.helpers.recorder import Recorder
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8scope_dashboard.runs.models import Run, RunState, Writer
from fp8scope_dashboard.telemetry import compaction, queries, series
from fp8scope_dashboard.telemetry.models import Chunk
from fp8scope_dashboard.telemetry.rollups import build, schedule

pytestmark = pytest.mark.django_db

TENSORS = ("a", "b")
COUNTS = ("saturated", "nonfinite", "numel")


@dataclass(kw_only=True)
class Row:
    """The data that one writer sent for one step."""

    rank: int
    order: tuple[int, int]
    """Attempt and age of the writer. Of the rows of one rank, the one with the largest order counts."""
    sent: tuple[int, int]
    step: int
    loss: float | None
    values: dict[str, list[float]]


@dataclass
class Process:
    """One writer and the batches that it holds back."""

    recorder: Recorder
    attempt: int
    age: int
    step: int
    held_back: list[tuple[int, Any]] = field(default_factory=list)


@dataclass
class History:
    """A run and every row that was sent to it."""

    random: np.random.Generator
    processes: list[Process] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    @property
    def run(self) -> UUID:
        return self.processes[0].recorder.run.id

    def begin(self, rank: int, attempt: int, step: int) -> None:
        tensors = TENSORS if self.random.random() < 0.7 else tuple(reversed(TENSORS))
        if self.processes:
            recorder = self.processes[0].recorder.another(rank, tensors)
        else:
            recorder = Recorder.of_new_run(tensors)
        age = len(self.processes)
        Writer.objects.filter(uuid=recorder.writer).update(
            attempt=attempt, created_at=timezone.now() + timedelta(seconds=age)
        )
        self.processes.append(Process(recorder, attempt, age, step))

    def send(self, process: Process, steps: int, skip: bool) -> None:
        """Send some steps in one batch. With `skip`, hold the batch back."""
        start = process.step
        process.step += steps
        chosen = start + np.flatnonzero(self.random.random(steps) < 0.9)
        if not len(chosen):
            return
        seq = process.recorder.seq
        process.recorder.seq += 1
        values: dict[str, Any] = {"amax": self.random.normal(size=(len(chosen), 2)).round(3)}
        values["amax"][self.random.random(values["amax"].shape) < 0.1] = math.nan
        values["numel"] = np.where(self.random.random((len(chosen), 1)) < 0.05, 4.0, 8.0) + np.zeros((1, 2))
        busy = self.random.random() < 0.3
        values["saturated"] = self.random.integers(0, 4, (len(chosen), 2)).astype(float)
        values["nonfinite"] = busy * self.random.integers(0, 2, (len(chosen), 2)).astype(float)
        if self.random.random() < 0.2:
            del values["amax"]
        choices = [1.0, -2.5, math.nan, math.inf, -math.inf, None, 0.25]
        loss = [
            choices[i] for i in self.random.choice(7, len(chosen), p=[0.4, 0.3, 0.02, 0.02, 0.02, 0.1, 0.14])
        ]
        batch = (chosen.tolist(), {"loss": loss}, values)
        if skip:
            process.held_back.append((seq, batch))
        else:
            self.arrive(process, seq, batch)

    def arrive(self, process: Process, seq: int, batch: Any) -> None:
        steps, scalars, values = batch
        recorder = process.recorder
        next_seq, recorder.seq = recorder.seq, 0
        recorder.send(steps, scalars, values, seq=seq)
        recorder.seq = max(next_seq, recorder.seq)
        catalogue = Writer.objects.values_list("catalogue", flat=True).get(uuid=recorder.writer)
        for i, step in enumerate(steps):
            by_tensor = {}
            for name, matrix in values.items():
                row = [math.nan, math.nan]
                for column, index in enumerate(catalogue):
                    row[index] = float(matrix[i, column])
                by_tensor[name] = row
            order = (process.attempt, process.age)
            self.rows.append(
                Row(
                    rank=recorder.rank,
                    order=order,
                    sent=(seq, i),
                    step=step,
                    loss=scalars["loss"][i],
                    values=by_tensor,
                )
            )

    def counted(self) -> list[Row]:
        """Rows that no later attempt replaced."""
        firsts: dict[int, int] = {}
        for row in self.rows:
            attempt = row.order[0]
            firsts[attempt] = min(row.step, firsts.get(attempt, row.step))
        return [
            row
            for row in self.rows
            if row.step < min((step for a, step in firsts.items() if a > row.order[0]), default=2**62)
        ]

    def losses(self) -> dict[int, float]:
        best: dict[int, Row] = {}
        for row in self.counted():
            if row.loss is not None:
                known = best.get(row.step)
                key = (-row.rank, row.order, row.sent)
                if known is None or key > (-known.rank, known.order, known.sent):
                    best[row.step] = row
        return {step: float(best[step].loss) for step in sorted(best)}  # type: ignore[arg-type]

    def series(self, statistic: str, tensor: int) -> dict[int, float]:
        """The values of a stored statistic or of `overflow_rate`, by step."""
        needed = COUNTS if statistic == "overflow_rate" else (statistic,)
        best: dict[tuple[int, int], Row] = {}
        for row in self.counted():
            # A row without any of the requested values does not hide another row.
            if all(math.isnan(row.values.get(name, [math.nan] * 2)[tensor]) for name in needed):
                continue
            known = best.get((row.step, row.rank))
            if known is None or (row.order, row.sent) > (known.order, known.sent):
                best[row.step, row.rank] = row
        merged = {}
        for step in sorted({step for step, _ in best}):
            ranks = [row for (at, _), row in best.items() if at == step]
            columns = {
                name: [
                    v for row in ranks if not math.isnan(v := row.values.get(name, [math.nan] * 2)[tensor])
                ]
                for name in needed
            }
            if statistic == "overflow_rate":
                if all(columns.values()) and sum(columns["numel"]) > 0:
                    over = sum(columns["saturated"]) + sum(columns["nonfinite"])
                    merged[step] = over / sum(columns["numel"])
            elif columns[statistic]:
                merged[step] = sum(columns[statistic]) if statistic in COUNTS else max(columns[statistic])
        return merged


@st.composite
def histories(draw: st.DrawFn) -> History:
    """A run of some hundred steps, in any state of compaction."""
    history = History(np.random.default_rng(draw(st.integers(0, 2**32))))
    ranks = draw(st.integers(1, 3))
    for rank in range(ranks):
        history.begin(rank, 0, draw(st.integers(0, 70)))
    for _ in range(draw(st.integers(4, 16))):
        action = draw(st.sampled_from(["send"] * 6 + ["skip", "late", "back", "compact", "compact", "age"]))
        process = history.processes[draw(st.integers(0, len(history.processes) - 1))]
        if action in ("send", "skip"):
            history.send(process, draw(st.sampled_from([1, 20, 64, 150])), skip=action == "skip")
        elif action == "late" and process.held_back:
            history.arrive(process, *process.held_back.pop(draw(st.integers(0, len(process.held_back) - 1))))
        elif action == "back":
            attempt = max(each.attempt for each in history.processes) + 1
            step = draw(st.integers(0, max(each.step for each in history.processes)))
            history.begin(process.recorder.rank, attempt, step)
        elif action == "compact":
            compaction.compact_run(history.run, draw(st.sampled_from([1, 2, 50])))
        elif action == "age":
            Chunk.objects.update(received_at=timezone.now() - compaction.ENOUGH_AGE)
    if draw(st.booleans()):
        Run.objects.filter(pk=history.run).update(state=RunState.FINISHED)
        compaction.compact_run(history.run, draw(st.sampled_from([1, 3, 1000])))
    return history


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compaction, "ENOUGH_ROWS", 40)
    monkeypatch.setattr(compaction, "FULL_ROWS", 150)
    monkeypatch.setattr(compaction, "MAX_SMALL_BLOCKS", 3)
    monkeypatch.setattr(schedule, "MIN_STEPS", 64)
    monkeypatch.setattr(schedule, "SHORT_RUN", 64)
    monkeypatch.setattr(schedule, "MAX_STEPS", 128)
    monkeypatch.setattr(build, "MAX_CELLS", 64 * 128 * 4)
    monkeypatch.setattr(build, "MIN_BUCKETS", 1)
    yield


def check(history: History) -> None:
    run = history.run
    losses = queries.scalar(run, "loss")
    expected = history.losses()
    assert losses.steps.tolist() == list(expected)
    np.testing.assert_array_equal(losses.values, list(expected.values()))
    known = queries.statistic_names(run)
    for statistic in ("amax", "saturated", "overflow_rate"):
        for tensor in range(2) if statistic in known else ():
            series = queries.tensor_series(run, tensor, statistic)
            by_hand = history.series(statistic, tensor)
            assert series.steps.tolist() == list(by_hand)
            np.testing.assert_array_equal(series.values, list(by_hand.values()))


def check_means(history: History, low: int, high: int) -> None:
    """Check bucket means against sums in a plain loop over all rows."""
    stored = queries.step_range(history.run)
    for stride in (1, 2, 64, 512):
        for first, last in ((None, None), (low // 512 * 512, high)):
            means = queries.scalar_means(history.run, {"loss": stride, "missing": 64}, first=first, last=last)
            buckets: dict[int, list[float]] = {}
            for step, value in history.losses().items():
                if first is None or first <= step <= high:
                    buckets.setdefault(step // stride, []).append(value)
            end = 0 if stored is None else stored[1] if last is None else min(last, stored[1])
            line = means["loss"]
            assert line.ends.tolist() == [min((bucket + 1) * stride - 1, end) for bucket in buckets]
            values = [[v for v in each if not math.isnan(v)] for each in buckets.values()]
            assert line.counts.tolist() == [len(each) for each in values]
            np.testing.assert_array_equal(line.last, [each[-1] if each else math.nan for each in values])
            by_hand = [sum(each) / len(each) if each else math.nan for each in buckets.values()]
            np.testing.assert_allclose(line.means, by_hand, rtol=1e-12)
            assert not len(means["missing"])


def check_heat_maps(history: History, low: int, high: int) -> None:
    run = history.run
    for statistic in ("amax", "overflow_rate"):
        if statistic not in queries.statistic_names(run):
            continue
        for columns in (1, 2, 5):
            for first, last, widen in ((None, None, False), (low, high, False), (low, high, True)):
                heat = queries.heatmap(run, statistic, columns=columns, first=first, last=last, widen=widen)
                for tensor in range(2):
                    series = history.series(statistic, tensor)
                    for c, (begin, end) in enumerate(
                        zip(heat.step_edges[:-1], heat.step_edges[1:], strict=True)
                    ):
                        inside = [v for step, v in series.items() if begin <= step < end]
                        np.testing.assert_equal(heat.values[tensor, c], max(inside, default=math.nan))


def check_lines(history: History, low: int, high: int) -> None:
    """Check downsampled series: all points are stored points, and the extremes are among them."""
    run = history.run
    answers = [(queries.scalar(run, "loss", first=low, last=high, points=40), history.losses())]
    for statistic in ("amax", "overflow_rate"):
        if statistic in queries.statistic_names(run):
            line = queries.tensor_series(run, 1, statistic, first=low, last=high, points=40)
            answers.append((line, history.series(statistic, 1)))
    for line, all_rows in answers:
        rows = {step: value for step, value in all_rows.items() if low <= step <= high}
        for step, value in zip(line.steps.tolist(), line.values.tolist(), strict=True):
            np.testing.assert_equal(value, rows[step])
        finite = [value for value in rows.values() if math.isfinite(value)]
        assert not finite or {min(finite), max(finite)} <= set(line.values.tolist())
        assert any(map(math.isnan, rows.values())) == bool(np.isnan(line.values).any())
        assert (len(line) > 0) == bool(rows)


def test_it_works() -> None:
    history = History(np.random.default_rng(0))
    history.begin(0, 0, 0)
    history.begin(1, 0, 0)
    for _ in range(4):
        for process in history.processes:
            history.send(process, 100, skip=False)
    history.begin(0, 1, 250)
    history.send(history.processes[2], 30, skip=False)
    compaction.compact_run(history.run, 100)
    check(history)
    check_means(history, 10, 260)
    check_heat_maps(history, 10, 260)
    assert max(history.losses()) < 280


@given(histories(), st.integers(0, 500), st.integers(1, 600))
@settings(
    max_examples=15,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
def test_queries_equal_a_plain_loop_over_all_rows(history: History, low: int, length: int) -> None:
    check(history)
    check_means(history, low, low + length)
    check_heat_maps(history, low, low + length)
    rows, buckets = series.MAX_ROWS, series.MAX_BUCKETS
    series.MAX_ROWS = 10  # type: ignore[misc]
    try:
        check_lines(history, low, low + length)
    finally:
        series.MAX_ROWS, series.MAX_BUCKETS = rows, buckets  # type: ignore[misc]
    compaction.compact_run(history.run, 1000)
    check(history)
    check_means(history, low, low + length)
    check_heat_maps(history, low, low + length)
