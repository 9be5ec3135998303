"""The loss against its baseline: false-alarm rates by simulation, delays, and the state."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.signal import lfilter

from fp8scope_dashboard.alerts.detectors import ConditionChange, State, above_baseline
from fp8scope_dashboard.analysis.losses.onsets import e_process, noise, window_means

ALPHA = 0.05
PARAMETERS = {"margin": 0.0025, "alpha": ALPHA, "block": 2.0, "recover": 10.0}
RUNS, BLOCKS = 1000, 300


def run(
    losses: np.ndarray, baselines: np.ndarray, cuts: tuple[int, ...] = (), **parameters: float
) -> tuple[State, list[ConditionChange]]:
    state: State = {}
    findings = []
    edges = [0, *sorted(cuts), len(losses)]
    for first, last in zip(edges, edges[1:], strict=False):
        part = slice(first, last)
        state = json.loads(json.dumps(state, allow_nan=False))
        steps = np.arange(len(losses))[part]
        state, new = above_baseline(
            state, steps, losses[part], baselines[:, part], {**PARAMETERS, **parameters}
        )
        findings += new
    json.dumps([finding.evidence for finding in findings], allow_nan=False)
    return state, findings


def test_it_works() -> None:
    baseline = np.full((1, 400), 2.0)
    baseline[0, ::2] *= 1.0 + 1e-9
    losses = np.where(np.arange(400) < 300, 2.0, 2.02)
    _, (finding,) = run(losses, baseline)
    assert finding.opened and finding.onset_step == 300 and finding.step < 320
    assert finding.value == pytest.approx(0.01)
    # What one seed may differ by, and how that may change.
    assert finding.threshold == pytest.approx(0.00577, abs=1e-5)
    assert finding.message.startswith("Loss is above its baseline since about step 300: on average 1 % up to")


def median_zero(chance: np.random.Generator) -> np.ndarray:
    """Symmetric with heavy tails: the mean does not exist."""
    return chance.standard_cauchy(BLOCKS)


def skewed(chance: np.random.Generator) -> np.ndarray:
    """Median 0 and mean far above 0: a test of means would raise false alarms."""
    return chance.exponential(1.0, BLOCKS) - math.log(2.0)


def shifting(chance: np.random.Generator) -> np.ndarray:
    """The scale depends on the previous value; the median stays 0."""
    values = np.empty(BLOCKS)
    scale = 1.0
    for i in range(BLOCKS):
        values[i] = scale * chance.normal()
        scale = 5.0 if values[i] > 0 else 0.2
    return values


def alarms(signs: np.ndarray, alpha: float = ALPHA) -> bool:
    """Whether the evidence of blocks with these signs ever reaches 1 / alpha."""
    state = e_process.fresh()
    for sign in signs.tolist():
        e_process.bet(state, sign > 0.0)
        if e_process.wealth(state) >= 1.0 / alpha:
            return True
    return False


@pytest.mark.parametrize("draw", [median_zero, skewed, shifting])
def test_false_alarms_of_signs_are_bounded(draw: Callable[[np.random.Generator], np.ndarray]) -> None:
    """At the edge of the hypothesis (median 0), where alarms are most likely."""
    chance = np.random.default_rng(7)
    count = sum(alarms(draw(chance)) for _ in range(RUNS))
    # The bound is alpha; five standard errors of a share of RUNS above it would be chance once in 10^6.
    assert count / RUNS <= ALPHA + 5 * math.sqrt(ALPHA * (1 - ALPHA) / RUNS)


def test_some_alarms_occur_at_the_edge_of_the_hypothesis() -> None:
    """The tests above are not vacuous."""
    chance = np.random.default_rng(8)
    assert 0 < sum(alarms(chance.normal(size=BLOCKS), alpha=0.5) for _ in range(200)) / 200 <= 0.68


def test_the_wealth_is_a_martingale_that_starts_at_one() -> None:
    for k in range(1, 6):
        total = 0.0
        for path in range(2**k):
            state = e_process.fresh()
            for i in range(k):
                e_process.bet(state, bool(path >> i & 1))
            total += e_process.wealth(state) / 2**k
        assert total == pytest.approx(1.0)


def windows_alarm(values: np.ndarray, alpha: float) -> bool:
    """Whether a window of independent normal values of variance 1 is above the limit for a tolerance 0."""
    state = window_means.fresh()
    model = noise.Model(1, noise.Scale(1, 1.0, 1e6), (), None)
    for i, value in enumerate(values.tolist()):
        if i % 64 == 0:
            state["limits"] = window_means.limits(model, 0.0, 256 + i, alpha)
        if window_means.add(state, value):
            return True
    return False


def test_false_alarms_of_windows_are_bounded() -> None:
    chance = np.random.default_rng(9)
    assert sum(windows_alarm(chance.normal(size=512), ALPHA) for _ in range(200)) / 200 <= ALPHA
    assert windows_alarm(chance.normal(size=512) + 0.7, ALPHA)


def test_noise_is_estimated_from_falls_and_from_the_seeds() -> None:
    chance = np.random.default_rng(10)
    state = noise.fresh()
    for value, seeds in zip(chance.normal(size=4000), chance.normal(size=(4000, 4)), strict=True):
        noise.add(state, float(value), list(seeds - seeds.mean()))
    # White noise of deviation 1 halves with the length; seeds: a difference to the mean of 4 varies by 5/4.
    for scale in noise.scales(state, 4)[:5]:
        assert scale.variance * scale.length == pytest.approx(1.25, rel=0.5)
    rising = noise.fresh()
    for i in range(4000):
        noise.add(rising, 1e-3 * i, [0.0])
    assert max(scale.variance for scale in noise.scales(rising, 1)) == 0.0


def correlated(chance: np.random.Generator, points: int, phi: float) -> np.ndarray:
    noise = chance.normal(size=points + 500) * math.sqrt(1.0 - phi * phi)
    return np.asarray(lfilter([1.0], [1.0, -phi], noise)[500:])


@pytest.mark.parametrize("phi", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("seeds", [1, 3])
def test_serially_correlated_noise_raises_few_alarms(phi: float, seeds: int) -> None:
    chance = np.random.default_rng(11)
    wrong = 0
    for _ in range(40):
        arms = 2.0 * (1.0 + 0.02 * np.stack([correlated(chance, 1000, phi) for _ in range(seeds + 1)]))
        wrong += bool(run(arms[0], arms[1:])[1])
    assert wrong <= 2


def test_noise_that_grows_with_the_length_is_taken_to_go_on_growing() -> None:
    walk = [noise.Scale(2**i, 1e-6 * 2.0**i, freedom) for i, freedom in enumerate((32, 32, 16, 9, 4))]
    found = noise.model(walk, lambda length: 0.0, 2, 256)
    assert found is not None and found.white is None and found.whole is not None
    # From 8 points, the longest that are known well, to 256: 5 doublings.
    assert found.whole.variance == pytest.approx(8e-6 * 2.0**5)
    # Few longer blocks that vary little do not show that the noise falls.
    quiet = [*walk[:4], noise.Scale(16, 1e-7, 4.0)]
    assert noise.model(quiet, lambda length: 0.0, 2, 256).white is None  # type: ignore[union-attr]
    # It fell once: longer noise is bounded by what longer blocks show.
    fell = [walk[0], noise.Scale(2, 5e-7, 32.0), *walk[2:]]
    assert noise.model(fell, lambda length: 0.0, 2, 256).whole is None  # type: ignore[union-attr]


def test_a_rise_early_in_the_run_does_not_hide_behind_its_own_range() -> None:
    for seed in range(5):
        arms = 3.0 * (1.0 + 0.002 * np.random.default_rng(seed).normal(size=(2, 600)))
        arms[0, 128:] *= 1.05
        opened = [finding.step for finding in run(arms[0], arms[1:])[1] if finding.opened]
        assert opened and opened[0] - 128 <= 80


def test_offsets_of_seeds_that_decay_in_the_warm_up_raise_few_alarms() -> None:
    chance = np.random.default_rng(12)
    steps = np.arange(1000)
    wrong = 0
    for _ in range(40):
        # A seed is ahead or behind by 1 % of its steps: most where the loss falls fast.
        speeds = np.exp(0.01 * chance.normal(size=(2, 1)))
        arms = 2.0 + 8.0 * (1.0 + speeds * steps / 20.0) ** -0.7
        arms *= 1.0 + 0.001 * chance.normal(size=arms.shape)
        wrong += bool(run(arms[0], arms[1:])[1])
    assert wrong <= 2


@pytest.mark.parametrize("seeds", [1, 2, 3, 4])
def test_batch_noise_of_seeds_does_not_hide_a_harm(seeds: int) -> None:
    """Noise that is not shared, 2 % a point, drops out of the products that estimate lasting offsets.

    Where it hides how the seeds wander, they are taken to wander as seeds do.
    """
    chance = np.random.default_rng(13)
    found = 0
    for _ in range(10):
        arms = 2.0 * (1.0 + 0.02 * chance.normal(size=(seeds + 1, 1500)))
        arms[0, 600:] *= 1.02
        found += bool(run(arms[0], arms[1:])[1])
    assert found == 10


@pytest.mark.parametrize("seeds", [1, 3, 5])
def test_a_rise_of_one_per_cent_is_found(seeds: int) -> None:
    chance = np.random.default_rng(14)
    for _ in range(10):
        offsets = 0.0005 * chance.normal(size=(seeds + 1, 1))
        arms = 2.5 * (1.0 + offsets + 0.002 * chance.normal(size=(seeds + 1, 1000)))
        arms[0, 500:] *= 1.01
        _, (finding, *_) = run(arms[0], arms[1:])
        assert 500 <= finding.step < 650


@pytest.mark.parametrize("seeds", [1, 3, 5])
def test_a_slow_rise_is_found_while_the_loss_falls_fast(seeds: int) -> None:
    """To 1 % within a tenth of the run: at .7 % the last seventieth of the run must suffice."""
    chance, points = np.random.default_rng(16), 2500
    steps = np.arange(points)
    for _ in range(5):
        arms = 9.0 * (steps + 50.0) ** -0.2 * (1.0 + 0.0008 * chance.normal(size=(seeds + 1, points)))
        arms[0] *= 1.0 + 0.01 * np.clip((steps - 1250) / 250.0, 0.0, 1.0)
        _, (finding, *_) = run(arms[0], arms[1:])
        assert 1250 < finding.step <= 1250 + 0.07 * points


@pytest.mark.parametrize("seeds", [1, 3, 5])
def test_a_run_that_strays_and_comes_back_is_healthy(seeds: int) -> None:
    """A small spike that takes a tenth of the run to fade, as in one of seven runs of a 15B model."""
    chance, points = np.random.default_rng(17), 2500
    steps = np.arange(points)
    offset = 0.0056 * np.exp(-np.clip(steps - 1700, 0, None) / 250.0) * (steps >= 1660)
    for _ in range(5):
        arms = 5.0 * (steps + 50.0) ** -0.1 * (1.0 + 0.0002 * chance.normal(size=(seeds + 1, points)))
        arms[0] *= 1.0 + offset
        assert run(arms[0], arms[1:])[1] == []


@pytest.mark.parametrize("change", [250, 500, 4000])
def test_a_rise_of_one_nat_is_found_within_forty_points(change: int) -> None:
    chance = np.random.default_rng(15)
    arms = 3.0 * (1.0 + 0.01 * chance.normal(size=(2, change + 100)))
    arms[0, change:] += 1.0
    _, (finding, *_) = run(arms[0], arms[1:])
    assert change - 10 <= finding.onset_step <= change and change <= finding.step < change + 40


@pytest.mark.parametrize("phi", [0.9, 0.99])
def test_a_large_rise_is_found_soon_under_noise_that_lasts(phi: float) -> None:
    """Noise of 3 % that grows with the length of all known blocks, and one seed: it does not rise at once."""
    chance = np.random.default_rng(18)
    found, falsely = 0, 0
    for _ in range(10):
        arms = 2.1 * (1.0 + 0.03 * np.stack([correlated(chance, 640, phi) for _ in range(2)]))
        state, early = run(arms[0, :600], arms[1:, :600])
        falsely += bool(early)
        steps = np.arange(600, 640)
        _, findings = above_baseline(state, steps, arms[0, 600:] + 1.0, arms[1:, 600:], PARAMETERS)
        found += bool(findings) and not early
    assert found >= 8 and falsely <= 1


def test_a_state_of_an_earlier_version_is_read_on() -> None:
    arms = 2.0 * (1.0 + 0.002 * np.random.default_rng(19).normal(size=(2, 600)))
    state, _ = run(arms[0, :300], arms[1:, :300])
    del state["noise"]["reached"], state["covered"]
    arms[0, 500:] *= 1.1
    _, (finding, *_) = above_baseline(state, np.arange(300, 600), arms[0, 300:], arms[1:, 300:], PARAMETERS)
    assert 500 <= finding.step < 540


def test_seeds_that_differ_lastingly_widen_the_tolerance() -> None:
    chance = np.random.default_rng(3)
    offsets = np.array([[-0.01], [0.0], [0.01]])
    baselines = 1.0 + offsets + chance.normal(0.0, 1e-4, (3, 500))
    losses = 1.0 + 0.012 + chance.normal(0.0, 1e-4, 500)
    assert run(losses, baselines)[1] == []
    assert [finding.opened for finding in run(losses, baselines[1:2])[1]] == [True]


def test_the_alarm_closes_when_the_run_recovers_and_may_open_again() -> None:
    losses = np.ones(1500)
    losses[300:500] = losses[900:1200] = 1.02
    losses[0] += 1e-9
    _, findings = run(losses, np.ones((1, 1500)))
    assert [finding.opened for finding in findings] == [True, False, True, False]
    assert [finding.onset_step for finding in findings] == [300, 300, 900, 900]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_a_loss_that_is_not_finite_is_above(value: float) -> None:
    losses = np.ones(400)
    losses[300:] = value
    _, (finding,) = run(losses, np.ones((1, 400)))
    assert finding.onset_step == 300 and finding.value is None and "not finite" in finding.message


def test_ignores_points_without_a_baseline() -> None:
    baseline = np.full((2, 400), math.nan)
    baseline[0, ::2] = 1.0
    losses = np.where(np.arange(400) % 2, 100.0, 1.0)
    assert run(losses, baseline)[1] == []


def test_ignores_duplicate_and_rewound_steps() -> None:
    state, _ = above_baseline({}, np.arange(100), np.ones(100), np.ones((1, 100)), PARAMETERS)
    again, findings = above_baseline(state, np.arange(100), np.full(100, 9.0), np.ones((1, 100)), PARAMETERS)
    assert again == state and findings == []


@given(
    st.lists(st.sampled_from([0.9, 1.0, 1.01, 1.5, math.nan, math.inf, 1e308]), max_size=200),
    st.lists(st.integers(0, 200), max_size=5),
    st.integers(1, 4),
    st.sampled_from([1.0, 0.0, -2.0, 1e-200, 1e200, math.nan]),
)
def test_the_result_does_not_depend_on_the_batches(
    values: list[float], cuts: list[int], seeds: int, level: float
) -> None:
    losses = np.array(values, dtype=np.float64)
    baselines = level * (1.0 + 0.001 * np.arange(seeds)[:, None] * np.ones(len(losses)))
    inside = tuple(cut for cut in cuts if cut <= len(losses))
    assert run(losses, baselines, cuts=inside) == run(losses, baselines)


def test_stores_an_unbounded_spread_between_seeds() -> None:
    """Two seeds cancel out in the mean, so that the square of the relative spread is not finite."""
    baseline = np.outer([1e100, -1e100, 1e-99], np.ones(10))
    state, findings = run(np.full(10, 2.0), baseline)
    json.dumps(state, allow_nan=False)
    assert findings == []


RISES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "40 % over 100 points": lambda t: 0.4 * np.clip((t - 800) / 100, 0.0, 1.0),
    "40 % over 300 points": lambda t: 0.4 * np.clip((t - 800) / 300, 0.0, 1.0),
    "75 % over the rest of the run": lambda t: 0.75 * np.clip((t - 800) / 1200, 0.0, 1.0),
    "5 % from the warm-up on": lambda t: 0.05 * np.clip((t - 100) / 300, 0.0, 1.0),
    "3 % over the whole run": lambda t: 0.03 * t / 2000,
}


@pytest.mark.parametrize(
    ("rise", "deviation", "seeds"),
    [
        (rise, deviation, seeds)
        for rise in RISES
        for deviation in (0.0005, 0.003, 0.02)
        for seeds in (1, 3)
        # One seed, no time before the rise: seeds may wander as far, and noise hides whether they do.
        if (rise, deviation, seeds) != ("3 % over the whole run", 0.02, 1)
    ],
)
def test_a_rise_does_not_count_as_its_own_noise(rise: str, deviation: float, seeds: int) -> None:
    """Found 40 points after it has risen by 2 % and 5 deviations, and 290 points of the run, at most."""
    chance, steps = np.random.default_rng(16), np.arange(2000)
    height = RISES[rise](steps)
    for _ in range(2):
        arms = 2.5 * (1.0 + deviation * chance.normal(size=(seeds + 1, 2000)))
        arms[0] *= 1.0 + height
        _, (finding, *_) = run(arms[0], arms[1:])
        assert height[finding.step - 40] < max(height[290], 0.02 + 5.0 * deviation)


def test_a_rise_from_the_beginning_is_found_with_one_seed() -> None:
    """A single seed and no time before the rise: it may be the seeds' wandering until it stands still."""
    chance, steps = np.random.default_rng(16), np.arange(2000)
    for _ in range(3):
        arms = 2.5 * (1.0 + 0.003 * chance.normal(size=(2, 2000)))
        arms[0] *= 1.0 + RISES["5 % from the warm-up on"](steps)
        _, (finding, *_) = run(arms[0], arms[1:])
        assert finding.opened


