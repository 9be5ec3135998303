"""Claims about many series: exact procedures, and their false discovery rate by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import signal, stats

from fp8scope_dashboard.analysis.false_discovery import (
    MIN_PAST,
    benjamini_hochberg,
    change_p_values,
    e_benjamini_hochberg,
    e_values_of,
)

Floats = NDArray[np.float64]
COLUMNS, SPLIT = 120, 90


def noise(series: int, correlation: float, seed: int = 0) -> Floats:
    """AR(1) noise of standard deviation 1, float64[series, COLUMNS]."""
    white = np.random.default_rng(seed).normal(size=(series, COLUMNS + 300))
    return np.asarray(
        signal.lfilter([1.0], [1.0, -correlation], white, axis=1)[:, 300:] * np.sqrt(1.0 - correlation**2)
    )


def test_benjamini_hochberg_is_the_step_up_procedure() -> None:
    # Table 1 of Benjamini & Hochberg (1995): four of fifteen at 0.05.
    p = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262, 0.5719]
    p_values = np.array([*p, 0.6528, 0.7590, 1.0])
    assert benjamini_hochberg(p_values).tolist() == [True] * 4 + [False] * 11
    with_gaps = np.insert(p_values, 2, np.nan)
    assert benjamini_hochberg(with_gaps).tolist() == [True, True, False, True, True] + [False] * 11
    assert benjamini_hochberg(np.array([np.nan])).tolist() == [False]


def test_e_values_are_claimed_by_their_rank() -> None:
    # T / (k * level): 80, 40, 26.7, 20 for four e-values at 5 %.
    assert e_benjamini_hochberg(np.array([30.0, 1.0, 50.0, 27.0])).tolist() == [True, False, True, True]
    assert e_benjamini_hochberg(np.array([79.0, 1.0, 1.0, np.nan])).tolist() == [True, False, False, False]
    assert not e_benjamini_hochberg(np.array([79.0, 1.0, 1.0, 1.0])).any()


def test_an_e_value_is_at_most_1_in_expectation() -> None:
    # Midpoints in ln p, because the calibrator is unbounded near 0.
    edges = np.exp(-np.linspace(0.0, 600.0, 600_001))
    p, widths = (edges[1:] + edges[:-1]) / 2.0, edges[:-1] - edges[1:]
    assert 0.99 < float(np.sum(e_values_of(p) * widths)) <= 1.0 + 1e-6
    assert np.isnan(e_values_of(np.array([np.nan]))).all() and e_values_of(np.array([1.0]))[0] == 0.5


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_of_a_thousand_series_without_a_change_hardly_any_is_claimed(correlation: float) -> None:
    """All claims are false here, so the false discovery rate is the share of trials with any claim."""
    trials = 10
    any_claim = sum(
        bool(benjamini_hochberg(change_p_values(noise(1_000, correlation, seed), SPLIT)).any())
        for seed in range(trials)
    )
    # More than 3 of 10 has a probability of 0.1 % if the rate is 5 %.
    assert any_claim <= stats.binom.ppf(0.999, trials, 0.05)


def test_real_changes_are_claimed() -> None:
    values = noise(1_000, 0.5)
    values[:50, SPLIT:] += 3.0
    claims = benjamini_hochberg(change_p_values(values, SPLIT))
    assert claims[:50].mean() >= 0.9
    assert claims[50:].sum() / claims.sum() <= 0.1
    # The test is of ranks: it does not depend on the scale of the values, nor on one outlier.
    assert np.allclose(change_p_values(np.exp(values), SPLIT), change_p_values(values, SPLIT))


def test_a_drift_that_goes_on_and_an_outlier_are_no_changes() -> None:
    drifting = np.linspace(0.0, 5.0, COLUMNS) + 0.1 * noise(200, 0.0)
    outlier = noise(200, 0.0, 1)
    outlier[:, SPLIT + 3] = 1e6
    assert np.median(change_p_values(drifting, SPLIT)) > 1e-3
    assert not benjamini_hochberg(change_p_values(outlier, SPLIT)).any()


def test_what_cannot_be_compared_has_no_p_value() -> None:
    values = noise(4, 0.0)
    values[0, : SPLIT - MIN_PAST + 1] = np.nan
    values[1, SPLIT:] = np.nan
    values[2] = 7.0
    values[3, ::3] = np.nan
    p_values = change_p_values(values, SPLIT)
    assert np.isnan(p_values[:2]).all() and p_values[2] == 1.0 and 0.0 < p_values[3] <= 1.0
    steps = np.where(np.arange(COLUMNS) < SPLIT, 0.0, 1.0)[None]
    assert change_p_values(steps, SPLIT)[0] == 0.0
