"""Merging chunks changes their number and nothing else."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from dashboard.telemetry.recorder import Recorder
from django.db import connection
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8scope_dashboard.runs.models import Run, RunState
from fp8scope_dashboard.telemetry import compaction, queries, tasks
from fp8scope_dashboard.telemetry.models import Chunk

pytestmark = pytest.mark.django_db
STATISTICS = ("amax", "saturated", "numel")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "FULL_CHUNKS", 8)


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


def over() -> None:
    Run.objects.update(state=RunState.FINISHED)


def everything(recorder: Recorder) -> list[Any]:
    """All that can be asked for, in a form that compares NaN as equal."""
    run = recorder.run.id
    found: list[Any] = [run]
    for name in queries.scalar_names(run):
        series = queries.scalar(run, name)
        found.append((name, series.steps.tolist(), repr(series.values.tolist()), series.times.tolist()))
    for name in queries.statistic_names(run):
        for index in range(2):
            series = queries.tensor_series(run, index, name)
            found.append((name, index, series.steps.tolist(), series.values.tolist()))
        found.append(repr(queries.heatmap(run, name, columns=7).values.tolist()))
    for writer in queries.writers(run):
        rows = queries.stream(run, writer, 0, 1000)
        found.append(np.concatenate([data.steps for _, data in rows]).tolist() if rows else [])
    return found


def test_it_works() -> None:
    recorder = Recorder.of_new_run(["a", "b"])
    record(recorder, 20)
    before = everything(recorder)
    assert compaction.compact_run(recorder.run.id) == 2
    spans = list(Chunk.objects.order_by("seq").values_list("seq", "last_seq", "rows"))
    assert spans == [(0, 7, 24), (8, 15, 24), *((seq, seq, 3) for seq in range(16, 20))]
    assert everything(recorder) == before
    assert compaction.compact_run(recorder.run.id) == 0
    over()
    assert compaction.compact_run(recorder.run.id) == 1
    assert list(Chunk.objects.order_by("seq").values_list("seq", "last_seq")) == [(0, 19)]
    assert everything(recorder) == before
    assert compaction.compact_run(recorder.run.id) == 0


def test_counters_are_untouched() -> None:
    recorder = Recorder.of_new_run(["a", "b"])
    record(recorder, 9)
    run = Run.objects.get()
    over()
    compaction.compact_run(run.id)
    assert sum(Chunk.objects.values_list("rows", flat=True)) == run.rows_stored == 27
    assert sum(Chunk.objects.values_list("points", flat=True)) == run.points_stored


def test_a_stream_goes_on_in_the_middle_of_a_merged_chunk() -> None:
    recorder = Recorder.of_new_run(["a", "b"])
    record(recorder, 8)
    run, writer = recorder.run.id, recorder.writer
    before = {seq: data.steps.tolist() for seq, data in queries.stream(run, writer, 0, 100)}
    compaction.compact_run(run)
    for begin in range(8):
        ((last, data),) = queries.stream(run, writer, begin, 100)
        assert last == 7
        assert data.steps.tolist() == [step for seq in range(begin, 8) for step in before[seq]]
    assert queries.stream(run, writer, 8, 100) == []


def test_a_batch_that_is_still_on_its_way_finds_its_place() -> None:
    recorder = Recorder.of_new_run()
    for seq in [*range(5), *range(6, 40)]:
        recorder.send([1], {"loss": [float(seq)]}, seq=seq)
    over()
    compaction.compact_run(recorder.run.id)
    assert Chunk.objects.filter(seq__lt=5).count() == 1
    assert Chunk.objects.filter(seq__gt=5).count() == 34
    recorder.send([1], {"loss": [5.0]}, seq=5)
    compaction.compact_run(recorder.run.id)
    found = queries.stream(recorder.run.id, recorder.writer, 0, 100)
    assert [v for _, data in found for v in data.scalars["loss"].tolist()] == list(range(40))
    assert queries.scalar(recorder.run.id, "loss").values.tolist() == [39.0]


def test_a_catalogue_that_grew_in_between() -> None:
    recorder = Recorder.of_new_run(["a"])
    recorder.send([0], None, {"amax": [[1.0]]})
    recorder.catalogue(["b"], offset=1)
    recorder.send([1], None, {"amax": [[2.0, 3.0]]})
    before = everything(recorder)
    over()
    assert compaction.compact_run(recorder.run.id) == 1
    assert everything(recorder) == before


def test_bounds_of_a_merged_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder.of_new_run(["a", "b"])
    record(recorder, 12)
    before = everything(recorder)
    over()
    monkeypatch.setattr(compaction, "FULL_ROWS", 7)
    compaction.compact_run(recorder.run.id)
    assert max(Chunk.objects.values_list("rows", flat=True)) == 6
    monkeypatch.setattr(compaction, "FULL_ROWS", 1000)
    monkeypatch.setattr(compaction, "FULL_CELLS", 80)
    compaction.compact_run(recorder.run.id)
    assert max(Chunk.objects.values_list("points", flat=True)) <= 80
    assert everything(recorder) == before


def test_a_merge_that_is_broken_off_has_not_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder.of_new_run(["a", "b"])
    record(recorder, 8)
    before = everything(recorder)

    def fail(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Chunk.objects, "create", fail)
    with pytest.raises(KeyboardInterrupt):
        compaction.compact_run(recorder.run.id)
    assert Chunk.objects.count() == 8
    assert everything(recorder) == before


@pytest.mark.django_db(transaction=True)
def test_several_workers_at_once() -> None:
    recorder = Recorder.of_new_run(["a", "b"])
    record(recorder, 40)
    before = everything(recorder)
    merges: list[int] = []

    def work() -> None:
        try:
            merges.append(compaction.compact_run(recorder.run.id))
        finally:
            connection.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(merges), sum(merges)) == (4, 5)
    assert Chunk.objects.count() == 5
    assert everything(recorder) == before


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.integers(0, 2), max_size=12), st.integers(2, 6))
def test_any_interleaving_of_sending_and_merging(actions: list[int], full: int) -> None:
    """0: a batch of the first writer, 1: of the second, 2: a compaction. The answers never change by it."""
    compaction.FULL_CHUNKS = full
    first = Recorder.of_new_run(["a", "b"])
    second = first.another(1, ["b", "a"])
    for action in actions:
        if action == 2:
            before = everything(first)
            compaction.compact_run(first.run.id)
            assert everything(first) == before
        else:
            record([first, second][action], 1)
    Run.objects.filter(pk=first.run.pk).update(state=RunState.FINISHED)
    before = everything(first)
    compaction.compact_run(first.run.id)
    assert everything(first) == before


def test_the_sweeper_finds_the_runs_that_need_it() -> None:
    busy, idle, ended = (Recorder.of_new_run(["a", "b"]) for _ in range(3))
    record(busy, 8)
    record(idle, 7)
    record(ended, 2)
    Run.objects.filter(pk=ended.run.pk).update(state=RunState.FINISHED)
    found = compaction.runs_to_compact()
    assert set(found) == {busy.run.id, ended.run.id}
    for run_id in found:
        tasks.compact_run(str(run_id))
    assert compaction.runs_to_compact() == []


@pytest.fixture
def celery_runs_at_once() -> Iterator[None]:
    from celery import current_app

    current_app.conf.task_always_eager = True
    yield
    current_app.conf.task_always_eager = False


def test_the_task_that_beat_starts(celery_runs_at_once: None) -> None:
    recorder = Recorder.of_new_run(["a", "b"])
    record(recorder, 8)
    tasks.sweep()
    assert Chunk.objects.count() == 1