def short(chance: np.random.Generator, onset: int, factor: float) -> tuple[np.ndarray, np.ndarray]:
    """A run of 38 points and its baseline, with noise of 3 % that is correlated."""
    noise = lfilter([np.sqrt(1.0 - 0.7**2)], [1.0, -0.7], chance.normal(size=(2, 138)))[:, 100:]
    arms = 1.4 * (1.0 + 0.03 * noise)
    arms[0, onset:] *= factor
    return arms[0], arms[1:]


@pytest.mark.parametrize("onset", [0, 12, 24])
def test_a_gross_rise_of_a_short_run_is_found(onset: int) -> None:
    """A fine-tuning of 38 points that lost a nat raised no alarm."""
    for seed in range(5):
        _, (finding, *_) = run(*short(np.random.default_rng(seed), onset, 1.7))
        assert finding.opened and finding.onset_step == onset and finding.step < max(onset + 12, 38)
        assert "above the limit of 20 %" in finding.message


def test_short_runs_of_one_configuration_raise_no_alarm() -> None:
    chance = np.random.default_rng(40)
    for _ in range(200):
        assert run(*short(chance, 0, 1.0))[1] == []
        assert run(*short(chance, 20, 1.1))[1] == []


def test_seeds_that_agree_do_not_narrow_the_tolerance() -> None:
    """One run varies by .5 % for a while, and its seeds do not."""
    chance = np.random.default_rng(17)
    for seeds in (1, 3, 5):
        arms = 2.5 * (1.0 + 0.0005 * chance.normal(size=(seeds + 1, 2000)))
        arms[0, 1200:1400] *= 1.005
        assert run(arms[0], arms[1:])[1] == []


