"""What-if from a histogram, compared with casting the tensor itself by the kernels' reference."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import fp8scope_kernels
from fp8scope_dashboard.analysis.what_if import tensor_scaling
from fp8scope_dashboard.analysis.what_if.block_scaling import Blocks, ScaleRule, block_effect
from fp8scope_dashboard.analysis.what_if.distribution import Distribution, Effect
from fp8scope_dashboard.analysis.what_if.formats import FORMATS, NumberFormat, format_named
from fp8scope_dashboard.analysis.what_if.tensor_scaling import scale_from_amax, tensor_effect
from fp8scope_kernels import reference
from fp8scope_kernels.formats import DATA_FORMATS
from fp8scope_kernels.optimizer_storage import FP16
from fp8scope_kernels.sampling import exponent_histogram

ROWS, COLUMNS = 32, 256
KINDS = ("normal", "bfloat16", "heavy", "outliers", "zeros", "nonfinite", "wide", "powers")


def tensor(kind: str, seed: int = 0) -> Tensor:
    """A float32 matrix of a kind that training has, or that is hard to describe by exponents."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, COLUMNS, generator=generator)
    if kind == "bfloat16":
        return x.bfloat16().float() * 3e-4
    if kind == "heavy":
        return x / torch.rand(ROWS, COLUMNS, generator=generator)
    if kind == "outliers":
        x[:, ::64] *= 3000.0
    elif kind == "zeros":
        x[x < 0.3] = 0.0
    elif kind == "nonfinite":
        x[::7, ::5] = torch.nan
        x[3, :9] = -torch.inf
    elif kind == "wide":
        x *= torch.exp2(12.0 * torch.randn(ROWS, COLUMNS, generator=generator))
    elif kind == "powers":
        x = torch.exp2(torch.randint(-30, 12, (ROWS, COLUMNS), generator=generator).float()) * x.sign()
    return x


def described(x: Tensor) -> Distribution:
    """What the agent sends of a tensor: its exponents and its amax."""
    finite = x[torch.isfinite(x)].abs()
    amax = np.array([float(finite.max())])
    return Distribution.of(exponent_histogram(x).numpy()[None], amax)


class Truth(NamedTuple):
    """Counts and the error of a cast."""

    saturated: float
    flushed: float
    error: float


def cast(x: Tensor, scale: Tensor, format: fp8scope_kernels.Format) -> Truth:
    """Multiply, clamp, round and count as the kernels do; `scale` broadcasts."""
    scaled = x * scale
    q = reference.round_to_format(scaled.clamp(-format.max, format.max), format)
    saturated, flushed, _ = reference.count_elements(x, scaled, q, format).tolist()
    wide, finite = x.double(), torch.isfinite(x)
    noise = (q.double() / scale.double() - wide)[finite].square().sum()
    return Truth(saturated, flushed, float(noise / wide[finite].square().sum()))


def contains(effect: Effect, truth: Truth, numel: float) -> None:
    for bounds, value in (
        (effect.saturated, truth.saturated / numel),
        (effect.flushed, truth.flushed / numel),
        (effect.error, truth.error),
    ):
        assert bounds.low[0] <= value * (1 + 1e-9) and value <= bounds.high[0] * (1 + 1e-9)
        assert bounds.low[0] <= bounds.estimate[0] <= bounds.high[0]


