"""Queries return what was sent."""

from __future__ import annotations

import math
import uuid
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.compacting import compact, over
from dashboard.helpers.recorder import Recorder, time_of
from django.db import connection

from fp8scope_dashboard.runs.models import Run, Writer
from fp8scope_dashboard.telemetry import heatmaps, queries, rows
from fp8scope_dashboard.telemetry.queries import Series
from fp8scope_dashboard.telemetry.series import RUNS_AT_ONCE

pytestmark = pytest.mark.django_db

NAN = math.nan


def points(series: Series) -> list[tuple[int, float]]:
    return list(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def test_it_works() -> None:
    recorder = Recorder.of_new_run(["a", "b"])
    recorder.send([1, 2], {"loss": [3.0, 2.0]}, {"amax": [[1, 10], [2, 20]]})
    recorder.send([3, 4], {"loss": [1.0, None]}, {"amax": [[3, 30], [4, NAN]]})
    run = recorder.run.id
    loss = queries.scalar(run, "loss")
    assert points(loss) == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert loss.times.tolist() == [time_of(0).item(), time_of(1).item(), time_of(0).item()]
    assert points(queries.tensor_series(run, 1, "amax")) == [(1, 10.0), (2, 20.0), (3, 30.0)]
    heat = queries.heatmap(run, "amax", columns=2)
    assert (heat.names, heat.indices, heat.step_edges.tolist()) == (["a", "b"], [0, 1], [1, 3, 5])
    assert heat.values.tolist() == [[2.0, 4.0], [20.0, 30.0]]
    assert queries.scalar_names(run) == ["loss"]
    assert queries.statistic_names(run) == ["amax"]
    assert queries.writers(run) == [recorder.writer]


def test_a_scalar_is_read_without_the_tensors_beside_it() -> None:
    recorder = Recorder.of_new_run([f"t{i}" for i in range(1_000)])
    amax = np.random.default_rng(0).random((4, 1_000))
    recorder.send([1, 2, 3, 4], {"loss": [3.0, NAN, None, 1.0]}, {"amax": amax})
    run = recorder.run.id
    losses = queries.scalar(run, "loss").values.tolist()
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE telemetry_chunk SET body = overlay(body PLACING %s FROM head + 1) WHERE head < 4000",
            [bytes(8_000)],
        )
        assert cursor.rowcount == 1
    assert str(queries.scalar(run, "loss").values.tolist()) == str(losses) == "[3.0, nan, 1.0]"
    with pytest.raises(OSError, match="zstd|decompress"):
        queries.tensor_series(run, 0, "amax")


def test_queries_of_a_run_without_rows_are_empty() -> None:
    run = Recorder.of_new_run(["a"]).run.id
    assert points(queries.scalar(run, "loss")) == []
    assert points(queries.tensor_series(run, 0, "amax")) == []
    heat = queries.heatmap(run, "amax")
    assert (heat.names, heat.values.shape, heat.step_edges.shape) == (["a"], (1, 0), (1,))
    assert queries.latest_statistics(run) is None
    assert queries.top(run, "amax") == []
    assert queries.scalar_names(run) == queries.statistic_names(run) == []


def test_an_unknown_run_has_no_rows() -> None:
    assert points(queries.scalar(uuid.uuid4(), "loss")) == []
    with pytest.raises(Run.DoesNotExist):
        queries.scalar_names(uuid.uuid4())


def test_first_and_last_are_inclusive() -> None:
    recorder = Recorder.of_new_run(["a"])
    for step in range(0, 20, 2):
        recorder.send([step, step + 1], {"loss": [step, step + 1]}, {"amax": [[step], [step + 1]]})
    run = recorder.run.id
    assert queries.scalar(run, "loss", first=3, last=8).steps.tolist() == [3, 4, 5, 6, 7, 8]
    assert queries.scalar(run, "loss", first=18).steps.tolist() == [18, 19]
    assert queries.tensor_series(run, 0, "amax", last=1).steps.tolist() == [0, 1]
    heat = queries.heatmap(run, "amax", first=3, last=4)
    assert (heat.step_edges.tolist(), heat.values.tolist()) == ([3, 4, 5], [[3.0, 4.0]])


