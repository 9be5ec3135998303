"""After retention deleted raw tensor values: queries read roll-ups, and late rows are added to them."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from dashboard.helpers.compacting import compact
from dashboard.helpers.recorder import Recorder
from dashboard.helpers.token_clients import client_with_token
from django.utils import timezone

from fp8scope_dashboard.exports.content import content_of
from fp8scope_dashboard.runs.models import Run, Writer
from fp8scope_dashboard.telemetry import queries, retention
from fp8scope_dashboard.telemetry.models import Block, Chunk, Rolling, RollUp, Tile

pytestmark = pytest.mark.django_db

STEPS, BATCH, LATE = 4096, 32, 20
"""The batch with seq LATE, which has the steps 640 to 671, arrives late."""
FIRST, AFTER = LATE * BATCH, (LATE + 1) * BATCH
LOSS = np.linspace(4.0, 2.0, STEPS)
AMAX = np.stack([1.0 + np.arange(STEPS) % 7, 2.0 + np.arange(STEPS) % 5], axis=1)


def send(
    recorder: Recorder, begin: int, end: int, seq: int | None = None, loss: Any = LOSS, amax: Any = AMAX
) -> None:
    steps = list(range(begin, end))
    counts = {"saturated": AMAX[begin:end], "numel": np.full((end - begin, 2), 100.0)}
    recorder.send(steps, {"loss": loss[begin:end].tolist()}, {"amax": amax[begin:end], **counts}, seq=seq)


def age(recorder: Recorder) -> None:
    """Compact the run, make its blocks old and apply retention."""
    compact(recorder)
    assert not Chunk.objects.exists()
    Block.objects.update(received_at=timezone.now() - timedelta(days=100))
    retention.retain_run(recorder.run.id)
    assert Block.objects.exists() and not Tile.objects.filter(name__startswith="tensor:").exists()


@pytest.fixture
def recorder() -> Recorder:
    """A finished run with one missing batch, whose raw tensor values are deleted."""
    recorder = Recorder.of_new_run(["a.input", "b.input"])
    recorder.run.project.raw_days = 30
    recorder.run.project.save()
    for begin in range(0, STEPS, BATCH):
        if begin == FIRST:
            recorder.seq += 1
        else:
            send(recorder, begin, begin + BATCH)
    Run.objects.update(state="finished")
    age(recorder)
    assert Rolling.objects.get().raw_from == STEPS
    return recorder


def parts_of_everything() -> list[Any]:
    """Every stored roll-up with its bytes."""
    order = ("name", "stride", "part", "tile", "span")
    return [
        (*row[:-1], bytes(row[-1])) for row in RollUp.objects.order_by(*order).values_list(*order, "body")
    ]


def heat(recorder: Recorder, statistic: str = "amax", first: int = 0, last: int = STEPS - 1) -> Any:
    return queries.heatmap(
        recorder.run.id, statistic, first=first, last=last, columns=(last + 1 - first) // 64
    )


def test_it_works(recorder: Recorder) -> None:
    """Late rows are added to the roll-ups of their buckets; repeating that changes nothing."""
    spike = AMAX.copy()
    spike[650, 1] = 99.0
    before = queries.tensor_series(recorder.run.id, 1, "amax")
    assert len(before) == 2 * (STEPS // 64)
    assert not ((before.steps >= FIRST) & (before.steps < AFTER)).any()
    send(recorder, FIRST, AFTER, seq=LATE, amax=spike)
    for _ in range(3):
        compact(recorder)
        Rolling.objects.update(stale_first=FIRST, stale_last=AFTER, pending=True)
    compact(recorder)
    after = queries.tensor_series(recorder.run.id, 1, "amax")
    # The late bucket has the new maximum and the first minimum; all other buckets are unchanged.
    inside = (after.steps >= FIRST) & (after.steps < FIRST + 64)
    assert (after.steps[inside].tolist(), after.values[inside].tolist()) == ([640, 650], [2.0, 99.0])
    outside = (before.steps < FIRST) | (before.steps >= FIRST + 64)
    np.testing.assert_array_equal(after.steps[~inside], before.steps[outside])
    np.testing.assert_array_equal(after.values[~inside], before.values[outside])
    cells = np.array([[7.0] * 64, [6.0] * 64])
    cells[1, FIRST // 64] = 99.0
    assert (heat(recorder).values == cells).all()


def test_keeps_all_scalars(recorder: Recorder) -> None:
    """Scalars are never deleted, because verdicts are computed from them. Late ones are visible at once."""
    steps = np.delete(np.arange(STEPS), np.s_[FIRST:AFTER])
    for _ in range(2):
        loss = queries.scalar(recorder.run.id, "loss")
        np.testing.assert_array_equal(loss.steps, steps)
        np.testing.assert_array_equal(loss.values, LOSS[steps])
        part = queries.scalar(recorder.run.id, "loss", first=100, last=200)
        assert part.steps.tolist() == list(range(100, 201))
        thin = queries.scalar(recorder.run.id, "loss", points=100)
        assert 50 < len(thin) <= 100 and thin.steps[[0, -1]].tolist() == [0, STEPS - 1]
        compact(recorder)
    send(recorder, FIRST, AFTER, seq=LATE)
    for _ in range(2):
        np.testing.assert_array_equal(queries.scalar(recorder.run.id, "loss").values, LOSS)
        compact(recorder)
    age(recorder)
    np.testing.assert_array_equal(queries.scalar(recorder.run.id, "loss").values, LOSS)


def test_deleting_the_late_rows_changes_nothing(recorder: Recorder) -> None:
    send(recorder, FIRST, AFTER, seq=LATE)
    compact(recorder)
    before, line = parts_of_everything(), queries.tensor_series(recorder.run.id, 1, "saturation_rate")
    age(recorder)
    assert parts_of_everything() == before and Rolling.objects.get().raw_from == STEPS
    assert len(line) == 2 * (STEPS // 64) and line.values.max() == 0.06
    again = queries.tensor_series(recorder.run.id, 1, "saturation_rate")
    assert (again.steps == line.steps).all() and (again.values == line.values).all()


def test_adds_a_late_rank(recorder: Recorder) -> None:
    """The lowest rank's value of a scalar counts, if there is one, and the largest amax of all ranks."""
    other = recorder.another(1, ["b.input", "a.input"])
    steps = list(range(0, 128))
    amax = np.full((128, 2), [50.0, 0.5])
    loss = queries.scalar(recorder.run.id, "loss")
    other.send(steps, {"loss": [100.0] * 128, "extra": [1.0] * 128}, {"amax": amax})
    compact(other)
    after = queries.scalar(recorder.run.id, "loss")
    assert (after.steps == loss.steps).all() and (after.values == loss.values).all()
    assert set(queries.scalar(recorder.run.id, "extra").values) == {1.0}
    assert heat(recorder, last=255).values.tolist() == [[7.0] * 4, [50.0, 50.0, 6.0, 6.0]]
    assert np.nanmin(queries.tensor_series(recorder.run.id, 0, "amax", last=127).values) == 0.5


