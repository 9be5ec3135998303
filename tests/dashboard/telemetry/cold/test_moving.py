"""Values that were moved into the cold store are read as before, by every reader."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from dashboard.helpers import compacting
from dashboard.helpers.object_stores import (
    ColdFolder,
    cold_bodies,
    everything,
    finish,
    old_run,
    sample,
    warm_bodies,
)
from dashboard.helpers.recorder import Recorder
from django.conf import LazySettings
from django.core.cache import cache
from django.db import close_old_connections, connection
from django.utils import timezone

from fp8scope_dashboard.cold_store.object_store import object_store
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.settings.cold_store import ColdStoreSettings
from fp8scope_dashboard.telemetry import compaction, queries, storage, tasks
from fp8scope_dashboard.telemetry.cold import moving
from fp8scope_dashboard.telemetry.models import Block, Chunk, ColdFile, ColdFileState, Rolling, Tile

pytestmark = pytest.mark.django_db(transaction=True)


def test_it_works(any_cold: ColdFolder) -> None:
    recorder = old_run()
    before, bodies = everything(recorder), warm_bodies()
    size = storage.of_run(recorder.run.pk).bytes
    assert moving.runs_due() == [recorder.run.pk] and bodies > 10
    assert moving.move_run(recorder.run.pk) == moving.Moved(bodies, is_all=True)
    assert (warm_bodies(), cold_bodies()) == (0, bodies)
    (name,) = any_cold.names()
    assert re.fullmatch(rf"{recorder.run.pk}-[0-9a-f]{{64}}\.bodies", name)
    file = ColdFile.objects.get()
    assert (file.state, file.bodies) == (ColdFileState.STORED, bodies)
    assert file.bytes == len(any_cold.read(name))
    assert everything(recorder) == before
    # Again, from the cache on the disk.
    assert everything(recorder) == before
    stored = storage.of_run(recorder.run.pk)
    assert stored.bytes < size and stored.cold_bytes == file.bytes
    assert moving.runs_due() == []
    assert moving.move_run(recorder.run.pk).bodies == 0 and any_cold.names() == [name]


def test_files_have_a_largest_size(cold: ColdFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = old_run()
    before = everything(recorder)
    monkeypatch.setattr(moving, "MAX_FILE_BYTES", 8_000)
    moved = moving.move_run(recorder.run.pk, seconds=0.0)
    assert moved.bodies and not moved.is_all and len(cold.names()) == 1
    assert warm_bodies() and everything(recorder) == before
    assert moving.move_run(recorder.run.pk).is_all
    assert len(cold.names()) > 2 and not warm_bodies() and everything(recorder) == before


def test_recent_running_and_deleted_runs_stay(cold: ColdFolder) -> None:
    recorder = old_run()
    runs = Run.objects.filter(pk=recorder.run.pk)
    runs.update(heartbeat_at=timezone.now() - timedelta(days=29))
    assert moving.runs_due() == []
    runs.update(heartbeat_at=timezone.now() - timedelta(days=31))
    assert moving.runs_due() == [recorder.run.pk]
    Rolling.objects.update(pending=True)
    assert moving.runs_due() == []
    Rolling.objects.update(pending=False)
    runs.update(deleted_at=timezone.now())
    assert moving.runs_due() == []


def test_the_sweep_moves_runs(cold: ColdFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = old_run()
    queued: list[str] = []
    monkeypatch.setattr(tasks.move_run, "delay", queued.append)
    cache.delete(f"moving:{recorder.run.pk}")
    tasks.sweep_cold_store()
    tasks.sweep_cold_store()
    assert queued == [str(recorder.run.pk)], "once"
    tasks.move_run(queued.pop())
    assert queued == [] and not warm_bodies()


def test_the_rest_of_a_run_is_queued_again(cold: ColdFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = old_run()
    queued = [str(recorder.run.pk)]
    monkeypatch.setattr(tasks.move_run, "delay", queued.append)
    monkeypatch.setattr(moving, "MAX_FILE_BYTES", 8_000)
    monkeypatch.setattr(moving, "move_run", partial(moving.move_run, seconds=0.0))
    jobs = 0
    while queued:
        tasks.move_run(queued.pop())
        jobs += 1
    assert jobs > len(cold.names()) > 2 and not warm_bodies()


def test_nothing_happens_without_a_store(settings: LazySettings) -> None:
    settings.COLD_STORE = None
    old_run()
    tasks.sweep_cold_store()
    assert warm_bodies() and not cold_bodies()


def test_two_jobs_at_once(cold_s3: ColdFolder) -> None:
    recorder = old_run()
    before, bodies = everything(recorder), warm_bodies()

    def move(_: int) -> int:
        try:
            return moving.move_run(recorder.run.pk).bodies
        finally:
            close_old_connections()
            connection.close()

    with ThreadPoolExecutor(2) as threads:
        moved = list(threads.map(move, range(2)))
    assert sum(moved) == bodies == cold_bodies()
    assert len(cold_s3.names()) == ColdFile.objects.count() == 1
    assert everything(recorder) == before


def test_a_row_that_changes_meanwhile_keeps_its_body(
    cold: ColdFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = old_run()
    chosen = Tile.objects.filter(name="tensor:amax").order_by("seq")[0]
    put = object_store().put

    def change(*arguments: object) -> None:
        put(*arguments)  # type: ignore[arg-type]
        Tile.objects.filter(pk=chosen.pk).update(body=b"changed")

    monkeypatch.setattr(object_store(), "put", change)
    bodies = warm_bodies()
    moved = moving._move_file(recorder.run.pk)
    assert moved == bodies - 1 == cold_bodies() == ColdFile.objects.get().bodies
    assert bytes(Tile.objects.get(pk=chosen.pk).body) == b"changed"


def test_a_late_batch_of_a_moved_run(cold: ColdFolder, small_blocks: None) -> None:
    """Late rows become blocks of their own; the others stay where they are."""
    recorder = old_run(330)
    amax = queries.tensor_series(recorder.run.pk, 0, "amax")
    moving.move_run(recorder.run.pk)
    bodies = cold_bodies()
    recorder.send([5, 400], {"loss": [0.5, 0.25]}, {"amax": [[7.0, 8.0], [9.0, 10.0]]})
    assert queries.tensor_series(recorder.run.pk, 0, "amax").values[-1] == 9.0
    finish(recorder)
    assert not Chunk.objects.exists() and cold_bodies() == bodies and warm_bodies()
    late = queries.tensor_series(recorder.run.pk, 0, "amax")
    assert late.steps.tolist() == sorted({*amax.steps.tolist(), 5, 400})
    others = ~np.isin(late.steps, [5, 400])
    assert late.values[others].tolist() == amax.values[amax.steps != 5].tolist()
    # They are old again.
    assert moving.runs_due() == [recorder.run.pk]
    before = compacting.everything(recorder)
    assert moving.move_run(recorder.run.pk).is_all and not warm_bodies()
    assert compacting.everything(recorder) == before and len(cold.names()) == 2


def test_late_histograms_are_moved_too(cold: ColdFolder) -> None:
    recorder = old_run(330)
    moving.move_run(recorder.run.pk)
    sample(recorder, range(20, 21), np.random.default_rng(1))
    assert queries.sampled_steps(recorder.run.pk, 9) == [0, 20, 250]
    before = repr(queries.histogram(recorder.run.pk, 0, 20))
    assert moving.move_run(recorder.run.pk).bodies == 1 and not warm_bodies()
    assert repr(queries.histogram(recorder.run.pk, 0, 20)) == before


def test_cold_blocks_are_not_merged(cold: ColdFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "ENOUGH_CHUNKS", 1)
    recorder = Recorder.of_new_run(["a"])
    for step in range(3):
        recorder.send([step], {"loss": [1.0]}, {"amax": [[float(step)]]})
        compaction._locked(recorder.run.pk, compaction._chunks_to_block)
    assert Block.objects.count() == 3
    moving.move_run(recorder.run.pk)
    finish(recorder)
    assert Block.objects.count() == 3 and cold_bodies() == 3
    assert queries.tensor_series(recorder.run.pk, 0, "amax").values.tolist() == [0.0, 1.0, 2.0]


def test_a_cache_of_nothing(cold: ColdFolder, settings: LazySettings, tmp_path: Path) -> None:
    recorder = old_run(330)
    before = everything(recorder)
    settings.COLD_STORE = ColdStoreSettings(url=cold.settings.url, folder=cold.settings.folder, cache_bytes=0)
    moving.move_run(recorder.run.pk)
    assert everything(recorder) == before
    assert not (cold.settings.folder / "cache").exists()
