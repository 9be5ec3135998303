"""Shares and advice for every margin, compared with what_if one scale at a time, and with casts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dashboard.helpers.exponents import histogram_of

from fp8scope_dashboard.analysis.what_if.distribution import Distribution
from fp8scope_dashboard.analysis.what_if.formats import E4M3, E5M2, FORMATS
from fp8scope_dashboard.analysis.what_if.margins import (
    MARGINS,
    Current,
    advise,
    base_scale,
    outcomes_of_margins,
    outcomes_of_parts,
    outcomes_of_scales,
)
from fp8scope_dashboard.analysis.what_if.readiness import judge
from fp8scope_dashboard.analysis.what_if.targets import Tensors, effect_of, make_target
from fp8scope_dashboard.analysis.what_if.tensor_scaling import scale_from_amax
from fp8scope_kernels import reference
from fp8scope_kernels.formats import DATA_FORMATS

KINDS = ("normal", "tiny", "wide", "outlier", "powers", "sparse")


def values(kind: str, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    chance = np.random.default_rng(seed)
    x = chance.normal(size=8_192)
    if kind == "tiny":
        x *= 1e-20
    elif kind == "wide":
        x *= np.exp2(8.0 * chance.normal(size=x.size))
    elif kind == "outlier":
        x[0] = 5_000.0
    elif kind == "powers":
        x = np.exp2(chance.integers(-30, 10, x.size).astype(float))
    elif kind == "sparse":
        x[chance.random(x.size) < 0.9] = 0.0
    return x.astype(np.float32).astype(np.float64)


def tensors(kind: str, role: str = "input") -> Tensors:
    x = values(kind)
    distribution = Distribution.of(histogram_of(x)[None], np.array([np.abs(x).max()]))
    return Tensors([f"a.{role}"], [role], distribution, np.array([64.0]), np.array([np.nan]))


def test_it_works() -> None:
    tensor = tensors("normal")
    base = float(scale_from_amax(tensor.distribution.amax, E4M3, 0)[0])
    outcomes = outcomes_of_margins(tensor, E4M3, base)
    at = list(MARGINS).index(0)
    assert outcomes.saturated.high[at] == 0 < outcomes.saturated.low[at - 3]
    assert (np.diff(outcomes.saturated.estimate) <= 0).all(), "more head room, less saturation"
    assert (np.diff(outcomes.flushed.estimate) >= 0).all(), "and more flushes"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list(FORMATS))
def test_equals_what_if_one_margin_at_a_time(kind: str, name: str) -> None:
    tensor, format = tensors(kind), FORMATS[name]
    base = base_scale(tensor, format, None)
    outcomes = outcomes_of_margins(tensor, format, base)
    for i, margin in enumerate(MARGINS):
        if name in ("e3m2", "e2m3", "e2m1", "e4m3", "e5m2"):
            one = effect_of(tensor, make_target(name, "fixed", repr(base * 2.0**-margin)))
            for ours, theirs in (
                (outcomes.saturated, one.saturated),
                (outcomes.flushed, one.flushed),
                (outcomes.error, one.error),
            ):
                for part in ("low", "estimate", "high"):
                    np.testing.assert_allclose(
                        getattr(ours, part)[i], getattr(theirs, part)[0], rtol=1e-12, atol=0
                    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DATA_FORMATS)
def test_shares_equal_those_of_a_cast(kind: str, name: str) -> None:
    x = values(kind)
    tensor, format, kernel = tensors(kind), FORMATS[name.lower()], DATA_FORMATS[name]
    base = 2.0 ** np.floor(np.log2(base_scale(tensor, format, None)))
    outcomes = outcomes_of_margins(tensor, format, base)
    flat = torch.from_numpy(x).float()
    for i in range(0, len(MARGINS), 4):
        scale = base * 2.0 ** -MARGINS[i]
        scaled = flat * scale
        q = reference.round_to_format(scaled.clamp(-kernel.max, kernel.max), kernel)
        counted = reference.count_elements(flat, scaled, q, kernel) / x.size
        counts = dict(zip(("saturated", "underflow", "subnormal"), counted.tolist(), strict=True))
        saturated, flushed = outcomes.saturated, outcomes.flushed
        assert saturated.low[i] <= counts["saturated"] + 1e-12
        assert counts["saturated"] <= saturated.high[i] + 1e-12
        assert flushed.low[i] <= counts["underflow"] + 1e-12
        assert counts["underflow"] <= flushed.high[i] + 1e-12
        # An estimate: only the elements of the two bins that its limits split are uncertain.
        limit = (format.smallest_normal - format.flushed) / scale
        known = tensor.distribution
        split = known.counts[0, (known.lower < limit) & (2.0 * known.lower > limit)].sum() / x.size
        assert outcomes.subnormal[i] == pytest.approx(
            counts["subnormal"], abs=split + flushed.high[i] - flushed.low[i] + 1e-9
        )


def test_a_scale_of_today_is_exactly_itself() -> None:
    tensor = tensors("normal")
    current = Current(E4M3, 117.3, margin=1)
    base = base_scale(tensor, E4M3, current)
    now = outcomes_of_scales(tensor, E4M3, [117.3])
    outcomes = outcomes_of_margins(tensor, E4M3, base)
    at = list(MARGINS).index(1)
    assert outcomes.scales[at] == now.scales[0]
    assert outcomes.saturated.estimate[at] == now.saturated.estimate[0]


def test_another_format_begins_at_the_same_amax() -> None:
    tensor = tensors("normal")
    current = Current(E4M3, 100.0)
    assert base_scale(tensor, E5M2, current) == 100.0 * 57_344 / 448


def advice_of(kind: str, scale: float, *, format: str = "e4m3", margin: int = 0) -> tuple[int, bool, str]:
    tensor = tensors(kind)
    target = make_target(format)
    current = Current(E4M3, scale, margin)
    advice = advise(tensor, target, base_scale(tensor, target.format.of("input"), current), current)
    return advice.margin, advice.is_enough, advice.text


def test_a_scale_that_fits_needs_no_change() -> None:
    margin, enough, text = advice_of("normal", 64.0)
    assert (margin, enough) == (0, True)
    assert text == "No change needed: with margin 0, saturation 0 %, flush to zero 0 %."


def test_a_scale_that_is_too_large_needs_head_room() -> None:
    margin, enough, text = advice_of("normal", 64.0 * 16)
    assert enough and margin == 4
    assert text.startswith("Margin 4: saturation ") and " → 0 %, flush to zero " in text


def test_the_advice_passes_the_rule_and_no_nearer_margin_does() -> None:
    for kind in ("normal", "tiny", "sparse"):
        tensor = tensors(kind)
        fitting = float(scale_from_amax(tensor.distribution.amax, E4M3, 0)[0])
        for shift in (-6, -3, 0, 3, 5):
            current = Current(E4M3, fitting * 2.0**shift)
            advice = advise(tensor, make_target("e4m3"), base_scale(tensor, E4M3, current), current)
            assert advice.is_enough
            verdicts = {
                margin: judge(tensor, make_target("e4m3", "fixed", repr(current.scale * 2.0**-margin)))
                .tensors[0]
                .verdict
                for margin in range(-abs(advice.margin), abs(advice.margin) + 1)
            }
            assert verdicts[advice.margin] == "ready"
            assert all(
                verdict != "ready" for margin, verdict in verdicts.items() if abs(margin) < abs(advice.margin)
            )


def test_says_when_no_margin_is_enough() -> None:
    _, enough, text = advice_of("wide", 1.0)
    assert not enough and text.startswith("No margin is enough in E4M3; at best margin ")
    assert text.endswith(".") and "BF16" in text or "is enough." in text


def test_a_tensor_without_a_scale_gets_the_shares_only() -> None:
    tensor = tensors("normal")
    advice = advise(tensor, make_target("e4m3"), base_scale(tensor, E4M3, None), None)
    assert advice.text == "Margin 0: 0 % of the elements saturate, 0 % flush to zero."


def test_parts_have_no_margin() -> None:
    outcomes = outcomes_of_parts(tensors("wide"), make_target("e4m3", "block", block=32))
    assert np.isnan(outcomes.scales).all() and np.isnan(outcomes.subnormal).all()
    assert 0 <= outcomes.flushed.estimate[0] <= 1


def test_a_tensor_of_zeros_is_advised_without_error() -> None:
    distribution = Distribution.of(histogram_of(np.zeros(100))[None], np.array([0.0]))
    zeros = Tensors(["a.input"], ["input"], distribution, np.array([10.0]), np.array([np.nan]))
    advice = advise(zeros, make_target("e4m3"), base_scale(zeros, E4M3, None), None)
    assert advice.is_enough and advice.margin == 0
