"""Compaction jobs find the runs that need them, take turns and run concurrently."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from dashboard.helpers.compacting import compact, everything, over, record
from dashboard.helpers.recorder import Recorder
from django.core.cache import cache
from django.db import connection, transaction
from django.db.models import Sum
from helpers.waiting import PATIENCE_SECONDS

from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import compaction, locks, tasks
from fp8scope_dashboard.telemetry.models import Block, Chunk

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("small_blocks")]


def test_it_works() -> None:
    busy, idle, ended = (Recorder.of_new_run(["a", "b"]) for _ in range(3))
    record(busy, 8)
    record(idle, 7)
    record(ended, 2)
    over(ended)
    assert set(compaction.runs_to_compact()) == {busy.run.id, ended.run.id}
    for run_id in compaction.runs_to_compact():
        tasks.compact_run(str(run_id))
    # A running run is examined again; a finished and compacted one is not.
    assert compaction.runs_to_compact() == [busy.run.id]
    assert not Chunk.objects.exclude(run=idle.run).exists()


def test_finds_the_work_that_a_dead_worker_left(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder.of_new_run(["a", "b"])
    record(recorder, 90)
    over()
    # The worker dies after it moved the last chunk to a block: only Rolling.pending shows that work is left.
    while Chunk.objects.exists():
        compaction.compact_run(recorder.run.id, max_changes=1)
    assert compaction.runs_to_compact() == [recorder.run.id]
    compact(recorder)
    assert compaction.runs_to_compact() == []


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The ids of queued jobs. No worker runs them."""
    jobs: list[str] = []
    monkeypatch.setattr(tasks.compact_run, "delay", jobs.append)
    yield jobs
    for run in Run.objects.all():
        cache.delete(tasks._mark(run.id))


def test_runs_take_turns(queue: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "CHANGES_AT_ONCE", 1)
    monkeypatch.setattr(compaction.compact_run, "__defaults__", (1,))
    large, small = sorted((Recorder.of_new_run(["a", "b"]) for _ in range(2)), key=lambda each: each.run.id)
    record(large, 120)
    record(small, 8)
    tasks.sweep_compaction()
    tasks.sweep_compaction()
    assert queue == [str(large.run.id), str(small.run.id)]
    done = []
    while queue:
        done.append(queue.pop(0))
        tasks.compact_run(done[-1])
    assert done[:4] == [str(large.run.id), str(small.run.id)] * 2
    assert not Chunk.objects.filter(run=small.run).exists()
    assert Chunk.objects.filter(run=large.run).count() < 8
    tasks.sweep_compaction()
    assert len(queue) == 2


def test_a_slow_worker_stops_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "SECONDS_AT_ONCE", 0.0)
    recorder = Recorder.of_new_run(["a", "b"])
    record(recorder, 80)
    over()
    before = everything(recorder)
    # It made one change but returns the limit, so that the caller calls it again.
    assert compaction.compact_run(recorder.run.id, 5) == 5
    assert Block.objects.count() == 1
    while compaction.compact_run(recorder.run.id, 5):
        pass
    assert everything(recorder) == before
    assert not Chunk.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_concurrent_workers_neither_lose_nor_duplicate_rows() -> None:
    recorders = [Recorder.of_new_run(["a", "b"]) for _ in range(3)]
    for recorder in recorders:
        record(recorder, 60)
    over()
    before = [everything(recorder) for recorder in recorders]
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                for recorder in recorders:
                    compaction.compact_run(recorder.run.id, max_changes=2)
        except BaseException as error:
            failures.append(error)
        finally:
            connection.close()

    workers = [threading.Thread(target=work) for _ in range(4)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join(120)
    assert failures == []
    for recorder in recorders:
        compact(recorder)
    assert [everything(recorder) for recorder in recorders] == before
    assert not Chunk.objects.exists()
    assert Block.objects.aggregate(rows=Sum("rows"))["rows"] == 3 * 180


@pytest.mark.django_db(transaction=True)
def test_queries_are_stable_during_compaction() -> None:
    recorder = Recorder.of_new_run(["a", "b"])
    record(recorder, 100)
    over()
    before = everything(recorder)
    done = threading.Event()

    def work() -> None:
        try:
            while compaction.compact_run(recorder.run.id, max_changes=1):
                pass
        finally:
            connection.close()
            done.set()

    thread = threading.Thread(target=work)
    thread.start()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not done.is_set():
        assert time.monotonic() < deadline, "compaction does not end"
        assert everything(recorder) == before
    thread.join(60)
    assert everything(recorder) == before
    assert not Chunk.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_skips_a_run_that_another_worker_compacts() -> None:
    recorder = Recorder.of_new_run(["a", "b"])
    record(recorder, 8)
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction.atomic():
            assert locks.lock_run(recorder.run.id)
            held.set()
            go_on.wait(60)
        connection.close()

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    assert compaction.compact_run(recorder.run.id) == 0
    go_on.set()
    thread.join(60)
    assert compaction.compact_run(recorder.run.id) == 1