def test_nan_and_infinities_are_values_and_nulls_are_not() -> None:
    recorder = Recorder.of_new_run()
    recorder.send([1, 2, 3, 4], {"loss": [1.0, NAN, None, math.inf]})
    series = queries.scalar(recorder.run.id, "loss")
    assert series.steps.tolist() == [1, 2, 4]
    np.testing.assert_array_equal(series.values, [1.0, NAN, math.inf])


def test_the_lowest_rank_wins_a_step() -> None:
    first = Recorder.of_new_run()
    second = first.another(rank=1)
    second.send([1, 2, 3], {"loss": [10, 20, 30], "only_one": [1, 2, 3]})
    first.send([1, 2], {"loss": [1, 2]})
    assert points(queries.scalar(first.run.id, "loss")) == [(1, 1), (2, 2), (3, 30)]
    assert points(queries.scalar(first.run.id, "only_one")) == [(1, 1), (2, 2), (3, 3)]
    assert queries.writers(first.run.id) == [first.writer, second.writer]


def test_a_later_attempt_of_a_rank_replaces_the_steps_that_it_repeats() -> None:
    first = Recorder.of_new_run(["a"])
    first.send([1, 2, 3, 4], {"loss": [1, 2, 3, 4]}, {"numel": [[1]] * 4})
    second = first.another(rank=0, tensors=["a"])
    second.send([3, 4, 5], {"loss": [30, 40, 50]}, {"numel": [[2]] * 3})
    assert queries.scalar(first.run.id, "loss").values.tolist() == [1, 2, 30, 40, 50]
    # The repeated steps are not counted twice.
    assert queries.tensor_series(first.run.id, 0, "numel").values.tolist() == [1, 1, 2, 2, 2]


def test_a_writer_that_went_back_replaces_its_own_steps() -> None:
    recorder = Recorder.of_new_run(["a"])
    recorder.send([1, 2, 3], {"loss": [1, 2, 3]}, {"amax": [[1], [2], [3]]})
    recorder.send([2, 3, 4], {"loss": [20, 30, 40]}, {"amax": [[20], [30], [40]]})
    assert queries.scalar(recorder.run.id, "loss").values.tolist() == [1, 20, 30, 40]
    assert queries.tensor_series(recorder.run.id, 0, "amax").values.tolist() == [1, 20, 30, 40]
    assert queries.heatmap(recorder.run.id, "amax").values.tolist() == [[1, 20, 30, 40]]


def test_ranks_are_merged_by_maximum_and_sum() -> None:
    first = Recorder.of_new_run(["a", "b"])
    second = first.another(rank=1, tensors=["b", "a"])
    first.send(
        [1, 2], None, {"amax": [[1, 5], [NAN, 6]], "saturated": [[1, 2], [3, 4]], "numel": [[8, 8]] * 2}
    )
    second.send([1], None, {"amax": [[9, 7]], "saturated": [[20, 10]], "numel": [[8, 8]]})
    run = first.run.id
    assert points(queries.tensor_series(run, 0, "amax")) == [(1, 7.0)]
    assert points(queries.tensor_series(run, 1, "amax")) == [(1, 9.0), (2, 6.0)]
    assert points(queries.tensor_series(run, 0, "saturated")) == [(1, 11.0), (2, 3.0)]
    assert points(queries.tensor_series(run, 1, "saturation_rate")) == [(1, 22 / 16), (2, 4 / 8)]
    heat = queries.heatmap(run, "saturated")
    assert heat.values.tolist() == [[11.0, 3.0], [22.0, 4.0]]


