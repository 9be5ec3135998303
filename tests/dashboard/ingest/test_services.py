"""A stored batch updates the counters of its run."""

from __future__ import annotations

import math
from uuid import UUID

import pytest
import redis
from dashboard.helpers.recorder import Recorder
from django.conf import settings

from fp8scope_dashboard import notifications
from fp8scope_dashboard.ingest import urgency
from fp8scope_dashboard.ingest.batch import to_json_number
from fp8scope_dashboard.runs.models import Run, RunState, Writer

pytestmark = pytest.mark.django_db


def test_it_works() -> None:
    recorder = Recorder.of_new_run(["a"])
    before = Run.objects.get().heartbeat_at
    recorder.send([1, 2], {"loss": [2.0, 1.0]}, {"amax": [[1.0], [math.nan]]})
    run = Run.objects.get()
    assert (run.rows_stored, run.points_stored, run.last_step) == (2, 3, 2)
    assert (run.last_scalars, run.statistics) == ({"loss": 1.0}, ["amax"])
    assert run.heartbeat_at > before
    assert Writer.objects.get().seen_at > before


def test_the_latest_value_of_each_scalar_is_kept() -> None:
    recorder = Recorder.of_new_run()
    recorder.send([1, 2, 3], {"loss": [3.0, 2.0, 1.0], "tokens": [10.0, None, None]})
    recorder.send([4], {"loss": [math.nan], "grad_norm": [math.inf]})
    assert Run.objects.get().last_scalars == {"loss": "NaN", "tokens": 10.0, "grad_norm": "Infinity"}


def test_a_late_batch_adds_no_older_value() -> None:
    recorder = Recorder.of_new_run()
    recorder.send([10], {"loss": [1.0]}, seq=1)
    recorder.send([5], {"loss": [5.0], "only_early": [7.0]}, seq=0)
    run = Run.objects.get()
    assert run.last_scalars == {"loss": 1.0, "only_early": 7.0}
    assert (run.last_step, run.rows_stored) == (10, 2)


def test_a_batch_wakes_a_silent_run_but_not_a_finished_one() -> None:
    recorder = Recorder.of_new_run()
    for state, expected in [
        (RunState.SILENT, RunState.RUNNING),
        (RunState.FINISHED, RunState.FINISHED),
        (RunState.FAILED, RunState.FAILED),
    ]:
        Run.objects.update(state=state)
        recorder.send([1], {"loss": [1.0]})
        assert Run.objects.get().state == expected


def test_a_run_has_the_statistics_of_all_its_writers() -> None:
    first = Recorder.of_new_run(["a"])
    second = first.another(1, ["a"])
    first.send([1], None, {"amax": [[1]]})
    second.send([1], None, {"scale": [[1]], "amax": [[1]]})
    assert Run.objects.get().statistics == ["amax", "scale"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1.5, 1.5), (math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")],
)
def test_nonfinite_numbers_become_strings_in_json(value: float, expected: float | str) -> None:
    assert to_json_number(value) == expected


@pytest.mark.django_db(transaction=True)
def test_rows_in_which_a_scalar_becomes_nan_are_urgent() -> None:
    """Detectors read their run before others. A scalar that stays NaN is no news."""
    with redis.Redis.from_url(settings.REDIS_URL) as client:
        recorder = Recorder.of_new_run()
        batches: list[tuple[list[float | None], int]] = [
            ([1.0, 2.0], 0),
            ([1.0, math.nan, 1.0], 1),
            ([math.inf], 1),
            ([math.nan, None], 0),
            ([1.0], 0),
        ]
        for number, (losses, expected) in enumerate(batches):
            client.flushdb()
            # As a request does.
            recorder.run.refresh_from_db()
            steps = range(10 * number, 10 * number + len(losses))
            recorder.send(steps, {"loss": losses, "lr": [0.1] * len(losses)})
            assert notifications.flush()
            assert client.zcard(notifications.URGENT_RUNS) == expected, losses
            assert client.zcard(notifications.WAITING_RUNS) == 1


@pytest.mark.django_db(transaction=True)
def test_rows_in_which_a_tensor_becomes_nan_are_urgent() -> None:
    """One that has NaN in each row is no news, and an unobserved row decides nothing."""
    missing = math.nan
    with redis.Redis.from_url(settings.REDIS_URL) as client:
        recorder = Recorder.of_new_run(["a", "b"])
        batches: list[tuple[list[list[float]], int]] = [
            ([[0.0, 0.0], [0.0, 0.0]], 0),
            ([[0.0, missing], [0.0, 3.0], [0.0, 3.0]], 1),
            ([[0.0, 3.0], [missing, missing], [0.0, 2.0]], 0),
            ([[missing, missing]], 0),
        ]
        for number, (counts, expected) in enumerate(batches):
            client.flushdb()
            recorder.send(range(10 * number, 10 * number + len(counts)), None, {"nonfinite": counts})
            assert notifications.flush()
            assert client.zcard(notifications.URGENT_RUNS) == expected, counts
            assert client.zcard(notifications.WAITING_RUNS) == 1


@pytest.mark.django_db(transaction=True)
def test_rows_that_their_sender_calls_urgent_are_judged_first_within_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent sees bounds exceeded that the server does not look for."""
    monkeypatch.setattr(urgency, "MAX_URGENT", 2.0)
    monkeypatch.setattr(urgency, "URGENT_PER_SECOND", 0.0)
    with redis.Redis.from_url(settings.REDIS_URL) as connection:
        recorder = Recorder.of_new_run()
        expected = [1, 1, 0]
        for number, count in enumerate(expected):
            connection.flushdb()
            recorder.send([number], {"loss": [1.0]}, urgent=True)
            assert notifications.flush()
            assert connection.zcard(notifications.URGENT_RUNS) == count, number


def test_each_run_has_a_bounded_number_of_urgent_batches() -> None:
    budgets, now = urgency.Budgets(), 100.0
    first, second = UUID(int=1), UUID(int=2)
    taken = [budgets.take(first, now) for _ in range(200)]
    assert taken == [True] * int(urgency.MAX_URGENT) + [False] * (200 - int(urgency.MAX_URGENT))
    assert budgets.take(second, now)
    assert [budgets.take(first, now + 3.0) for _ in range(5)] == [True] * 3 + [False] * 2
