"""Curves as comparisons read them: exact when short, in fixed buckets when long, whatever is compacted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis import reading
from fp8scope_dashboard.analysis.reading import read_arms, stride_of
from fp8scope_dashboard.runs.models import Run, RunState, Writer
from fp8scope_dashboard.telemetry import compaction

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    """Compaction does not change the number of rows, so a kept reading would hide what it changes."""
    reading.forget()


@pytest.fixture
def short_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves of more than 32 steps are long."""
    monkeypatch.setattr(reading, "MAX_POINTS", 16)


def record(project: Project, steps: int, *, tokens: bool = True) -> Run:
    run = make_run(project, "run")
    numbers = np.arange(steps)
    scalars = {"loss": 3.0 - np.log1p(numbers) / 10.0, "grad_norm": np.ones(steps)}
    if tokens:
        scalars["tokens"] = (64 * (numbers + 1)).astype(np.float64)
    Recorder(run=run).rows(numbers, scalars, rows_per_batch=250)
    return run


def one(run: Run) -> reading.RunReading:
    (single,), _ = read_arms([run.id], [])
    return single


def compact(run: Run) -> None:
    Run.objects.filter(pk=run.pk).update(state=RunState.FINISHED)
    while compaction.compact_run(run.id):
        pass


def test_a_short_curve_has_every_step(project: Project) -> None:
    curve = one(record(project, 100)).curve
    np.testing.assert_array_equal(curve.steps, np.arange(100))
    np.testing.assert_array_equal(curve.losses, 3.0 - np.log1p(np.arange(100)) / 10.0)
    assert curve.tokens is not None and curve.tokens[-1] == 6400.0


@pytest.mark.parametrize(
    ("steps", "stride"),
    [(0, 1), (16_384, 1), (16_385, 2), (32_768, 2), (32_769, 64), (1_048_576, 64), (1_048_577, 128)],
)
def test_strides_are_powers_of_two(steps: int, stride: int) -> None:
    assert stride_of(steps) == stride


def test_a_long_curve_is_bounded(project: Project) -> None:
    run = record(project, 3_000)
    before = one(run)
    assert len(before.curve.steps) == 3_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "MAX_POINTS", 64)
        raw = one(run)
        compact(run)
        reading.forget()
        rolled = one(run)
    assert len(raw.curve.steps) == math.ceil(3_000 / 64) and raw.curve.steps[0] == 63
    assert raw.curve.steps[-1] == 2_999 and raw.scalars["grad_norm"].means.tolist() == [1.0] * 6
    for other in (rolled,):
        np.testing.assert_array_equal(raw.curve.steps, other.curve.steps)
        np.testing.assert_allclose(raw.curve.losses, other.curve.losses, rtol=1e-14)
        np.testing.assert_array_equal(raw.curve.tokens, other.curve.tokens)


def test_tokens_count_only_if_every_loss_has_them(project: Project, short_curves: None) -> None:
    run = record(project, 200)
    assert one(run).curve.tokens is not None
    recorder = Recorder(run=run)
    Writer.objects.filter(uuid=recorder.uuid).update(attempt=1)
    recorder.rows(np.arange(200, 260), {"loss": np.ones(60)})
    assert one(run).curve.tokens is None
    assert one(record(project, 200, tokens=False)).curve.tokens is None


def test_a_loss_that_is_not_finite_stays_visible(project: Project, short_curves: None) -> None:
    run = make_run(project, "run")
    losses = np.ones(400)
    losses[[70, 200]] = math.nan, math.inf
    Recorder(run=run).rows(np.arange(400), {"loss": losses})
    for _ in range(2):
        curve = one(run).curve
        assert math.isnan(curve.losses[1]) and curve.losses[3] == math.inf
        assert np.isfinite(np.delete(curve.losses, [1, 3])).all()
        compact(run)
        reading.forget()


def test_a_rewind_replaces_what_it_touches(project: Project, short_curves: None) -> None:
    run = record(project, 600)
    compact(run)
    before = one(run).curve
    Run.objects.filter(pk=run.pk).update(state=RunState.RUNNING)
    resumed = Recorder(run=run)
    Writer.objects.filter(uuid=resumed.uuid).update(attempt=1)
    resumed.rows(np.arange(300, 500), {"loss": np.full(200, 9.0), "tokens": 64.0 * np.arange(301, 501)})
    for _ in range(2):
        curve = one(run).curve
        # Step 300 lies in the bucket of the steps 256 to 319.
        np.testing.assert_allclose(curve.losses[:4], before.losses[:4])
        old = 3.0 - np.log1p(np.arange(256, 300)) / 10.0
        assert curve.losses[4] == pytest.approx((old.sum() + 20 * 9.0) / 64, rel=1e-12)
        assert curve.losses[5:].tolist() == [9.0] * 3 and curve.steps[-1] == 499
        compact(run)
        reading.forget()


def test_a_short_run_is_compared_step_by_step_with_a_long_baseline(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_POINTS", 100)
    run, baseline = record(project, 90), record(project, 1_000)
    (ours,), (theirs,) = read_arms([run.id], [baseline.id])
    np.testing.assert_array_equal(ours.curve.steps, np.arange(90))
    # Step by step up to a border of the coarse buckets, then in these.
    np.testing.assert_array_equal(theirs.curve.steps[:128], np.arange(128))
    assert theirs.curve.steps[128:].tolist() == [*range(191, 1_000, 64), 999]
    assert theirs.curve.tokens is not None and theirs.curve.tokens[-1] == 64_000.0


def test_a_run_without_rows_has_an_empty_curve(project: Project) -> None:
    run = make_run(project, "empty")
    assert len(one(run).curve) == 0
    (ours,), theirs = read_arms([run.id], [])
    assert len(ours.curve) == 0 and theirs == []


def test_an_unchanged_run_is_read_once(project: Project, django_assert_num_queries: Any) -> None:
    run = record(project, 100)
    first = one(run)
    with django_assert_num_queries(1):
        assert one(run) is first
    Recorder(run=run).rows([100], {"loss": [1.0], "tokens": [6464.0]})
    assert one(run).curve.losses[-1] == 1.0


@pytest.mark.parametrize("is_compacted", [False, True])
def test_the_data_hash_is_that_of_all_ranks(project: Project, is_compacted: bool) -> None:
    run = make_run(project, "run")
    steps = np.arange(40)
    for rank in range(2):
        scalars = {"data_hash": 1_000.0 * rank + steps}
        Recorder(run=run, rank=rank).rows(steps, scalars | ({"loss": np.ones(40)} if rank == 0 else {}))
    if is_compacted:
        compact(run)
    curve = one(run).curve
    assert curve.data_hash is not None
    np.testing.assert_array_equal(curve.data_hash, 1_000.0 + 2.0 * steps)


def test_a_loss_that_is_not_finite_stands_at_its_own_step(project: Project, short_curves: None) -> None:
    """NaN at 90,500 was 'at step 90,559', the end of its bucket."""
    run, steps = make_run(project, "broken"), np.arange(4096)
    losses = np.ones(4096)
    losses[1000], losses[2003:2301] = math.nan, math.inf
    Recorder(run=run).rows(steps, {"loss": losses}, rows_per_batch=512)
    curve = one(run).curve
    broken = curve.steps[~np.isfinite(curve.losses)]
    assert len(curve) < 100 and broken[0] == 1000
    assert broken[1] == 2003 and broken[-1] == 2300
    assert (np.diff(curve.steps) > 0).all()
