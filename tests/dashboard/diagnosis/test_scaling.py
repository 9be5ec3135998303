"""Step (c) on small tables of tensors: what is named, and what is left alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fp8scope_dashboard.diagnosis.findings import Finding
from fp8scope_dashboard.diagnosis.scaling.loss_scale import common_factor
from fp8scope_dashboard.diagnosis.scaling.range_use import flushing, saturating
from fp8scope_dashboard.diagnosis.scaling.step import examine
from fp8scope_dashboard.diagnosis.scaling.training import Training
from fp8scope_dashboard.diagnosis.tensors import CataloguedTensor, TensorSeries

Floats = NDArray[np.float64]
N, LAYERS, NUMEL = 120, 5, 1000.0
ROLES = ("input", "weight", "grad_output")
CURRENT = {"recipe": "CurrentScaling", "margin": 0}
CALM = Training(norm_bits=np.zeros(0), norm_steps=np.zeros(0, np.int64))


def rows(seed: int = 0) -> TensorSeries:
    """Tensors of five layers whose scales follow the current recipe."""
    tensors = tuple(
        CataloguedTensor(
            index=i,
            name=f"layers.{i // 3}.{ROLES[i % 3]}",
            module=f"layers.{i // 3}",
            role=ROLES[i % 3],
            largest=448.0,
            numel=1000,
        )
        for i in range(3 * LAYERS)
    )
    amax = np.exp(np.random.default_rng(seed).normal(0.0, 0.3, (len(tensors), N)))
    zeros = np.zeros_like(amax)
    unknown = np.full_like(amax, np.nan)
    numel = np.full_like(amax, NUMEL)
    steps = np.arange(1, N + 1)
    return TensorSeries(
        tensors=tensors,
        steps=steps,
        amax=amax,
        scale=448.0 / amax,
        saturated=zeros,
        underflow=zeros,
        nonfinite=zeros,
        numel=numel,
        error=unknown,
    )


def of(table: TensorSeries, *chosen: str) -> list[int]:
    return [i for i, tensor in enumerate(table.tensors) if any(each in tensor.name for each in chosen)]


def with_counts(
    table: TensorSeries, field: str, tensors: list[int], first: int, share: float
) -> TensorSeries:
    counts = getattr(table, field).copy()
    counts[tensors, first - 1 :] = share * NUMEL
    return replace(table, **{field: counts})


def look(
    table: TensorSeries,
    recipe: Mapping[str, Any] = CURRENT,
    reference: TensorSeries | None = None,
    training: Training = CALM,
) -> Finding:
    return examine(table, recipe, reference, training)


def test_a_working_recipe_is_clear() -> None:
    assert look(rows()).outcome == "clear"
    assert look(rows(), reference=rows(1)).outcome == "clear"


def test_without_scales_nothing_is_known() -> None:
    table = rows()
    assert look(replace(table, scale=np.full_like(table.scale, np.nan))).outcome == "unknown"


def test_names_what_is_frozen_and_which_began_first() -> None:
    table = rows()
    scale = table.scale.copy()
    for place, i in enumerate(of(table, "grad_output")):
        scale[i, 60 + place :] = scale[i, 60 + place]
    finding = look(replace(table, scale=scale))
    assert (finding.cause, finding.onset) == ("frozen_scale", 61)
    assert finding.tensors[0] == "layers.0.grad_output" and "5 grad_output tensors of 15" in finding.sentence


def test_one_frozen_layer_is_one_bad_layer() -> None:
    table = rows()
    scale = table.scale.copy()
    for i in of(table, "layers.2."):
        scale[i, 60:] = scale[i, 60]
    finding = look(replace(table, scale=scale))
    assert finding.cause == "bad_layer" and "layers.2" in finding.sentence and "frozen" in finding.sentence


def test_another_margin_than_the_recipe_says() -> None:
    table = rows()
    finding = look(replace(table, scale=table.scale * 8.0))
    assert finding.cause == "margin" and "effectively -3" in finding.sentence
    scale = table.scale.copy()
    scale[of(table, "grad_output")] /= 2.0**14
    finding = look(replace(table, scale=scale))
    assert finding.cause == "underflow" and "2^14 times too small" in finding.sentence


def test_a_configured_margin_that_saturates() -> None:
    table = rows()
    table = with_counts(replace(table, scale=table.scale * 4.0), "saturated", list(range(15)), 1, 0.02)
    finding = look(table, {"recipe": "CurrentScaling", "margin": -2})
    assert finding.cause == "margin" and "(-2)" in finding.sentence


def test_harmless_saturation_is_no_cause_unless_the_run_is_worse() -> None:
    table = with_counts(rows(), "saturated", of(rows(), "input"), 50, 0.004)
    finding = look(table)
    assert finding.outcome == "clear" and "Up to 0.4% of the elements of 5 input tensors" in finding.sentence
    worse = Training(norm_bits=np.zeros(0), norm_steps=np.zeros(0, np.int64), is_worse=True)
    finding = look(table, training=worse)
    assert (finding.cause, finding.onset) == ("margin", 50)


def test_a_layer_that_a_step_calls_repeatedly_has_no_stale_scale() -> None:
    # As the discriminator of a GAN: a row has the largest amax of three calls and the scale of the last.
    table = rows()
    scale, numel = table.scale.copy(), table.numel.copy()
    often = of(table, "layers.0.")
    scale[often] *= np.exp(np.random.default_rng(1).uniform(0.0, 1.0, (len(often), N)))
    assert look(replace(table, scale=scale)).cause
    numel[often] *= 3.0
    assert look(replace(table, scale=scale, numel=numel)).outcome == "clear"


def test_gradients_that_become_zero() -> None:
    gradients = of(rows(), "grad_output")
    finding = look(with_counts(rows(), "underflow", gradients, 40, 0.9))
    assert (finding.cause, finding.onset) == ("underflow", 40) and "5 of 5" in finding.sentence
    # The head's alone may: its probabilities are tiny.
    assert look(with_counts(rows(), "underflow", gradients[-1:], 40, 0.9)).outcome == "clear"


def test_a_loss_scale_is_one_factor_on_all_gradients() -> None:
    table = rows()
    amax = table.amax.copy()
    amax[of(table, "grad_output"), 69:] *= 2.0**12
    scaled = replace(table, amax=amax, scale=448.0 / amax)
    for reference in (rows(), None):
        factor = common_factor(scaled, reference)
        assert factor is not None and factor.bits == pytest.approx(12.0, abs=0.6)
        assert factor.onset == 70 and factor.jumps
        finding = look(scaled, reference=reference)
        assert (finding.cause, finding.onset) == (
            "loss_scale",
            70,
        ) and "2^12 times larger" in finding.sentence
    # A factor on all tensors is another training, not a loss scale.
    assert common_factor(replace(table, amax=table.amax * 2.0**12), rows()) is None


def test_a_layer_whose_weight_jumps_divides_the_gradients_of_all_others() -> None:
    """A weight of 256 times was 'the loss scale is wrong: all gradients are 2^5 times smaller'."""
    table = rows()
    amax = table.amax.copy()
    amax[of(table, "grad_output"), 69:] /= 2.0**5
    (weight,) = (i for i in of(table, "layers.2.") if table.tensors[i].role == "weight")
    amax[weight, 69:] *= 2.0**8
    spoilt = replace(table, amax=amax, scale=448.0 / amax)
    for reference in (rows(), None):
        assert common_factor(spoilt, reference) is None
        assert look(spoilt, reference=reference).cause != "loss_scale"


def test_a_constant_loss_scale_is_a_cause_only_if_it_does_harm() -> None:
    table = rows()
    amax = table.amax.copy()
    amax[of(table, "grad_output")] *= 2.0**16
    scaled = replace(table, amax=amax, scale=448.0 / amax)
    finding = look(scaled, reference=rows())
    assert finding.outcome == "clear" and "does no harm" in finding.sentence
    norms = Training(norm_bits=np.full(N, 16.0), norm_steps=np.arange(1, N + 1))
    assert look(scaled, reference=rows(), training=norms).cause == "loss_scale"


def test_a_layer_with_other_weights_than_bf16() -> None:
    table = rows()
    amax = table.amax.copy()
    amax[of(table, "layers.3.weight"), 39:] *= 32.0
    finding = look(replace(table, amax=amax, scale=448.0 / amax), reference=rows())
    assert finding.cause == "bad_layer" and "layers.3" in finding.sentence and finding.onset == 40


def test_a_layer_with_a_large_error() -> None:
    table = rows()
    error = table.error.copy()
    error[:, [0, 50, 100]] = 1e-3
    error[of(table, "layers.1.input"), 50:] = 0.4
    finding = look(replace(table, error=error), {"recipe": "RowwiseScaling"})
    assert finding.cause == "bad_layer" and "layers.1" in finding.sentence and finding.onset == 51


def test_onsets_have_intervals_and_an_order() -> None:
    chance = np.random.default_rng(3)
    table = rows()
    counts = table.saturated.copy()
    counts[0] = chance.poisson(np.where(np.arange(N) < 80, 0.02, 40.0))
    counts[3] = chance.poisson(np.where(np.arange(N) < 60, 0.02, 40.0))
    first, second = saturating(replace(table, saturated=counts))
    assert (first.tensor, second.tensor) == (3, 0)
    assert first.after < 61 <= first.high and second.after < 81 <= second.high
    assert flushing(table) == []


def test_a_missing_tensor_is_no_fault() -> None:
    table = rows()
    amax, scale, numel = table.amax.copy(), table.scale.copy(), table.numel.copy()
    amax[4], scale[4], numel[4] = np.nan, np.nan, np.nan
    assert look(replace(table, amax=amax, scale=scale, numel=numel), reference=rows()).outcome == "clear"