def test_adds_a_late_tensor(recorder: Recorder) -> None:
    other = recorder.another(1, ["c.input"])
    other.send(list(range(64, 128)), None, {"amax": np.full((64, 1), 3.0)})
    compact(other)
    assert heat(recorder, last=191).values[:2].tolist() == [[7.0] * 3, [6.0] * 3]
    np.testing.assert_array_equal(heat(recorder, last=191).values[2], [math.nan, 3.0, math.nan])


BACK = 1024
"""The first step of a later attempt. A multiple of the finest stride, so that it splits no bucket."""


@pytest.mark.parametrize("back", [BACK, BACK + 10])
def test_a_later_attempt_begins_below(recorder: Recorder, back: int) -> None:
    """Rows of the later attempt are visible at once; rows that it replaces no longer are."""
    again = recorder.another(0, ["a.input", "b.input"])
    Writer.objects.filter(uuid=again.writer).update(attempt=1)
    Run.objects.update(state="running")
    before = queries.scalar(recorder.run.id, "loss", last=back - 1)
    for begin in range(back, back + 160, BATCH):
        send(again, begin, begin + BATCH, loss=LOSS / 2)
        for points in (None, 100):
            loss = queries.scalar(recorder.run.id, "loss", points=points)
            assert loss.steps[-1] == begin + BATCH - 1 and loss.values[-1] == LOSS[begin + BATCH - 1] / 2
        whole = queries.scalar(recorder.run.id, "loss")
        assert whole.steps[whole.steps >= back].tolist() == list(range(back, begin + BATCH))
        compact(recorder)
    Run.objects.update(state="finished")
    age(again)
    kept = queries.scalar(recorder.run.id, "loss", last=back - 1)
    assert (kept.steps == before.steps).all() and (kept.values == before.values).all()
    last = queries.scalar(recorder.run.id, "loss", first=back)
    assert last.steps[-1] == back + 159 and (last.values == LOSS[last.steps] / 2).all()
    assert heat(recorder, last=BACK - 1).values.tolist() == [[7.0] * 16, [6.0] * 16]


