"""Scales that follow their amax, and each way in which they may not. The arithmetic is exact."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from fp8scope_dashboard.diagnosis.scaling.scale_faults import (
    ScaleFault,
    deviation,
    expected_amax,
    scale_fault,
)
from fp8scope_dashboard.diagnosis.tensors import Scaling, scaling_of

Floats = NDArray[np.float64]
M, H = 448.0, 4
DELAYED = Scaling(kind="delayed", history=H)
CURRENT = Scaling(kind="current")


def amaxes(rows: int = 120, seed: int = 0) -> Floats:
    chance = np.random.default_rng(seed)
    drift = np.exp(np.cumsum(chance.normal(0.0, 0.05, rows)))
    return np.asarray(drift * np.exp(chance.normal(0.0, 0.2, rows)), np.float64)


def working(amax: Floats, scaling: Scaling, margin: float = 0.0) -> Floats:
    """The scales of a working recipe, rounded to float32 as the kernels do."""
    expected = expected_amax(amax, scaling, begins=True)
    return np.asarray((M * 2.0**-margin / expected).astype(np.float32), np.float64)


def fault_of(amax: Floats, scale: Floats, scaling: Scaling = DELAYED) -> ScaleFault | None:
    return scale_fault(amax, scale, M, scaling)


def test_the_expected_amax_is_the_largest_of_the_history() -> None:
    amax = np.array([1.0, 5.0, 2.0, 3.0, 1.0, 1.0, 1.0, 1.0])
    assert expected_amax(amax, DELAYED, begins=True).tolist() == [1, 1, 5, 5, 5, 5, 3, 3]
    assert np.isnan(expected_amax(amax, DELAYED, begins=False)).tolist() == [True] * H + [False] * 4
    recent = Scaling(kind="delayed", history=H, most_recent=True)
    assert expected_amax(amax, recent, begins=True).tolist() == [1, 1, 5, 2, 3, 1, 1, 1]
    assert expected_amax(amax, CURRENT, begins=True).tolist() == amax.tolist()


@pytest.mark.parametrize("scaling", [DELAYED, CURRENT, Scaling(kind="delayed", history=H, margin=2.0)])
def test_a_working_scale_has_no_fault(scaling: Scaling) -> None:
    for seed in range(10):
        amax = amaxes(seed=seed)
        scale = working(amax, scaling, scaling.margin)
        assert fault_of(amax, scale, scaling) is None
        assert np.nanmax(np.abs(deviation(amax, scale, M, scaling, begins=True))) < 1e-6


@pytest.mark.parametrize("aging", [False, True])
def test_zeros_are_no_fault_whether_they_age_the_history_or_not(aging: bool) -> None:
    """An expert that gets tokens in every third step, from its own second step on."""
    amax = np.zeros(240)
    amax[1::3] = amaxes(80)
    expected = expected_amax(amax, DELAYED, begins=True)
    if not aging:
        calls = expected_amax(amax[1::3], DELAYED, begins=True)
        following = expected_amax(np.append(amax[1::3], 0.0), DELAYED, begins=True)[1:]
        expected = np.concatenate([[np.nan], np.stack([calls, following, following], 1).ravel()[:-1]])
    # A scale whose history is all zeros stays.
    scale = np.array([M, *np.zeros(239)])
    for row in range(1, 240):
        scale[row] = np.float32(M / expected[row]) if expected[row] > 0 else scale[row - 1]
    assert fault_of(amax, scale) is None
    scale[120:] *= 2.0
    assert fault_of(amax, scale) is not None


def test_rounding_down_to_a_power_of_two_is_no_fault() -> None:
    amax = amaxes()
    scale = 2.0 ** np.floor(np.log2(M / amax))
    assert fault_of(amax, scale, Scaling(kind="current", power_of_two=True)) is None
    assert fault_of(amax, scale, CURRENT) is not None


def test_frozen_from_a_step_on() -> None:
    amax = amaxes()
    scale = working(amax, DELAYED)
    scale[70:] = scale[69]
    fault = fault_of(amax, scale)
    assert fault is not None and fault.kind == "frozen" and fault.lasts and 60 <= fault.first <= 70


def test_frozen_from_the_first_step_on() -> None:
    fault = fault_of(amaxes(), np.full(120, 3.0))
    assert fault is not None and fault.kind == "frozen" and fault.first == 0 and fault.last == 119


def test_a_constant_amax_has_a_constant_scale() -> None:
    assert fault_of(np.ones(100), np.full(100, M)) is None


@pytest.mark.parametrize("lag", [10, 40])
def test_stale_by_a_lag(lag: int) -> None:
    amax = amaxes(200)
    scale = working(amax, DELAYED)
    scale[80:] = scale[80 - lag : 200 - lag].copy()
    fault = fault_of(amax, scale)
    assert fault is not None and (fault.kind, fault.lag) == ("stale", lag) and 78 <= fault.first <= 84


def test_stale_because_it_changes_only_now_and_then() -> None:
    amax = amaxes(200)
    scale = working(amax, DELAYED)
    for begin in range(80, 200, 30):
        scale[begin : begin + 30] = scale[begin]
    fault = fault_of(amax, scale)
    assert fault is not None and fault.kind == "stale" and 15 <= fault.every <= 45


@pytest.mark.parametrize("bits", [-3, 4])
def test_off_by_a_factor(bits: int) -> None:
    amax = amaxes()
    scale = working(amax, DELAYED)
    scale[50:] *= 2.0**-bits
    fault = fault_of(amax, scale)
    assert fault is not None and (fault.kind, fault.first, fault.lasts) == ("offset", 50, True)
    assert fault.bits == pytest.approx(bits, abs=1e-4)


def test_a_history_that_begins_again() -> None:
    scaling = Scaling(kind="delayed", history=16)
    amax = amaxes()
    amax[44:50] *= 8.0
    scale = working(amax, scaling)
    scale[51:] = working(amax[50:], scaling)[1:]
    fault = fault_of(amax, scale, scaling)
    assert fault is not None and fault.kind == "reset" and 50 <= fault.first <= 52 and fault.bits < -2


def test_rows_without_the_tensor_do_not_count() -> None:
    amax = amaxes()
    scale = working(amax, DELAYED)
    scale[70:] = scale[69]
    some = np.arange(240) % 2 == 0
    wide = np.full((2, 240), np.nan)
    wide[0, some], wide[1, some] = amax, scale
    fault = fault_of(wide[0], wide[1])
    assert fault is not None and fault.kind == "frozen" and fault.first % 2 == 0 and 120 <= fault.first <= 140


def test_several_calls_in_a_step_decide_only_what_is_frozen() -> None:
    chance = np.random.default_rng(2)
    calls = np.exp(chance.normal(0.0, 0.3, (120, 4)))
    flat = calls.ravel()
    scale = working(flat, DELAYED).reshape(120, 4)[:, -1]
    assert scale_fault(calls.max(axis=1), scale, M, DELAYED, calls=4.0) is None
    scale[60:] = scale[60]
    fault = scale_fault(calls.max(axis=1), scale, M, DELAYED, calls=4.0)
    assert fault is not None and fault.kind == "frozen"


@pytest.mark.parametrize("power_of_two", [False, True])
def test_block_recipes_decide_only_what_is_frozen(power_of_two: bool) -> None:
    scaling = Scaling(kind="blocks", power_of_two=power_of_two)
    chance = np.random.default_rng(4)
    amax = np.exp(np.linspace(0.0, 3.0, 150) + chance.normal(0.0, 0.1, 150))
    scale = M / (0.6 * amax * np.exp(chance.normal(0.0, 0.02, 150)))
    if power_of_two:
        scale = 2.0 ** np.floor(np.log2(scale))
    assert fault_of(amax, scale, scaling) is None
    scale[60:] = scale[60]
    fault = fault_of(amax, scale, scaling)
    assert fault is not None and fault.kind == "frozen" and fault.lasts


def test_an_unknown_recipe_with_a_long_history_is_not_frozen() -> None:
    amax = amaxes(400)
    amax[10] = 1e4
    scale = working(amax, Scaling(kind="delayed", history=1024))
    assert fault_of(amax, scale, Scaling()) is None
    # But an amax beyond what the scale was made for must change it.
    amax[200:] *= 1e5
    frozen = scale.copy()
    frozen[190:] = scale[190]
    assert fault_of(amax, frozen, Scaling()) is not None


def test_too_few_rows_decide_nothing() -> None:
    assert fault_of(amaxes(10), np.full(10, 3.0)) is None
    assert scale_fault(amaxes(), np.full(120, 3.0), float("nan"), DELAYED) is None


def test_reads_the_recipes_of_the_agent() -> None:
    delayed = {"recipe": "DelayedScaling", "history_length": 8, "margin": 1, "amax_compute": "most_recent"}
    assert scaling_of(delayed, "input") == Scaling(kind="delayed", history=8, margin=1.0, most_recent=True)
    assert scaling_of({"recipe": "CurrentScaling", "power_of_two": True}, "input").power_of_two
    for kind in ("MXFP8", "MXFP4", "NVFP4"):
        assert scaling_of({"recipe": kind}, "input").kind == "blocks"
    torchao = {"recipe": "torchao.float8", "input": "float8_e4m3fn tensorwise", "weight": "x rowwise"}
    assert [scaling_of(torchao, role).kind for role in ("input", "weight", "grad_output")] == [
        "current", "blocks", "unknown"
    ]  # fmt: skip
    assert scaling_of({}, "input").kind == "unknown" and scaling_of({"recipe": 3}, "input").kind == "unknown"
