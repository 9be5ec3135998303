"""The parts of roll-ups, stored or implied, equal a plain loop over the rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from dashboard.helpers.compacting import compact, over
from dashboard.helpers.recorder import Recorder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8scope_dashboard.runs.models import Run, Tensor, Writer
from fp8scope_dashboard.telemetry import compaction, heatmaps, queries, series
from fp8scope_dashboard.telemetry.aggregates import FINEST, PARTS, STRIDES
from fp8scope_dashboard.telemetry.models import Chunk, Rolling, RollUp
from fp8scope_dashboard.telemetry.rollups import build, read, schedule
from fp8scope_dashboard.telemetry.tile_codec import encode_series, encode_tile
from fp8scope_dashboard.telemetry.writers import cutoffs_of

pytestmark = pytest.mark.django_db

TENSORS = ("a", "b", "c")
SCALARS = ("loss", "pace", "lost")
Points = Mapping[int, float]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lower the limits, so that blocks, pieces and roll-ups have a few hundred steps."""
    monkeypatch.setattr(compaction, "ENOUGH_ROWS", 100)
    monkeypatch.setattr(compaction, "FULL_ROWS", 700)
    monkeypatch.setattr(schedule, "MIN_STEPS", 64)
    monkeypatch.setattr(schedule, "SHORT_RUN", 64)
    monkeypatch.setattr(schedule, "MAX_STEPS", 640)
    monkeypatch.setattr(build, "MAX_CELLS", 128 * 7 * 192)
    monkeypatch.setattr(build, "MIN_BUCKETS", 2)
    yield


