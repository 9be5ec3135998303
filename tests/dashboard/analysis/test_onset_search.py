"""Onsets that are searched in stored runs: to the step, and between observations."""

from __future__ import annotations

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run

from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.analysis.onset_search import COLUMNS, Columns, TensorOnset, first_onsets
from fp8scope_dashboard.telemetry import queries

pytestmark = pytest.mark.django_db
STEPS = np.arange(5, 5_005)
LIMIT = 1e-3


def onsets(saturated: np.ndarray, *, left_out: int = 0) -> dict[int, TensorOnset]:
    """The onsets of tensors, float64[N, T] of counted elements; NaN where nothing was observed."""
    run = make_run(create_project("long", "Long"))
    names = [f"blocks.{i}.input" for i in range(saturated.shape[1])]
    numel = np.where(np.isnan(saturated), np.nan, 1_000.0)
    Recorder(run=run, tensors=names).rows(
        STEPS, {}, {"saturated": saturated, "numel": numel}, rows_per_batch=5_000
    )
    read = queries.heatmap(run.pk, "saturation_rate", columns=COLUMNS)
    columns = Columns(
        run_id=run.pk,
        statistic="saturation_rate",
        indices=read.indices,
        edges=read.step_edges,
        values=read.values,
        left_out=left_out,
    )
    return dict(first_onsets(columns, LIMIT).onsets)


def test_it_works() -> None:
    saturated = np.zeros((len(STEPS), 3))
    saturated[STEPS >= 1_234, 0] = 50.0
    saturated[STEPS >= 3_001, 2] = 50.0
    saturated[STEPS == 77, 1] = 900.0
    assert onsets(saturated) == {0: TensorOnset(1_234, 1_233), 2: TensorOnset(3_001, 3_000)}


def test_between_observations() -> None:
    saturated = np.zeros((len(STEPS), 2))
    saturated[STEPS >= 1_234] = 50.0
    saturated[STEPS % 100 != 0, 0] = np.nan
    saturated[(STEPS > 400) & (STEPS < 2_000), 1] = np.nan
    assert onsets(saturated) == {0: TensorOnset(1_300, 1_200), 1: TensorOnset(2_000, 400)}


def test_a_tensor_that_appears_late_begins_with_its_first_observation() -> None:
    saturated = np.full((len(STEPS), 1), 50.0)
    saturated[STEPS < 2_500] = np.nan
    assert onsets(saturated, left_out=10) == {0: TensorOnset(2_500, 2_499)}


def test_in_the_first_steps_of_a_long_run() -> None:
    """A column has more steps than those that do not count."""
    saturated = np.zeros((len(STEPS), 3))
    saturated[STEPS < 12, 0] = 500.0
    saturated[:, 1] = 500.0
    saturated[STEPS >= 18, 2] = 500.0
    found = onsets(saturated, left_out=10)
    assert found == {1: TensorOnset(15, 4), 2: TensorOnset(18, 17)}
    assert found[1].in_words == "5–15"


def test_of_many_onsets_the_later_ones_are_columns() -> None:
    saturated = np.zeros((len(STEPS), 8))
    for tensor in range(8):
        saturated[500 * (tensor + 1) + 3 <= STEPS, tensor] = 50.0
    found = onsets(saturated)
    exact = [found[tensor].step == 500 * (tensor + 1) + 3 for tensor in range(8)]
    assert exact == [True] * 4 + [False] * 4
    for tensor in range(4, 8):
        onset = found[tensor]
        assert onset.earliest <= 500 * (tensor + 1) + 3 <= onset.step and onset.step - onset.earliest < 30
