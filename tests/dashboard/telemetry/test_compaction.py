"""Compaction moves rows without changing the result of any query."""

from __future__ import annotations

import math
from datetime import timedelta

import numpy as np
import pytest
from dashboard.helpers.compacting import compact, everything, over, record, spans
from dashboard.helpers.recorder import Recorder
from django.db import connection
from django.db.models import F, Sum
from django.utils import timezone

from fp8scope_dashboard.runs.models import Run, Writer
from fp8scope_dashboard.telemetry import compaction, queries
from fp8scope_dashboard.telemetry import series as telemetry_series
from fp8scope_dashboard.telemetry.models import Block, Chunk, Rolling, RollUp, Tile

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("small_blocks")]


def test_it_works() -> None:
    recorder = Recorder.of_new_run(["a", "b"])
    record(recorder, 7)
    before = everything(recorder)
    assert compact(recorder) == 0
    record(recorder, 4)
    before = everything(recorder)
    assert compact(recorder) == 1
    assert (spans(), Chunk.objects.count()) == ([(0, 10, 33)], 0)
    assert everything(recorder) == before
    record(recorder, 4)
    before = everything(recorder)
    assert compact(recorder) == 0
    over()
    compact(recorder)
    assert (spans(), Chunk.objects.count()) == ([(0, 14, 45)], 0)
    assert everything(recorder) == before
    assert Rolling.objects.get().until == 64
    assert compact(recorder) == 0


def test_compaction_keeps_the_counters_of_the_run() -> None:
    recorder = Recorder.of_new_run(["a", "b"])
    record(recorder, 50)
    run = Run.objects.get()
    over()
    compact(recorder)
    totals = Block.objects.aggregate(rows=Sum("rows"), points=Sum("points"))
    assert totals == {"rows": run.rows_stored, "points": run.points_stored}
    assert run.rows_stored == 150


def test_small_blocks_become_full_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "MAX_SMALL_BLOCKS", 8)
    recorder = Recorder.of_new_run(["a", "b"])
    for _ in range(20):
        record(recorder, 8)
        compact(recorder)
    # While the run is running, blocks are merged only into full ones, so that a row is rewritten once.
    assert [rows for _, _, rows in spans()] == [96, 96, 96, 96, 24, 24, 24, 24]
    before = everything(recorder)
    over()
    compact(recorder)
    assert [rows for _, _, rows in spans()] == [96, 96, 96, 96, 96]
    assert everything(recorder) == before
    assert Tile.objects.filter(name="axis").count() == 5


def test_a_stream_continues_in_the_middle_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder.of_new_run(["a", "b"])
    record(recorder, 8)
    run, writer = recorder.run.id, recorder.writer
    before = dict(queries.stream(run, writer, 0, 100))
    compact(recorder)
    for begin in range(8):
        for end in range(begin + 1, 9):
            ((last, data),) = queries.stream(run, writer, begin, 100, until=end)
            assert last == end - 1
            assert data.steps.tolist() == [s for seq in range(begin, end) for s in before[seq].steps.tolist()]
    assert queries.stream(run, writer, 8, 100) == []
    # A large block is returned in pieces that end at the end of a message.
    monkeypatch.setattr("fp8scope_dashboard.telemetry.replay.MAX_CELLS", 50)
    pieces = queries.stream(run, writer, 1, 100)
    assert [last for last, _ in pieces] == [2, 4, 6, 7]
    assert [last for last, _ in queries.stream(run, writer, 1, 2)] == [2, 4]
    for name in ("amax", "numel"):
        np.testing.assert_array_equal(
            np.concatenate([data.statistics[name] for _, data in pieces]),
            np.concatenate([before[seq].statistics[name] for seq in range(1, 8)]),
        )


def test_waits_for_a_missing_batch() -> None:
    recorder = Recorder.of_new_run()
    for seq in [*range(5), *range(6, 40)]:
        recorder.send([1], {"loss": [float(seq)]}, seq=seq)
    compact(recorder)
    assert (spans(), Chunk.objects.count()) == ([], 39)
    recorder.send([1], {"loss": [5.0]}, seq=5)
    compact(recorder)
    assert Chunk.objects.count() == 0
    pieces = queries.stream(recorder.run.id, recorder.writer, 0, 100)
    assert [v for _, data in pieces for v in data.scalars["loss"].tolist()] == list(range(40))


def test_waits_only_for_a_while_and_accepts_a_late_batch() -> None:
    recorder = Recorder.of_new_run()
    for seq in [*range(5), *range(6, 20)]:
        recorder.send([1], {"loss": [float(seq)]}, seq=seq)
    Chunk.objects.update(received_at=timezone.now() - compaction.GRACE - timedelta(seconds=1))
    compact(recorder)
    assert (spans(), Chunk.objects.count()) == ([(0, 19, 19)], 0)
    recorder.send([1], {"loss": [5.0]}, seq=5)

    def losses() -> list[float]:
        pieces = queries.stream(recorder.run.id, recorder.writer, 0, 100)
        return [v for _, data in pieces for v in data.scalars["loss"].tolist()]

    # The late batch is read in order as a chunk, as a separate block and merged into a block. The row with
    # the largest seq counts for the step.
    assert losses() == list(range(20))
    assert queries.scalar(recorder.run.id, "loss").values.tolist() == [19.0]
    Chunk.objects.update(received_at=timezone.now() - compaction.ENOUGH_AGE - timedelta(seconds=1))
    compact(recorder)
    assert (spans(), Chunk.objects.count()) == ([(0, 19, 19), (5, 5, 1)], 0)
    assert losses() == list(range(20))
    assert queries.scalar(recorder.run.id, "loss").values.tolist() == [19.0]
    over()
    compact(recorder)
    assert spans() == [(0, 19, 20)]
    assert losses() == list(range(20))