def test_derived_statistics() -> None:
    recorder = Recorder.of_new_run(["a"])
    counts = {"saturated": [[2]], "nonfinite": [[1]], "underflow": [[4]], "subnormal": [[8]], "numel": [[16]]}
    recorder.send([1], None, counts)
    recorder.send([2], None, {**counts, "numel": [[0]]})
    run = recorder.run.id
    expected = {"saturation_rate": 2, "overflow_rate": 3, "underflow_rate": 4, "subnormal_rate": 8}
    for name, count in {**expected, "nonfinite_rate": 1}.items():
        # A count of no elements gives no rate rather than a rate of zero.
        assert points(queries.tensor_series(run, 0, name)) == [(1, count / 16)]
    assert set(queries.statistic_names(run)) == {*counts, *expected, "nonfinite_rate"}


def test_lists_only_derivable_rates() -> None:
    recorder = Recorder.of_new_run(["a"])
    recorder.send([1], None, {"saturated": [[2]], "numel": [[16]]})
    assert queries.statistic_names(recorder.run.id) == ["saturated", "numel", "saturation_rate"]
    assert points(queries.tensor_series(recorder.run.id, 0, "underflow_rate")) == []


def test_a_heat_map_of_many_steps_keeps_the_maximum_of_each_column(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    values = rng.random((500, 3))
    recorder = Recorder.of_new_run(["a", "b", "c"])
    for begin in range(0, 500, 37):
        rows = values[begin : begin + 37]
        recorder.send(range(begin, begin + len(rows)), None, {"amax": rows})
    whole = queries.heatmap(recorder.run.id, "amax", columns=40)
    assert (len(whole.step_edges), whole.step_edges[0], whole.step_edges[-1]) == (41, 0, 500)
    edges = zip(whole.step_edges[:-1], whole.step_edges[1:], strict=True)
    expected = np.array([values[low:high].max(axis=0) for low, high in edges]).T
    np.testing.assert_array_equal(whole.values, expected)
    # Reading in small portions gives the same result.
    monkeypatch.setattr(heatmaps, "MAX_CELLS", 60)
    np.testing.assert_array_equal(queries.heatmap(recorder.run.id, "amax", columns=40).values, expected)


def test_a_heat_map_of_some_tensors() -> None:
    recorder = Recorder.of_new_run(["a", "b", "c"])
    recorder.send([1], None, {"amax": [[1, 2, 3]]})
    heat = queries.heatmap(recorder.run.id, "amax", tensors=[2, 0, 99])
    assert (heat.names, heat.indices, heat.values.tolist()) == (["c", "a"], [2, 0], [[3.0], [1.0]])
    with pytest.raises(ValueError, match="columns"):
        queries.heatmap(recorder.run.id, "amax", columns=0)


def test_a_catalogue_may_grow() -> None:
    recorder = Recorder.of_new_run(["a"])
    recorder.send([1], None, {"amax": [[1]]})
    recorder.catalogue(["b"], offset=1)
    recorder.send([2], None, {"amax": [[2, 20]]})
    assert points(queries.tensor_series(recorder.run.id, 1, "amax")) == [(2, 20.0)]
    np.testing.assert_array_equal(queries.heatmap(recorder.run.id, "amax").values, [[1, 2], [NAN, 20]])


def test_latest_statistics_are_those_of_the_last_sampled_step() -> None:
    recorder = Recorder.of_new_run(["a", "b"])
    recorder.send([1], None, {"amax": [[1, 2]], "saturated": [[3, 4]], "numel": [[8, 8]]})
    recorder.send([2], None, {"amax": [[5, NAN]], "saturated": [[6, NAN]], "numel": [[8, NAN]]})
    # Statistics are not sampled at every step, and never in an evaluation.
    for step in range(3, 200):
        recorder.send([step], {"loss": [1.0]})
    latest = queries.latest_statistics(recorder.run.id)
    assert latest is not None
    assert (latest.step, latest.names) == (2, ["a", "b"])
    assert latest.values.keys() == {"amax", "saturated", "numel", "saturation_rate"}
    np.testing.assert_array_equal(latest.values["amax"], [5, NAN])
    np.testing.assert_array_equal(latest.values["saturation_rate"], [6 / 8, NAN])


def test_top_orders_tensors_by_their_maximum_over_recent_steps() -> None:
    recorder = Recorder.of_new_run(["a", "b", "c", "never seen"])
    recorder.send([1], None, {"amax": [[1000, 1, 1, NAN]]})
    recorder.send([150, 200], None, {"amax": [[3, 1, 2, NAN], [1, 7, 2, NAN]]})
    run = recorder.run.id
    assert queries.top(run, "amax", 2) == [(1, "b", 7.0), (0, "a", 3.0)]
    assert [name for _, name, _ in queries.top(run, "amax")] == ["b", "a", "c"]


def test_points_limits_the_number_of_points() -> None:
    recorder = Recorder.of_new_run(["a"])
    values = np.random.default_rng(0).random(1000)
    values[123] = 50.0
    recorder.send(range(1000), {"loss": values.tolist()}, {"amax": values[:, None]})
    for series in (
        queries.scalar(recorder.run.id, "loss", points=100),
        queries.tensor_series(recorder.run.id, 0, "amax", points=100),
    ):
        assert 50 <= len(series) <= 100
        assert (123, 50.0) in points(series)
        assert series.times[series.steps == 123] == time_of(123)


def test_reads_a_scalar_of_several_runs_together(monkeypatch: pytest.MonkeyPatch) -> None:
    recorders = [Recorder.of_new_run() for _ in range(RUNS_AT_ONCE + 3)]
    # A process may have sent two runs, and a run has several ranks.
    recorders[1].writer = recorders[0].writer
    for number, recorder in enumerate(recorders[:-1]):
        other = recorder.another(rank=1)
        other.send([0, 1, 2], {"loss": [-1.0, -2.0, -3.0]})
        recorder.send([1, 2, 3], {"loss": [number, NAN, None], "tokens": [1, 2, 3]})
        recorder.send([4, 5], {"loss": [number / 2.0, number / 4.0]})
    over(recorders[0])
    compact(recorders[0])
    ids = [recorder.run.id for recorder in recorders]
    ranges: tuple[dict[str, Any], ...] = (
        {},
        {"first": 2, "last": 4},
        {"first": 9},
        {"points": 8, "timed": False},
    )
    alone = [{run: queries.scalar(run, "loss", **within) for run in ids} for within in ranges]
    assert points(alone[0][ids[4]])[:2] == [(0, -1.0), (1, 4.0)] and not len(alone[0][ids[-1]])
    monkeypatch.delattr(rows, "_fetch")
    for within, expected in zip(ranges, alone, strict=True):
        read = queries.scalars(ids, "loss", **within)
        assert list(read) == ids
        for run, series in expected.items():
            assert repr(points(read[run])) == repr(points(series))
            assert read[run].times.tolist() == series.times.tolist()


def test_a_stream_returns_the_messages_of_a_writer_in_order() -> None:
    recorder = Recorder.of_new_run(["a"])
    for seq in (2, 0, 1, 4):
        recorder.send([seq], {"loss": [float(seq)]}, {"amax": [[seq]]}, seq=seq)
    run, writer = recorder.run.id, recorder.writer
    assert [(seq, data.steps.tolist()) for seq, data in queries.stream(run, writer, 0, 10)] == [
        (0, [0]),
        (1, [1]),
        (2, [2]),
        (4, [4]),
    ]
    assert [seq for seq, _ in queries.stream(run, writer, 1, 2)] == [1, 2]
    assert queries.stream(run, writer, 5, 10) == []
    only = queries.stream(run, writer, 0, 1, scalars=["loss"], statistics=[])[0][1]
    assert (list(only.scalars), list(only.statistics)) == (["loss"], [])
    assert queries.contiguous_until(run, writer) == 3
    assert queries.contiguous_until(run, writer, start=2) == 3
    assert queries.contiguous_until(run, writer, start=3) == 3
    recorder.send([3], {"loss": [3.0]}, seq=3)
    assert queries.contiguous_until(run, writer, start=2) == 5
    assert queries.contiguous_until(run, uuid.uuid4()) == 0
    assert Writer.objects.get().uuid == writer
