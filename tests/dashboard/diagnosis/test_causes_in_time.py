"""Steps that tell what FP8 did not do: leaps of the weights, a loss that is not finite by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fp8scope_dashboard.analysis.tensor_onsets import default_limit, ranked
from fp8scope_dashboard.diagnosis import loss_code, weights
from fp8scope_dashboard.diagnosis.curves import Trouble
from fp8scope_dashboard.diagnosis.precedence import RunTrouble, may_explain
from fp8scope_dashboard.diagnosis.scaling import step as scaling
from fp8scope_dashboard.diagnosis.scaling.range_use import saturating
from fp8scope_dashboard.diagnosis.scaling.training import Training
from fp8scope_dashboard.diagnosis.tensors import CataloguedTensor, TensorSeries
from fp8scope_dashboard.diagnosis.weights import Moments

STEPS = np.arange(1, 161)
TENSORS = tuple(
    CataloguedTensor(
        index=3 * i + j, name=f"blocks.{i}.{role}", module=f"blocks.{i}", role=role, largest=448.0, numel=1000
    )
    for i in range(6)
    for j, role in enumerate(("input", "weight", "grad_output"))
)
NAN = Trouble("not_finite", 81, None, np.inf)
JUMP = Trouble("jump", 75, None, 0.5)


def rows(seed: int = 0) -> TensorSeries:
    """Healthy tensors: weights grow by .1 % a step, other amaxes are noisy."""
    chance = np.random.default_rng(seed)
    amax = np.exp(chance.normal(0.0, 0.3, (len(TENSORS), len(STEPS))))
    is_weight = np.array([tensor.role == "weight" for tensor in TENSORS])
    amax[is_weight] = 0.1 * np.exp(0.001 * STEPS + chance.normal(0.0, 0.001, (6, len(STEPS))))
    zeros = np.zeros(amax.shape)
    return TensorSeries(
        tensors=TENSORS,
        steps=STEPS,
        amax=amax,
        scale=448.0 / amax,
        saturated=zeros,
        underflow=zeros.copy(),
        nonfinite=zeros.copy(),
        numel=zeros + 1000.0,
        error=zeros * np.nan,
    )


def test_weights_that_leap_before_the_loss_are_the_cause() -> None:
    """The optimizer's state breaks at 71; the loss is up at 75."""
    broken = rows()
    broken.amax[1::3, 70:] *= 1.5
    finding = weights.examine(broken, None, None, RunTrouble(1, (JUMP,), True))
    assert (finding.outcome, finding.cause, finding.onset) == ("cause", "optimizer_state", 71)
    assert "The weights leap at step 71" in finding.sentence


def test_weights_that_grow_in_each_step_do_not_leap() -> None:
    """By 5 % in each step was a broken state of the optimizer."""
    table = rows()
    amax = table.amax.copy()
    weight = table.roles == "weight"
    amax[weight, 70:] *= 1.05 ** np.arange(1, amax.shape[1] - 69)
    finding = weights.examine(replace(table, amax=amax), None, None, RunTrouble())
    assert (finding.outcome, finding.cause, finding.onset) == ("cause", "weight_growth", 71)
    assert "grow by 5 % in each step from step 71 on" in finding.sentence


def test_weights_that_leap_after_the_loss_are_not() -> None:
    broken = rows()
    broken.amax[1::3, 90:] *= 1.5
    assert weights.examine(broken, None, None, RunTrouble(1, (JUMP,), True)).outcome == "clear"


@pytest.mark.parametrize("seed", range(5))
def test_healthy_weights_do_not_leap(seed: int) -> None:
    assert weights.leap_of(rows(seed)) is None
    assert weights.examine(rows(seed), None, None, RunTrouble(1)).outcome == "clear"


def test_one_weight_that_leaps_is_not_the_optimizer() -> None:
    spoilt = rows()
    spoilt.amax[4, 70:] *= 256.0
    assert weights.leap_of(spoilt) is None


@pytest.mark.parametrize(("gradients", "outcome"), [(0.0, "cause"), (4.0, "clear")])
def test_moments_that_jump_without_their_gradients_are_broken(gradients: float, outcome: str) -> None:
    bits, of_gradients = np.zeros(16), np.zeros(16)
    bits[8:] += 8.0
    of_gradients[8:] += gradients
    moments = Moments(np.arange(0, 170, 10), bits, of_gradients)
    finding = weights.examine(None, None, moments, RunTrouble(1, (JUMP,), True))
    assert finding.outcome == outcome
    if outcome == "cause":
        assert (finding.cause, finding.earliest, finding.onset) == ("optimizer_state", 71, 80)


