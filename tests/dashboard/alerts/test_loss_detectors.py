"""Detectors of a run's own loss: what they find, when they are quiet, and that batches do not matter."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.detectors import Finding, LossDetector, State, divergence, not_finite, spike

DETECTORS: dict[str, LossDetector] = {
    "loss_not_finite": not_finite,
    "loss_spike": spike,
    "loss_divergence": divergence,
}


def run(
    kind: str, losses: np.ndarray, *, cuts: tuple[int, ...] = (), steps: np.ndarray | None = None
) -> list[Finding]:
    """All findings; the state goes through JSON between the batches that `cuts` make."""
    steps = np.arange(len(losses)) if steps is None else steps
    state: State = {}
    found = []
    edges = [0, *sorted(cuts), len(losses)]
    for first, last in zip(edges, edges[1:], strict=False):
        state = json.loads(json.dumps(state, allow_nan=False))
        state, new = DETECTORS[kind](state, steps[first:last], losses[first:last], rules.validate(kind, {}))
        found += new
    json.dumps([one.evidence for one in found], allow_nan=False)
    return found


def noisy(n: int = 400, sd: float = 0.02, seed: int = 0) -> np.ndarray:
    steps = np.arange(n)
    return 2.0 + 3.0 * np.exp(-steps / 50.0) + np.random.default_rng(seed).normal(0.0, sd, n)


def test_it_works() -> None:
    losses = noisy()
    losses[118:] = math.nan
    (found,) = run("loss_not_finite", losses)
    assert found.opened and found.onset_step == found.step == 118 and found.value is None
    assert found.message == f"Loss rose from {losses[117]:.4g} to NaN at step 118."


@pytest.mark.parametrize("kind", DETECTORS)
@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_loss_is_quiet(kind: str, seed: int) -> None:
    assert run(kind, noisy(seed=seed)) == []


@pytest.mark.parametrize(
    ("value", "word"), [(math.inf, "infinity"), (-math.inf, "minus infinity"), (1e150, "1e+150")]
)
def test_infinite_and_huge_losses_are_not_finite(value: float, word: str) -> None:
    (found,) = run("loss_not_finite", np.array([2.0, value]))
    assert found.value is None and word in found.message


def test_a_run_that_begins_with_nan_says_so() -> None:
    assert "its first logged value" in run("loss_not_finite", np.array([math.nan]))[0].message


def test_a_lasting_nan_opens_once_and_closes_once() -> None:
    losses = np.full(100, 2.0)
    losses[10:40] = math.nan
    losses[45] = math.inf
    found = run("loss_not_finite", losses)
    assert [(one.opened, one.onset_step, one.step) for one in found] == [(True, 10, 10), (False, 10, 65)]


@pytest.mark.parametrize("length", [3, 5, 30])
def test_a_spike_is_found_at_its_third_point_and_closed_after(length: int) -> None:
    losses = noisy()
    losses[200 : 200 + length] += 1.0
    opened, closed = run("loss_spike", losses)
    assert (opened.onset_step, opened.step) == (200, 202)
    assert opened.value is not None and opened.threshold is not None and opened.value > opened.threshold
    assert not closed.opened and 200 + length < closed.step < 230 + length


def test_two_high_points_are_no_spike() -> None:
    losses = noisy()
    losses[[200, 201, 203, 204]] += 1.0
    assert run("loss_spike", losses) == []


def test_a_spike_does_not_raise_its_own_limit() -> None:
    losses = noisy()
    losses[200:] += 1.0
    (opened,) = run("loss_spike", losses)
    assert opened.onset_step == 200


def test_a_fall_is_no_spike() -> None:
    losses = noisy()
    losses[200:] -= 1.0
    assert run("loss_spike", losses) == []


def test_a_constant_loss_with_few_digits_is_quiet() -> None:
    losses = np.full(400, 2.31)
    losses[200:210] = 2.32
    assert run("loss_spike", losses) == []
    losses[300:310] = 2.4
    assert run("loss_spike", losses)[0].onset_step == 300


def test_divergence_is_found_and_says_from_where() -> None:
    losses = noisy()
    losses[250:] += np.linspace(0.0, 2.0, 150)
    (found,) = run("loss_divergence", losses)
    assert 250 < found.onset_step < 290 and found.step - found.onset_step < 25
    assert found.value is not None and found.threshold is not None and found.value > found.threshold
    assert "rose from its minimum" in found.message and "% higher" in found.message


def test_divergence_closes_when_the_loss_recovers() -> None:
    losses = noisy()
    losses[200:280] += 0.5
    opened, closed = run("loss_divergence", losses)
    assert opened.opened and not closed.opened and 280 < closed.step < 330


def test_noise_needs_more_than_two_per_cent() -> None:
    """A rise of 3 % is found in a quiet loss, and is not more than the noise of a loud one."""
    for sd, found in ((0.005, True), (0.3, False)):
        losses = 2.0 + np.random.default_rng(0).normal(0.0, sd, 600)
        losses[300:] += 0.06
        assert bool(run("loss_divergence", losses)) is found


@pytest.mark.parametrize("kind", ["loss_spike", "loss_divergence"])
def test_other_detectors_ignore_losses_that_are_not_finite(kind: str) -> None:
    losses = noisy()
    losses[100::7] = math.nan
    losses[101::7] = math.inf
    assert run(kind, losses) == []


@pytest.mark.parametrize("kind", ["loss_spike", "loss_divergence"])
def test_ignores_duplicate_and_rewound_steps(kind: str) -> None:
    losses, steps = noisy(), np.arange(400)
    losses[200:] += 1.0
    again = np.concatenate([steps[:250], steps[180:250], steps[249:]])
    values = np.concatenate([losses[:250], np.full(70, 50.0), losses[249:]])
    assert run(kind, values, steps=again) == run(kind, losses)


def test_gaps_in_the_steps_do_not_matter() -> None:
    losses = noisy()
    losses[200:203] += 1.0
    assert run("loss_spike", losses, steps=np.arange(400) * 10)[0].onset_step == 2000


values = st.lists(
    st.one_of(st.floats(-1e3, 1e3), st.sampled_from([math.nan, math.inf, -math.inf, 1e308])), max_size=150
)


@pytest.mark.parametrize("kind", DETECTORS)
@given(values=values, cuts=st.lists(st.integers(0, 150), max_size=5))
def test_the_result_does_not_depend_on_the_batches(kind: str, values: list[float], cuts: list[int]) -> None:
    losses = np.array(values, dtype=np.float64)
    inside = tuple(cut for cut in cuts if cut <= len(losses))
    assert run(kind, losses, cuts=inside) == run(kind, losses)


@pytest.mark.parametrize("kind", DETECTORS)
@given(values=values)
def test_findings_open_and_close_in_turn(kind: str, values: list[float]) -> None:
    found = run(kind, np.array(values, dtype=np.float64))
    assert [one.opened for one in found] == [i % 2 == 0 for i in range(len(found))]
    assert all(one.onset_step <= one.step for one in found)