def test_raw_rows_and_roll_ups_side_by_side(recorder: Recorder) -> None:
    """A running run has roll-ups for early steps and raw rows for later ones; a query may read both."""
    Run.objects.update(state="running")
    recorder.send(list(range(STEPS, STEPS + 100)), {"loss": [1.0] * 100}, {"amax": np.full((100, 2), 5.0)})
    line = queries.tensor_series(recorder.run.id, 0, "amax", first=STEPS - 640)
    assert line.steps[line.steps >= STEPS].tolist() == list(range(STEPS, STEPS + 100))
    # The first minimum and the first maximum of each bucket; values repeat every seven steps.
    ends = []
    for begin in range(STEPS - 640, STEPS, 64):
        ends += sorted(min(step for step in range(begin, begin + 64) if step % 7 == rest) for rest in (0, 6))
    assert line.steps[line.steps < STEPS].tolist() == ends
    assert set(line.values[line.steps < STEPS]) == {1.0, 7.0}
    cells = heat(recorder, first=STEPS - 128, last=STEPS + 63).values
    assert cells.tolist() == [[7.0, 7.0, 5.0], [6.0, 6.0, 5.0]]
    # A query that begins in the middle of a bucket returns the bucket's points inside the range.
    part = queries.tensor_series(recorder.run.id, 0, "amax", first=100, last=200)
    assert part.steps.tolist() == [132, 133, 195, 196]


def test_over_the_api(recorder: Recorder) -> None:
    client = client_with_token(recorder.run.project)
    base = f"/api/v1/runs/{recorder.run.id}"
    send(recorder, FIRST, AFTER, seq=LATE)
    compact(recorder)
    series = client.get(f"{base}/series?tensor=b.input&statistic=amax&points=50").json()
    assert 2 < len(series["steps"]) <= 50 and set(series["values"]) <= {2.0, 3.0, 4.0, 5.0, 6.0}
    answer = client.get(f"{base}/heatmap?statistic=saturation_rate&columns=8")
    table = pa.ipc.open_stream(answer.content).read_all()
    assert table.to_pydict()["values"] == [[0.07] * 8, [0.06] * 8]
    assert json.loads(table.schema.metadata[b"step_edges"])[-1] == STEPS


def test_an_export_has_the_remaining_rows(recorder: Recorder) -> None:
    """An export has every row, without deleted tensor values and with those that arrived late."""
    steps = np.delete(np.arange(STEPS), np.s_[FIRST:AFTER])
    recorder.run.refresh_from_db()
    content = content_of(recorder.run, with_binary=True)
    table = pa.Table.from_batches(list(content.pieces()))
    assert content.rows == content.description["rows"] == table.num_rows == len(steps)
    assert table.column("step").to_pylist() == steps.tolist()
    assert table.column("scalar:loss").to_pylist() == LOSS[steps].tolist()
    assert not any(row and any(row) for row in table.column("tensor:amax").to_pylist())
    send(recorder, FIRST, AFTER, seq=LATE)
    for _ in range(2):
        recorder.run.refresh_from_db()
        table = pa.Table.from_batches(list(content_of(recorder.run, with_binary=True).pieces()))
        assert table.column("step").to_pylist() == list(range(STEPS))
        assert table.column("scalar:loss").to_pylist() == LOSS.tolist()
        seen = [row if row and any(row) else None for row in table.column("tensor:amax").to_pylist()]
        assert seen[FIRST:AFTER] == AMAX[FIRST:AFTER].tolist() and not any(seen[:FIRST] + seen[AFTER:])
        compact(recorder)