@pytest.mark.parametrize("name", DATA_FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_powers_of_two_are_exact_but_for_the_two_bins_that_a_limit_splits(kind: str, name: str) -> None:
    x, format = tensor(kind), DATA_FORMATS[name]
    known = described(x)
    for power in range(-24, 25, 3):
        scale = np.array([2.0**power])
        truth = cast(x, torch.tensor(2.0**power), format)
        effect = tensor_effect(known, FORMATS[name.lower()], scale)
        contains(effect, truth, x.numel())
        # Only the bin with M, and exact ties at half of the smallest subnormal, are not determined.
        exponents = known.first + np.arange(known.counts.shape[1])
        with_limit = known.counts[0, exponents + power == format.max_exponent].sum()
        ties = known.counts[0, exponents + power == np.log2(format.smallest_subnormal) - 1].sum()
        assert (effect.saturated.high - effect.saturated.low)[0] * x.numel() <= with_limit + 1e-6
        assert (effect.flushed.high - effect.flushed.low)[0] * x.numel() <= ties + 1e-6
        if kind in ("normal", "heavy", "wide"):
            # These have no element that is a power of two.
            assert effect.flushed.low[0] * x.numel() == pytest.approx(truth.flushed, abs=1e-6)


@pytest.mark.parametrize("name", DATA_FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_bounds_hold_for_other_scales(kind: str, name: str) -> None:
    x, format = tensor(kind, 1), DATA_FORMATS[name]
    known = described(x)
    for scale in np.exp(np.random.default_rng(0).uniform(-12.0, 12.0, 12)):
        truth = cast(x, torch.tensor(scale, dtype=torch.float32), format)
        contains(tensor_effect(known, FORMATS[name.lower()], np.array([scale])), truth, x.numel())


@pytest.mark.parametrize("name", DATA_FORMATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("margin", [0, 3])
def test_a_scale_from_its_own_amax_never_saturates(kind: str, name: str, margin: int) -> None:
    x, format, mine = tensor(kind, 2), DATA_FORMATS[name], FORMATS[name.lower()]
    known = described(x)
    scale = scale_from_amax(known.amax, mine, margin)
    top = format.max * 2.0**-margin
    assert float(reference.amax_to_scale(torch.tensor(known.amax[0]).float(), top)) == scale[0]
    effect = tensor_effect(known, mine, scale)
    truth = cast(x, torch.tensor(scale[0], dtype=torch.float32), format)
    assert truth.saturated == effect.saturated.high[0] == 0
    contains(effect, truth, x.numel())
    # The estimate is of elements that are spread evenly between powers of two, not of a few large ones.
    if kind not in ("powers", "heavy", "wide"):
        assert effect.error.estimate[0] == pytest.approx(truth.error, rel=0.35)


@pytest.mark.parametrize("name", ["E4M3", "E2M1"])
@pytest.mark.parametrize("kind", ["normal", "outliers", "nonfinite", "wide"])
@pytest.mark.parametrize("rule", ["amax", "e8m0", "e8m0_floor", "e4m3"])
@pytest.mark.parametrize("order", ["as it is", "sorted", "spread"])
def test_bounds_of_blocks_hold_for_every_arrangement(
    name: str, kind: str, rule: ScaleRule, order: str
) -> None:
    x, format = arranged(tensor(kind, 3), order), DATA_FORMATS[name]
    known = described(x)
    for block in (16, 32, COLUMNS):
        truth = cast(x, block_scales(x, format, rule, block), format)
        blocks = Blocks(np.array([float(block)]), np.array([x.numel() / block]))
        contains(block_effect(known, FORMATS[name.lower()], rule, blocks), truth, x.numel())


@pytest.mark.parametrize("name", ["E4M3", "E2M1"])
@pytest.mark.parametrize("rule", ["amax", "e8m0", "e8m0_floor", "e4m3"])
def test_the_estimate_is_that_of_a_random_arrangement(name: str, rule: ScaleRule) -> None:
    format = DATA_FORMATS[name]
    for kind, block in (("heavy", 16), ("normal", 16), ("normal", 128)):
        x = tensor(kind, 4)
        truth = cast(x, block_scales(x, format, rule, block), format)
        blocks = Blocks(np.array([float(block)]), np.array([x.numel() / block]))
        effect = block_effect(described(x), FORMATS[name.lower()], rule, blocks)
        assert effect.flushed.estimate[0] * x.numel() == pytest.approx(truth.flushed, rel=0.25, abs=60)
        # A few elements decide the error of a heavy-tailed tensor.
        if kind == "normal":
            assert effect.error.estimate[0] == pytest.approx(truth.error, rel=0.35)


def arranged(x: Tensor, order: str) -> Tensor:
    """The same elements: as they are, sorted by size, or with the largest far from each other."""
    if order == "as it is":
        return x
    flat = x.flatten()[torch.argsort(x.nan_to_num(0.0, 0.0, 0.0).abs().flatten())]
    return (flat.reshape(COLUMNS, ROWS).T if order == "spread" else flat.reshape(ROWS, COLUMNS)).contiguous()


def block_scales(x: Tensor, format: fp8scope_kernels.Format, rule: ScaleRule, block: int) -> Tensor:
    """The multiplier of each element."""
    finite = x.nan_to_num(0.0, 0.0, 0.0).abs()
    amax = finite.reshape(ROWS, -1, block).amax(-1)
    if rule == "amax":
        scale = reference.amax_to_scale(amax, format.max)
    elif rule == "e4m3":
        # NVFP4: amax / M as E4M3, relative to the scale with which the largest of these is 448.
        whole = finite.max() / (448.0 * format.max)
        stored = (amax / format.max / whole).to(torch.float8_e4m3fn).float()
        scale = torch.where(stored > 0, 1.0 / (stored * whole), 0.0)
        scale = torch.where(torch.isfinite(scale), scale, 0.0)
    else:
        scale = reference.amax_to_mx_scale(amax, format, "up" if rule == "e8m0" else "floor")
    # A block without a scale becomes zero; a tiny scale does the same, and can be divided by.
    return scale.clamp(min=2.0**-120).repeat_interleave(block, dim=1)


def test_the_formats_are_those_of_the_kernels() -> None:
    fields = ("max_exponent", "smallest_normal", "smallest_subnormal", "limit")
    for theirs in (*DATA_FORMATS.values(), FP16):
        mine = FORMATS[theirs.name.lower()]
        assert mine.largest == theirs.max
        assert [getattr(mine, field) for field in fields] == [getattr(theirs, field) for field in fields]
    assert format_named("e4m3fn") == format_named("E4M3") and format_named("BF16") is None


def test_without_an_amax_the_top_bin_is_in_doubt() -> None:
    histogram = exponent_histogram(torch.full((100,), 1.5)).numpy()[None]
    e4m3: NumberFormat = FORMATS["e4m3"]
    known, unknown = (Distribution.of(histogram, amax) for amax in (np.array([1.5]), None))
    scale = np.array([256.0])
    assert tensor_scaling.saturated(known, e4m3, scale).high[0] == 0
    bounds = tensor_scaling.saturated(unknown, e4m3, scale)
    assert (bounds.low[0], bounds.high[0]) == (0, 100)
    # An amax that contradicts the histogram belongs to other data.
    assert np.isnan(Distribution.of(histogram, np.array([7.0])).amax[0])