def test_a_slow_run_is_compacted_after_a_while() -> None:
    recorder = Recorder.of_new_run(["a", "b"])
    record(recorder, 2)
    assert compact(recorder) == 0
    Chunk.objects.filter(seq=0).update(received_at=timezone.now() - compaction.ENOUGH_AGE)
    assert compaction.runs_to_compact() == [recorder.run.id]
    assert compact(recorder) == 1
    # A run without a heartbeat for a long time is compacted, too.
    record(recorder, 1)
    assert compact(recorder) == 0
    Run.objects.update(heartbeat_at=timezone.now() - compaction.ABANDONED)
    assert compact(recorder) > 0
    assert Chunk.objects.count() == 0


def test_extends_and_repairs_roll_ups() -> None:
    recorder = Recorder.of_new_run(["a", "b"])
    record(recorder, 200)
    compact(recorder)
    # The last batches may not be all of their steps yet.
    assert Rolling.objects.get().until == 576
    late = recorder.another(rank=1, tensors=["b", "a"])
    late.send([100, 101], None, {"amax": [[50, 60], [70, 80]], "numel": [[8, 8]] * 2})
    before = everything(recorder)
    over()
    # Two blocks are made, of each writer's chunks, and no roll-ups yet.
    compaction.compact_run(recorder.run.id, max_changes=2)
    state = Rolling.objects.get()
    assert (state.stale_first, state.stale_last) == (100, 101)
    compact(recorder)
    state.refresh_from_db()
    assert (state.stale_first, state.until, state.pending) == (None, 640, False)
    assert everything(recorder) == before
    assert queries.heatmap(recorder.run.id, "amax", columns=2).values[1, 0] == 70.0


def test_a_replaced_attempt_does_not_hold_back_roll_ups() -> None:
    first = Recorder.of_new_run(["a", "b"])
    record(first, 200)
    again = first.another(rank=0, tensors=["a", "b"])
    Writer.objects.filter(uuid=again.writer).update(attempt=1)
    for begin in range(300, 1_200, 100):
        again.send(range(begin, begin + 100), {"loss": [1.0] * 100}, None)
    assert Writer.objects.get(uuid=first.writer).finished_at is None
    compact(first)
    # The first attempt ends at step 599, and looks alive for a minute more.
    assert Rolling.objects.get().until > 1_000
    # It has not reached the first step of the next attempt: its rows still count.
    slow = again.another(rank=1, tensors=["a", "b"])
    record(slow, 10)
    for begin in range(1_200, 1_500, 100):
        again.send(range(begin, begin + 100), {"loss": [1.0] * 100}, None)
    until = Rolling.objects.get().until
    compact(first)
    assert Rolling.objects.get().until == until


def test_deletion_leaves_no_rows() -> None:
    recorder = Recorder.of_new_run(["a", "b"])
    record(recorder, 100)
    over()
    compact(recorder)
    assert RollUp.objects.exists()
    run_id = recorder.run.id
    recorder.run.delete()
    for table in (Chunk, Block, Tile, RollUp, Rolling):
        assert not table.objects.exists()
    assert compaction.compact_run(run_id) == 0


def test_the_database_cascades_the_deletion_of_a_run() -> None:
    recorder = Recorder.of_new_run(["a", "b"])
    record(recorder, 20)
    compact(recorder)
    with connection.cursor() as cursor:
        for table in ("runs_tensor", "runs_writer", "ingest_receipt", "telemetry_rolling"):
            cursor.execute(f"DELETE FROM {table}")
        cursor.execute("DELETE FROM runs_run")
    assert not Tile.objects.exists()


def test_merged_chunks_of_the_first_version_are_compacted() -> None:
    recorder = Recorder.of_new_run(["a", "b"])
    record(recorder, 6)
    before = everything(recorder)
    from fp8scope_dashboard.telemetry.codec import encode
    from fp8scope_dashboard.telemetry.replay import in_order

    pieces = queries.stream(recorder.run.id, recorder.writer, 1, 3)
    body = encode(in_order([data for _, data in pieces]))
    Chunk.objects.filter(seq__in=(2, 3)).delete()
    Chunk.objects.filter(seq=1).update(body=body, last_seq=3, rows=9, last_step=11)
    assert everything(recorder) == before
    over()
    compact(recorder)
    assert everything(recorder) == before
    assert spans() == [(0, 5, 18)]
    assert not Chunk.objects.filter(last_seq__gt=F("seq")).exists()


def test_long_lines_come_from_roll_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder.of_new_run(["a"])
    rng = np.random.default_rng(1)
    values = rng.random(1000)
    values[[321, 777]] = (-5.0, 9.0)
    loss = rng.random(1000)
    loss[500] = math.nan
    recorder.send(range(5, 1005), {"loss": loss.tolist()}, {"amax": values[:, None]})
    over()
    compact(recorder)
    monkeypatch.setattr(telemetry_series, "MAX_ROWS", 100)
    run = recorder.run.id
    line = queries.tensor_series(run, 0, "amax", points=20)
    points = dict(zip(line.steps.tolist(), line.values.tolist(), strict=True))
    # Every point is a stored one; the extremes and both ends are among them.
    assert all(values[step - 5] == value for step, value in points.items())
    assert {5, 326, 782, 1004} <= set(points)
    line = queries.scalar(run, "loss", points=20)
    assert np.isnan(line.values[line.steps == 505]).all()
    assert 505 in line.steps
    assert (np.diff(line.times.astype(np.int64)) >= 0).all()
