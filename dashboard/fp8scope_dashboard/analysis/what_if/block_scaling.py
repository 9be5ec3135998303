"""The effect of a format with a scale for each row or block, from the exponents of the whole tensor.

What happens to an element depends on how far it lies below the largest element of its block: on D, the
difference of the two exponents. The histogram of a tensor does not tell which elements share a block, so

* the bounds hold for every arrangement of the elements into blocks. The low bound is 0: if equal values are
  neighbours, nothing is lost. The high bound puts the largest elements into different blocks.
* the estimate is for an arrangement at random: with F(e), the share of elements below 2^(e+1), the other
  B - 1 elements of a block all stay below 2^(e+1) with probability F(e)^(B-1).

Rules for the scales: `amax` takes s = M / amax of the block. `e8m0` takes the largest power of two with
amax * s <= M; `e8m0_floor` the power of two of OCP Microscaling Formats 1.0, section 6.3, with which the
largest elements may saturate. `e4m3` is NVFP4: the scale is rounded to E4M3, relative to one float32 scale
for the tensor, with which the largest block uses E4M3's largest value.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.what_if.distribution import Bounds, Distribution, Effect
from fp8scope_dashboard.analysis.what_if.formats import E4M3, NumberFormat
from fp8scope_dashboard.analysis.what_if.tensor_scaling import floor_error, squared_error
from fp8scope_dashboard.statistics.arrays import Floats

ScaleRule = Literal["amax", "e8m0", "e8m0_floor", "e4m3"]

# Mantissas of an element and of its block's amax at which outcomes are evaluated.
POINTS = 8
# E4M3 rounds a normal number by at most this share of it ...
SCALE_ROUNDING = 1 / 16
# ... and these binades below its largest value are normal numbers.
NORMAL_BINADES = E4M3.max_exponent - E4M3.min_exponent
# More than there are between any two values of float32.
MAX_BINADES = 512


class Blocks(NamedTuple):
    """The division of tensors: elements of a block and number of blocks, float64[T] each."""

    size: Floats
    number: Floats


class BlockOutcomes(NamedTuple):
    """The outcomes of elements D = 0, 1, ... binades below the amax of their block.

    `saturated` and `flushed` are probabilities, `noise` is Σ(x − q/s)² relative to Σx²: float64[D].
    `first_flushed` is the smallest D at which an element can flush; `may_saturate`: whether any can saturate.
    """

    saturated: Floats
    flushed: Floats
    noise: Floats
    first_flushed: int
    may_saturate: bool


def block_effect(
    tensors: Distribution, format: NumberFormat, rule: ScaleRule, blocks: Blocks, margin: int = 0
) -> Effect:
    """The effect of a scale for each block. `margin`, in powers of two, is for the rule `amax` only."""
    table = outcomes(format, rule, margin, tensors.counts.shape[1])
    saturated, flushed, noise = _at_random(tensors, table, blocks, rule == "amax" and margin == 0)
    most_saturated = tensors.nonzero if table.may_saturate else np.zeros(len(tensors))
    most_flushed = _most_flushed(tensors, table.first_flushed, blocks)
    largest_error = _error_bound(format, rule, margin, blocks.size)
    if rule == "e4m3":
        # A block that is small against the tensor may have a subnormal scale, or 0: anything can happen.
        small = _below(tensors, NORMAL_BINADES - 1)
        most_flushed = np.minimum(most_flushed + (tensors.counts * small).sum(axis=1), tensors.nonzero)
        largest_error = largest_error + _energy_share(tensors, small)
    none = np.zeros(len(tensors))
    return Effect(
        Bounds(none, np.minimum(saturated, most_saturated), most_saturated).per(tensors.numel),
        Bounds(none, np.minimum(flushed, most_flushed), most_flushed).per(tensors.numel),
        Bounds(np.where(np.isnan(noise), np.nan, 0.0), noise, np.clip(largest_error, noise, 1.0)),
        floor_error(tensors, format, np.ones(len(tensors))),
        np.full(len(tensors), np.nan),
    )


def outcomes(format: NumberFormat, rule: ScaleRule, margin: int, binades: int) -> BlockOutcomes:
    """The outcomes for D from 0 to `binades` - 1, over mantissas that are spread evenly."""
    mantissas = 1.0 + (np.arange(POINTS) + 0.5) / POINTS
    amax, x, rounding = np.meshgrid(mantissas, mantissas, _scale_errors(rule), indexing="ij")
    unit = _unit(format, rule, margin, amax) / rounding
    saturated, flushed, noise = (np.zeros(binades) for _ in range(3))
    for distance in range(binades):
        # Within the binade of its block's amax, an element is at most as large.
        weight = (x <= amax).astype(np.float64) if distance == 0 else np.ones_like(x)
        y = x * unit * 2.0**-distance
        saturated[distance] = np.average(y > format.limit, weights=weight)
        flushed[distance] = np.average(y <= format.flushed, weights=weight)
        noise[distance] = np.average(squared_error(y, format) / y**2, weights=weight * x**2)
    # An element is smallest against its block if its mantissa is 1 and that of amax is almost 2.
    smallest = float(_unit(format, rule, margin, np.array(2.0 - 2.0**-23))) / max(_scale_bounds(rule))
    first = int(np.argmax(smallest * np.ldexp(1.0, -np.arange(MAX_BINADES)) <= format.flushed))
    return BlockOutcomes(saturated, flushed, noise, first, _peaks(format, rule, margin)[1] > format.limit)


def _unit(format: NumberFormat, rule: ScaleRule, margin: int, amax: Floats) -> Floats:
    """The scaled value of 2^A for a block with amax in [1, 2) * 2^A, before the scale is rounded."""
    power = 2.0**format.max_exponent
    if rule == "e8m0_floor":
        return np.full_like(amax, power)
    if rule == "e8m0":
        return np.where(amax * power <= format.largest, power, power / 2.0)
    return np.asarray(format.largest * 2.0 ** (-margin if rule == "amax" else 0) / amax)


def _peaks(format: NumberFormat, rule: ScaleRule, margin: int) -> tuple[float, float]:
    """The smallest and the largest scaled amax of a block."""
    power, largest = 2.0**format.max_exponent, format.largest * 2.0 ** (-margin if rule == "amax" else 0)
    if rule == "e8m0_floor":
        return power, 2.0 * power
    if rule == "e8m0":
        return largest / 2.0, largest
    smallest_factor, largest_factor = _scale_bounds(rule)
    return largest / largest_factor, largest / smallest_factor


def _scale_errors(rule: ScaleRule) -> Floats:
    """Typical factors by which rounding changes the stored inverse scale."""
    spread = SCALE_ROUNDING / 2 if rule == "e4m3" else 0.0
    return np.array([1.0 - spread, 1.0, 1.0 + spread]) if spread else np.ones(1)


def _scale_bounds(rule: ScaleRule) -> tuple[float, float]:
    """The smallest and the largest of these factors, for a normal scale."""
    return (1.0 - SCALE_ROUNDING, 1.0 + SCALE_ROUNDING) if rule == "e4m3" else (1.0, 1.0)


def _at_random(
    tensors: Distribution, table: BlockOutcomes, blocks: Blocks, peaks_are_exact: bool
) -> tuple[Floats, Floats, Floats]:
    """Expected numbers of saturated and flushed elements and expected error for a random arrangement."""
    lower, upper = tensors.lower, tensors.upper
    energy = tensors.counts * (lower**2 + lower * upper + upper**2) / 3.0
    numel = np.maximum(tensors.numel, 1.0)[:, None]
    below = (tensors.zeros + tensors.nonfinite)[:, None] + np.cumsum(tensors.counts, axis=1)
    stays = np.minimum(below / numel, 1.0) ** np.maximum(blocks.size - 1.0, 0.0)[:, None]
    saturated, flushed, noise = (np.zeros(len(tensors)) for _ in range(3))
    for distance in range(tensors.counts.shape[1]):
        # The probability that the amax of an element's block is `distance` binades above the element.
        chance = stays[:, distance:] - stays[:, distance - 1 : -1] if distance else stays
        here = slice(0, chance.shape[1])
        elements = (tensors.counts[:, here] * chance).sum(axis=1)
        saturated += table.saturated[distance] * elements
        flushed += table.flushed[distance] * elements
        energies = (energy[:, here] * chance).sum(axis=1)
        if distance == 0 and peaks_are_exact:
            # One of these elements in each block is its amax, which becomes M without an error.
            energies *= 1.0 - np.minimum(blocks.number / np.maximum(elements, 1.0), 1.0)
        noise += table.noise[distance] * energies
    signal = energy.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return saturated, flushed, np.where(signal > 0, noise / signal, np.nan)


def _most_flushed(tensors: Distribution, distance: int, blocks: Blocks) -> Floats:
    """The largest number of elements that can be `distance` binades below the amax of their block.

    The largest elements are the amaxes of all blocks. The elements that fit into the fewest blocks, which are
    the largest, are placed first; since every block that takes one also takes all smaller ones, no other
    order places more.
    """
    if distance == 0:
        return tensors.nonzero
    counts, bins = tensors.counts, tensors.counts.shape[1]
    above = np.cumsum(counts[:, ::-1], axis=1)[:, ::-1]
    peaks = np.minimum(above, blocks.number[:, None])
    used = np.zeros(len(tensors))
    for i in range(bins - 1 - distance, -1, -1):
        room = np.maximum(blocks.size * peaks[:, i + distance] - used, 0.0)
        used += np.minimum(counts[:, i], room)
    return used


def _error_bound(format: NumberFormat, rule: ScaleRule, margin: int, size: Floats) -> Floats:
    """A bound of Σ(x − q/s)² / Σx² for every arrangement, float64[T].

    A normal element loses at most 2^-(m+1) of itself. A smaller one loses at most half of the smallest
    subnormal, which is a share k of its block's amax; B * k² of the blocks' energy bounds their sum.
    """
    rounding = 4.0 ** -(format.mantissa_bits + 1)
    smallest_peak, largest_peak = _peaks(format, rule, margin)
    clipped = max(0.0, 1.0 - format.largest / largest_peak) ** 2
    share = format.flushed / smallest_peak
    return np.asarray(max(rounding, clipped) + size * share**2)


def _below(tensors: Distribution, binades: int) -> NDArray[np.bool_]:
    """The bins more than `binades` below the highest bin of each tensor, bool[T, E]."""
    exponents = tensors.first + np.arange(tensors.counts.shape[1])
    return np.asarray(exponents[None, :] < (tensors.top - binades)[:, None])


def _energy_share(tensors: Distribution, bins: NDArray[np.bool_]) -> Floats:
    """A bound of the share of Σx² that is in these bins, float64[T]."""
    energy = tensors.counts * tensors.lower**2
    total = energy.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(total > 0, 4.0 * (energy * bins).sum(axis=1) / total, 0.0)