@pytest.mark.parametrize("phi", [0.9, 0.99])
def test_noise_that_lasts_in_the_seeds_counts_for_the_run(phi: float) -> None:
    chance = np.random.default_rng(18)
    wrong = 0
    for _ in range(20):
        arms = 2.0 * (1.0 + 0.005 * np.stack([correlated(chance, 600, phi) for _ in range(6)]))
        wrong += bool(run(arms[0], arms[1:])[1])
    assert wrong <= 1


@pytest.mark.parametrize("points", [[600], [600, 601, 602, 640, 641, 700, 701, 702], list(range(600, 608))])
def test_points_that_are_not_finite_are_no_rise(points: list[int]) -> None:
    """Eight NaN that recover: 'on average .104 %, above the limit of 1.8 %'."""
    for seed in range(5):
        arms = 3.0 * (1.0 + 0.003 * np.random.default_rng(seed).normal(size=(2, 1000)))
        arms[0, points] = math.nan
        assert run(arms[0], arms[1:])[1] == []


@pytest.mark.parametrize("rise", [0.01, 0.03, 0.3])
def test_the_message_shows_what_decided_and_does_not_refute_itself(rise: float) -> None:
    arms = 3.0 * (1.0 + 0.003 * np.random.default_rng(3).normal(size=(2, 700)))
    arms[0, 500:] *= 1.0 + rise
    _, (finding, *_) = run(arms[0], arms[1:])
    assert finding.value is not None and finding.threshold is not None and finding.value > finding.threshold
    assert "It was decided by the mean of the last" in finding.message
    assert finding.evidence["window_mean"] > finding.threshold