def test_growing_weights_are_a_possible_cause() -> None:
    growing = rows()
    growing.amax[1::3] *= np.exp2(0.03 * STEPS)
    trouble = RunTrouble(1, (Trouble("rise", 150, None, 0.5),), True)
    finding = weights.examine(growing, None, None, trouble)
    assert (finding.outcome, finding.cause) == ("suspect", "weight_growth")
    assert weights.examine(growing, growing, None, trouble).outcome == "clear"


def test_a_nan_of_the_loss_code_is_not_fp8() -> None:
    """The gradients of the step itself come from the loss."""
    healthy = rows()
    healthy.nonfinite[2::3, 80:] = 1000.0
    finding = loss_code.examine([NAN], healthy)
    assert finding is not None and (finding.outcome, finding.cause) == ("not_fp8", "loss_code")
    assert finding.onset == 81 and "Check the code of the loss" in finding.suggestion


def test_a_nan_with_nan_in_a_tensor_before_is_not_of_the_loss_code() -> None:
    for tensor, column in ((0, 80), (2, 79), (1, 60)):
        bad = rows()
        bad.nonfinite[tensor, column] = 1.0
        assert loss_code.examine([NAN], bad) is None
    unknown = replace(rows(), nonfinite=np.full((len(TENSORS), len(STEPS)), np.nan))
    assert loss_code.examine([NAN], unknown) is None and loss_code.examine([JUMP], rows()) is None


@pytest.mark.parametrize(
    ("cause", "onset", "trouble", "explains"),
    [
        ("margin", 20, 163, False),
        ("frozen_scale", 20, 163, True),
        ("margin", 150, 163, True),
        ("margin", 163, 163, True),
        ("frozen_scale", 170, 163, False),
        ("margin", None, 163, True),
        ("margin", 20, 40, True),
    ],
)
def test_a_cause_is_new_or_recent(cause: str, onset: int | None, trouble: int, explains: bool) -> None:
    assert may_explain(cause, onset, trouble, 1) is explains


RECIPE = {"recipe": "CurrentScaling", "margin": 0, "power_of_two": False}
CALM = Training(norm_bits=np.zeros(0), norm_steps=np.zeros(0, np.int64), last_step=1000)


def test_clear_says_what_was_observed() -> None:
    finding = scaling.examine(rows(), RECIPE, None, CALM)
    assert finding.outcome == "clear"
    assert "18 of 18 tensors in 160 steps (1 to 160 of 1,000)" in finding.sentence


def test_what_was_not_observed_is_not_clear() -> None:
    """FP8 began in the middle, without a `watch`: no scale was recorded, or only few."""
    none = replace(rows(), scale=np.full((len(TENSORS), len(STEPS)), np.nan))
    assert scaling.examine(none, RECIPE, None, CALM).outcome == "unknown"
    few = rows()
    few.scale[:, :-4] = np.nan
    finding = scaling.examine(few, RECIPE, None, CALM)
    assert finding.outcome == "unknown" and "nothing can be said" in finding.sentence
    half = rows()
    half.scale[3:, :] = np.nan
    assert "3 of 18 tensors" in scaling.examine(half, RECIPE, None, CALM).sentence
    unstated = scaling.examine(rows(), {"recipe": "torchao.float8"}, None, CALM)
    assert "states no formula" in unstated.sentence and "follow" not in unstated.sentence


def test_without_counts_nothing_is_said_of_ranges() -> None:
    blind = replace(rows(), saturated=np.full((len(TENSORS), len(STEPS)), np.nan))
    assert "was not recorded" in scaling.examine(blind, RECIPE, None, CALM).sentence


def test_the_evidence_of_underflow_is_underflow() -> None:
    """A client may count underflow and neither saturation nor values that are not finite."""
    lost = replace(rows(), nonfinite=np.full((len(TENSORS), len(STEPS)), np.nan))
    lost = replace(lost, saturated=lost.nonfinite.copy())
    lost.underflow[3, 80:] = 900.0
    finding = scaling.examine(lost, RECIPE, None, CALM)
    assert finding.cause == "bad_layer" and finding.onset == 81
    assert {link.parts["statistic"] for link in finding.links} == {"underflow_rate"}


def test_a_slow_rise_begins_where_the_ranking_of_tensors_says() -> None:
    """A change-point of the logarithm lies far behind the beginning of the slope."""
    steps = np.arange(1, 1001)
    share = np.clip((steps - 300.0) / 5000.0, 0.0, None)
    tensor = TENSORS[:1]
    blank = np.zeros((1, len(steps)))
    slope = TensorSeries(
        tensors=tensor,
        steps=steps,
        amax=blank + 1.0,
        scale=blank + 448.0,
        saturated=1000.0 * share[None, :],
        underflow=blank,
        nonfinite=blank,
        numel=blank + 1000.0,
        error=blank * np.nan,
    )
    (leaving,) = saturating(slope)
    columns = ranked(share[None, :], "saturation_rate", default_limit("saturation_rate"))
    assert leaving.onset == int(steps[columns.onset[0]]) == 306