def rows(rng: np.random.Generator, steps: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Scalars and statistics of all kinds: dense, constant, sampled every 100 steps, rare, not finite."""
    size = (len(steps), len(TENSORS))
    at = np.array(steps)
    dense = rng.normal(size=size).astype(np.float32).astype(float)
    dense[rng.random(size) < 0.05] = math.nan
    dense[rng.random(size) < 0.01] = math.inf
    dense[rng.random(size) < 0.01] = -math.inf
    saturated = rng.integers(0, 3, size) * (rng.random(size) < 0.3)
    error, signal, frozen = rng.random(size), rng.random(size) + 0.5, np.zeros(size)
    signal[rng.random(size) < 0.1] = 0.0
    for sampled in (error, signal, frozen):
        sampled[at % 100 != 0] = math.nan
    numel = np.where(rng.random((len(steps), 1)) < 0.01, 4.0, 8.0) + np.zeros(size)
    statistics = {"amax": dense, "numel": numel, "saturated": saturated, "nonfinite": np.zeros(size)}
    statistics |= {"sq_error": error, "sq_signal": signal, "scale_frozen": frozen}
    choices = [1.0, -2.5, -0.0, math.nan, math.inf, -math.inf, None]
    loss = [choices[i] for i in rng.choice(7, len(steps), p=[0.4, 0.3, 0.1, 0.04, 0.03, 0.03, 0.1])]
    scalars = {"loss": loss, "pace": [0.25] * len(steps), "lost": [math.nan] * len(steps)}
    return scalars, statistics


def send(recorder: Recorder, rng: np.random.Generator, first: int, last: int, batch: int = 100) -> None:
    for begin in range(first, last, batch):
        steps = list(range(begin, min(begin + batch, last)))
        recorder.send(steps, *rows(rng, steps))


def by_hand(points: Points, stride: int, bucket: int) -> dict[str, float]:
    """The parts of one bucket, by a plain loop."""
    parts = dict.fromkeys(PARTS, math.nan) | {"count": 0.0}
    for step in sorted(points):
        offset, value = step - bucket * stride, points[step]
        if not 0 <= offset < stride:
            continue
        if math.isnan(value):
            parts["undefined"] = offset if math.isnan(parts["undefined"]) else parts["undefined"]
            continue
        if not parts["count"] or value > parts["max"]:
            parts["max"], parts["argmax"] = value, offset
        if not parts["count"] or value < parts["min"]:
            parts["min"], parts["argmin"] = value, offset
        parts["sum"] = parts["sum"] + value if parts["count"] else value
        parts["last"] = value
        parts["count"] += 1
    return parts


def points_of(run: UUID, name: str, tensor: int) -> Points:
    """The raw values of a series by step, from blocks and chunks."""
    kind, _, bare = name.partition(":")
    series = queries.scalar(run, bare) if kind == "scalar" else queries.tensor_series(run, tensor, bare)
    return dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def check(run: UUID) -> dict[int, int]:
    """Check all parts of all covered buckets. Returns the number of covered buckets by stride.

    As `coverage.cover` does, it leaves out buckets with rows that are in no block yet.
    """
    waiting = list(Chunk.objects.filter(run=run).values_list("first_step", "last_step"))
    until = Rolling.objects.values_list("until", flat=True).get(run=run)
    scalars = [f"scalar:{name}" for name in queries.scalar_names(run)]
    tensors = [f"tensor:{name}" for name in queries.statistic_names(run)]
    indices = np.arange(Tensor.objects.filter(run=run).count())
    points = {(name, 0): points_of(run, name, 0) for name in scalars}
    points |= {(name, i): points_of(run, name, i) for name in tensors for i in indices.tolist()}
    counts = {}
    for stride in STRIDES:
        count = -(-until // stride) + 1
        rolled = {
            name: read.read(run, [name], which, stride, 0, count - 1, PARTS, cutoffs_of(run))
            for names, which in ((scalars, indices[:1]), (tensors, indices))
            for name in names
        }
        for buckets in rolled.values():
            for first, last in waiting:
                buckets.covered[first // stride : last // stride + 1] = False
        for (name, tensor), line in points.items():
            covered = np.flatnonzero(rolled[name].covered).tolist()
            counts[stride] = len(covered)
            for bucket in covered:
                expected = by_hand(line, stride, bucket)
                for part, values in rolled[name].values[name].items():
                    tolerance = 1e-9 if part == "sum" else 0.0
                    np.testing.assert_allclose(
                        values[tensor, bucket],
                        expected[part],
                        rtol=tolerance,
                        err_msg=f"{part} of {name} {tensor} in bucket {bucket} of {stride}",
                    )
    return {stride: count for stride, count in counts.items() if count}


def stored() -> list[Any]:
    rows = RollUp.objects.order_by("name", "stride", "part", "tile", "span")
    fields = ("name", "stride", "part", "tile", "span", "buckets", "offsets", "body")
    return [(*row[:-1], bytes(row[-1])) for row in rows.values_list(*fields)]


def parts_of(name: str, stride: int = FINEST) -> set[str]:
    return set(RollUp.objects.filter(name=name, stride=stride).values_list("part", flat=True))


def test_it_works() -> None:
    recorder = Recorder.of_new_run(TENSORS)
    send(recorder, np.random.default_rng(0), 1, 1800)
    over()
    compact(recorder)
    assert check(recorder.run.id) == {64: 29, 512: 3}


def test_does_not_store_implied_parts() -> None:
    recorder = Recorder.of_new_run(TENSORS)
    steps = list(range(640))
    scalars, statistics = rows(np.random.default_rng(1), steps)
    statistics["numel"][:] = 8.0
    recorder.send(steps, scalars, statistics)
    over()
    compact(recorder)
    assert parts_of("tensor:amax") == set(PARTS) - {"undefined"}
    for sampled in ("sq_error", "sq_signal", "scale_frozen"):
        assert parts_of(f"tensor:{sampled}") == {"max", "argmax"}
    for steady in ("tensor:numel", "tensor:nonfinite", "scalar:pace"):
        assert parts_of(steady) == {"max", "argmax", "count"}
    assert parts_of("scalar:lost") == {"undefined"}
    assert not parts_of("tensor:noise_to_signal") and not parts_of("tensor:saturation_rate")
    check(recorder.run.id)


def test_rolling_up_in_pieces_gives_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Recorder.of_new_run(TENSORS)
    monkeypatch.setattr(schedule, "MAX_STEPS", 10_000)
    monkeypatch.setattr(build, "MAX_CELLS", 10_000_000)
    send(whole, np.random.default_rng(2), 3, 2300, batch=1000)
    over()
    compact(whole)
    at_once = stored()
    whole.run.delete()
    monkeypatch.setattr(schedule, "MAX_STEPS", 192)
    monkeypatch.setattr(build, "MAX_CELLS", 1)
    pieces = Recorder.of_new_run(TENSORS)
    rng = np.random.default_rng(2)
    for begin in (3, 1003, 2003):
        send(pieces, rng, begin, min(begin + 1000, 2300), batch=1000)
        compact(pieces)
    over()
    compact(pieces)
    assert {row[1] for row in at_once} == {64, 512}
    assert stored() == at_once


def test_builds_larger_buckets_for_longer_runs() -> None:
    recorder = Recorder.of_new_run(TENSORS)
    rng = np.random.default_rng(3)
    for last, counts in (
        (700, {64: 10}),
        (1000, {64: 15}),
        (1100, {64: 17, 512: 2}),
        (1700, {64: 26, 512: 3}),
    ):
        recorder.run.refresh_from_db()
        send(recorder, rng, (recorder.run.last_step or -1) + 1, last)
        compact(recorder)
        assert check(recorder.run.id) == counts
        values = queries.heatmap(recorder.run.id, "amax", columns=2).values
        exact = [points_of(recorder.run.id, "tensor:amax", i) for i in range(3)]
        np.testing.assert_array_equal(values.max(axis=1), [max(points.values()) for points in exact])


def test_a_widened_range_has_whole_buckets_and_reads_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder.of_new_run(TENSORS)
    send(recorder, np.random.default_rng(3), 0, 1000)
    compact(recorder)
    run = recorder.run.id
    exact = queries.heatmap(run, "amax", first=64, last=639, columns=4).values

    def fail(*_: object) -> None:
        raise AssertionError("rows are read")

    monkeypatch.setattr(heatmaps, "_fill_raw", fail)
    widened = queries.heatmap(run, "amax", first=70, last=600, columns=4, widen=True)
    assert widened.step_edges[[0, -1]].tolist() == [64, 640]
    np.testing.assert_array_equal(widened.values, exact)
    with pytest.raises(AssertionError, match="rows are read"):
        queries.heatmap(run, "amax", first=70, last=600, columns=4)


def test_a_gap_of_a_later_attempt_hides_the_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps above the start of the second attempt count only from it, although a third begins later."""
    monkeypatch.setattr(read, "SPAN", 8)
    monkeypatch.setattr(build, "SPAN", 8)
    first = Recorder.of_new_run(TENSORS)
    rng = np.random.default_rng(4)
    send(first, rng, 0, 2000)
    compact(first)
    check(first.run.id)
    for attempt, begin, end in ((1, 200, 300), (2, 1400, 1700)):
        again = first.another(0, TENSORS)
        Writer.objects.filter(uuid=again.writer).update(attempt=attempt)
        send(again, rng, begin, end)
    over()
    compact(first)
    points = points_of(first.run.id, "tensor:numel", 0)
    assert list(points) == [*range(300), *range(1400, 1700)]
    check(first.run.id)
    monkeypatch.setattr(series, "MAX_ROWS", 50)
    line = queries.tensor_series(first.run.id, 0, "numel", points=20)
    assert not [step for step in line.steps.tolist() if 300 <= step < 1400]


def test_larger_buckets_include_sparse_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scalar without a row among the last steps of a bucket is in it until its attempt is replaced."""
    monkeypatch.setattr(schedule, "MAX_STEPS", 128)
    recorder = Recorder.of_new_run(TENSORS)
    recorder.send([10, 700], {"score": [3.0, 7.0]})
    recorder.send(range(1024), {"loss": [1.0] * 1024})
    compact(recorder)
    over()
    compact(recorder)
    assert check(recorder.run.id) == {64: 16, 512: 2}
    score = read.read(recorder.run.id, ["scalar:score"], np.zeros(1, int), 512, 0, 1, ("max",), {})
    assert score.values["scalar:score"]["max"].tolist() == [[3.0, 7.0]]
    again = recorder.another(0)
    Writer.objects.filter(uuid=again.writer).update(attempt=1)
    again.send(range(600, 1100), {"loss": [2.0] * 500})
    compact(recorder)
    assert queries.scalar(recorder.run.id, "score").values.tolist() == [3.0]
    assert check(recorder.run.id) == {64: 18, 512: 2}


def side_by_side(values: Any, series: int = 0) -> tuple[list[int], bytes] | None:
    encoded = [encode_series(row, ~np.isnan(row)) for row in values]
    return encode_tile(encoded + [b""] * (series - len(encoded)))


def test_reads_and_repairs_roll_ups_of_earlier_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier versions stored every part, each series separately, and buckets of every size."""
    recorder = Recorder.of_new_run(TENSORS)
    rng = np.random.default_rng(5)
    with monkeypatch.context() as earlier:
        earlier.setattr(build, "spare", lambda parts: set())
        earlier.setattr(build, "encode_matrix", side_by_side)
        earlier.setattr(build, "MIN_BUCKETS", 1)
        send(recorder, rng, 0, 900)
        compact(recorder)
    assert parts_of("tensor:sq_error") == set(PARTS) - {"undefined"}
    assert check(recorder.run.id) == {64: 14, 512: 1}
    late = recorder.another(1, TENSORS)
    send(late, rng, 150, 300)
    Writer.objects.filter(uuid=late.writer).update(finished_at="2026-01-01T00:00:00Z")
    over(recorder)
    compact(recorder)
    assert check(recorder.run.id) == {64: 15}
    assert parts_of("tensor:scale_frozen") == {"max", "argmax"}


@given(st.data(), st.integers(0, 2**32))
@settings(
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_roll_ups_equal_a_plain_loop_for_any_history(data: st.DataObject, seed: int) -> None:
    rng = np.random.default_rng(seed)
    schedule.MAX_STEPS = 64 * data.draw(st.integers(1, 12))
    build.MAX_CELLS = 128 * 7 * 64 * data.draw(st.integers(1, 5))
    build.MIN_BUCKETS = data.draw(st.integers(1, 4))
    recorder = Recorder.of_new_run(TENSORS[:2])
    second = recorder.another(1, TENSORS)
    writers = [recorder, second]
    next_steps = [data.draw(st.integers(0, 700)) for _ in writers]
    attempt = 0
    for turn in range(data.draw(st.integers(2, 7))):
        action = data.draw(st.sampled_from(["send", "send", "send", "late", "again", "compact"]))
        which = data.draw(st.integers(0, len(writers) - 1))
        writer = writers[which]
        if action == "send":
            length = data.draw(st.sampled_from([30, 200, 600]))
            send_some(writer, rng, next_steps[which], next_steps[which] + length)
            next_steps[which] += length
        elif action == "late":
            send_some(recorder.another(2 + turn, TENSORS[1:]), rng, 100, 130)
        elif action == "again":
            attempt += 1
            again = recorder.another(which % 2, TENSORS[::-1])
            Writer.objects.filter(uuid=again.writer).update(attempt=attempt)
            writers.append(again)
            next_steps.append(data.draw(st.integers(0, max(next_steps))))
        else:
            compaction.compact_run(recorder.run.id, data.draw(st.sampled_from([1, 3, 100])))
            if Rolling.objects.filter(run=recorder.run).exists():
                check(recorder.run.id)
    over(recorder)
    compact(recorder)
    if Rolling.objects.filter(run=recorder.run).exists():
        check(recorder.run.id)


def send_some(writer: Recorder, rng: np.random.Generator, first: int, last: int) -> None:
    """Send most of the steps, with the tensors that the writer has registered."""
    steps = [step for step in range(first, last) if rng.random() < 0.95]
    if not steps:
        return
    scalars, statistics = rows(rng, steps)
    width = len(Writer.objects.values_list("catalogue", flat=True).get(uuid=writer.writer))
    writer.send(steps, scalars, {name: values[:, :width] for name, values in statistics.items()})
    Run.objects.filter(pk=writer.run.pk).update(state="running")
