"""Targets: a format with the way its scales are chosen, and the effect of one on many tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.what_if.block_scaling import Blocks, ScaleRule, block_effect
from fp8scope_dashboard.analysis.what_if.distribution import Bounds, Distribution, Effect
from fp8scope_dashboard.analysis.what_if.formats import E2M1, E2M3, E3M2, E4M3, E5M2, NumberFormat
from fp8scope_dashboard.analysis.what_if.tensor_scaling import (
    MAX_SCALE,
    MIN_SCALE,
    scale_from_amax,
    tensor_effect,
)
from fp8scope_dashboard.statistics.arrays import Floats

Scaling = Literal["current", "delayed", "fixed", "row", "block"]
SCALINGS: Final = get_args(Scaling)
MAX_MARGIN: Final = 64
MAX_BLOCK: Final = 2**20


@dataclass(frozen=True, kw_only=True)
class TargetFormat:
    """A choice of formats: one for gradients and one for other tensors, and the scales that belong to them.

    `rule` and `block` are set for formats that define their block scales themselves.
    """

    name: str
    title: str
    forward: NumberFormat
    backward: NumberFormat
    rule: ScaleRule = "amax"
    block: int = 0

    def of(self, role: str) -> NumberFormat:
        return self.backward if role == "grad_output" else self.forward


TARGET_FORMATS: Final[Mapping[str, TargetFormat]] = {
    target.name: target
    for target in (
        TargetFormat(name="hybrid", title="FP8 (E4M3, gradients E5M2)", forward=E4M3, backward=E5M2),
        TargetFormat(name="e4m3", title="FP8 E4M3", forward=E4M3, backward=E4M3),
        TargetFormat(name="e5m2", title="FP8 E5M2", forward=E5M2, backward=E5M2),
        TargetFormat(
            name="mxfp8",
            title="MXFP8 (E4M3, blocks of 32)",
            forward=E4M3,
            backward=E4M3,
            rule="e8m0",
            block=32,
        ),
        TargetFormat(name="e3m2", title="FP6 E3M2", forward=E3M2, backward=E3M2),
        TargetFormat(name="e2m3", title="FP6 E2M3", forward=E2M3, backward=E2M3),
        TargetFormat(
            name="mxfp6",
            title="MXFP6 (E3M2, blocks of 32)",
            forward=E3M2,
            backward=E3M2,
            rule="e8m0",
            block=32,
        ),
        TargetFormat(name="e2m1", title="FP4 E2M1", forward=E2M1, backward=E2M1),
        TargetFormat(
            name="mxfp4",
            title="MXFP4 (E2M1, blocks of 32)",
            forward=E2M1,
            backward=E2M1,
            rule="e8m0",
            block=32,
        ),
        TargetFormat(
            name="nvfp4",
            title="NVFP4 (E2M1, blocks of 16)",
            forward=E2M1,
            backward=E2M1,
            rule="e4m3",
            block=16,
        ),
    )
}


@dataclass(frozen=True)
class Target:
    """A format and how its scales are chosen.

    Attributes:
        format: one of TARGET_FORMATS; those with block scales of their own ignore `scaling`.
        scaling: `current` takes s from the tensor's amax in the same step, `delayed` from `past_amax`,
            `fixed` takes `scale`; `row` and `block` have a scale for each row and for each `block` elements
            along it.
        margin: head room in powers of two; for `fixed`, the scale is divided by 2^margin as well.
        block: elements that share a scale; 0 is the format's own number, or 128.
    """

    format: TargetFormat
    scaling: Scaling = "current"
    scale: float = 1.0
    margin: int = 0
    block: int = 0

    @property
    def is_block_format(self) -> bool:
        return self.format.block > 0

    @property
    def block_size(self) -> int:
        """Elements of a block along a row; 0 where a whole row or tensor has one scale."""
        if self.is_block_format or self.scaling == "block":
            return self.block or self.format.block or 128
        return 0

    @property
    def per_tensor(self) -> bool:
        return not self.is_block_format and self.scaling in ("current", "delayed", "fixed")

    @property
    def title(self) -> str:
        """Return how the scales are chosen, in words."""
        if self.is_block_format or self.scaling == "block":
            return f"a scale for each {self.block_size} elements"
        return {
            "current": "per-tensor scaling",
            "delayed": "delayed per-tensor scaling",
            "fixed": f"the scale {self.scale:g} for every tensor",
            "row": "a scale for each row",
        }[self.scaling]


@dataclass(frozen=True)
class Tensors:
    """The facts about T tensors in one step.

    Attributes:
        names, roles: of the T tensors.
        distribution: their exponents.
        columns: float64[T], elements along the dimension that products sum over; 0 if unknown.
        past_amax: float64[T], the largest amax of the steps before; NaN if there is none.
    """

    names: Sequence[str]
    roles: Sequence[str]
    distribution: Distribution
    columns: Floats
    past_amax: Floats

    def __len__(self) -> int:
        return len(self.names)

    def take(self, indices: NDArray[np.intp]) -> Tensors:
        """Some of the tensors."""
        return Tensors(
            [self.names[i] for i in indices],
            [self.roles[i] for i in indices],
            self.distribution.take(indices),
            self.columns[indices],
            self.past_amax[indices],
        )


def effect_of(tensors: Tensors, target: Target) -> Effect:
    """The effect of a target on all tensors."""
    backward = np.array([role == "grad_output" for role in tensors.roles], bool)
    if target.format.forward is target.format.backward or not backward.any():
        return _effect(tensors, target.format.forward, target)
    if backward.all():
        return _effect(tensors, target.format.backward, target)
    parts = [
        (indices, _effect(tensors.take(indices), format, target))
        for indices, format in (
            (np.flatnonzero(~backward), target.format.forward),
            (np.flatnonzero(backward), target.format.backward),
        )
    ]
    return _together(parts, len(tensors))


def finer(target: Target) -> list[Target]:
    """The same format with smaller parts that share a scale, coarsest first."""
    if target.is_block_format:
        smaller = [size for size in (32, 16) if size < target.block_size]
        return [replace(target, block=size) for size in smaller]
    rows = [replace(target, scaling="row")] if target.per_tensor else []
    limit = target.block_size or 2 * 128
    blocks = [replace(target, scaling="block", block=size) for size in (128, 32, 16) if size < limit]
    return [*rows, *blocks]


def layout(tensors: Tensors, size: int) -> Blocks:
    """Blocks of `size` elements along each row; 0 is the whole row. Without known rows, of the tensor."""
    numel = np.maximum(tensors.distribution.numel, 1.0)
    columns = np.where(tensors.columns > 0, np.minimum(tensors.columns, numel), numel)
    width = np.minimum(columns, float(size)) if size else columns
    return Blocks(width, np.ceil(numel / columns) * np.ceil(columns / width))


def _effect(tensors: Tensors, format: NumberFormat, target: Target) -> Effect:
    distribution = tensors.distribution
    if not target.per_tensor:
        blocks = layout(tensors, target.block_size)
        return block_effect(distribution, format, target.format.rule, blocks, target.margin)
    if target.scaling == "fixed":
        scale = np.full(len(tensors), target.scale * 2.0**-target.margin)
    else:
        amax = distribution.amax_bound
        if target.scaling == "delayed":
            amax = np.where(np.isfinite(tensors.past_amax), tensors.past_amax, amax)
        scale = scale_from_amax(amax, format, target.margin)
    return tensor_effect(distribution, format, scale)


def _together(parts: Sequence[tuple[NDArray[np.intp], Effect]], n: int) -> Effect:
    """The effect on n tensors from the effects on some of them each."""

    def merged(of: Callable[[Effect], Floats]) -> Floats:
        values = np.full(n, np.nan)
        for indices, effect in parts:
            values[indices] = of(effect)
        return values

    def bounds(of: Callable[[Effect], Bounds]) -> Bounds:
        return Bounds(
            merged(lambda effect: of(effect).low),
            merged(lambda effect: of(effect).estimate),
            merged(lambda effect: of(effect).high),
        )

    return Effect(
        bounds(lambda effect: effect.saturated),
        bounds(lambda effect: effect.flushed),
        bounds(lambda effect: effect.error),
        merged(lambda effect: effect.floor),
        merged(lambda effect: effect.scale),
    )


def make_target(
    format: str = "hybrid", scaling: str = "current", scale: str = "1", margin: int = 0, block: int = 0
) -> Target:
    """A target from what a person or client wrote; `scale` is a number, or a power of two such as `2^-5`.

    Raises:
        ValueError: an argument is unknown or out of range; the message says what is allowed.
    """
    if format not in TARGET_FORMATS:
        raise ValueError(f"format must be one of {', '.join(TARGET_FORMATS)}.")
    if scaling not in SCALINGS:
        raise ValueError(f"scaling must be one of {', '.join(SCALINGS)}.")
    if abs(margin) > MAX_MARGIN:
        raise ValueError(f"margin must be a whole number from {-MAX_MARGIN} to {MAX_MARGIN}.")
    if not 0 <= block <= MAX_BLOCK:
        raise ValueError(
            f"block must be a whole number from 0 to {MAX_BLOCK}; 0 is the default of the format."
        )
    return Target(TARGET_FORMATS[format], cast("Scaling", scaling), parse_scale(scale), margin, block)


def parse_scale(text: str) -> float:
    """The scale that a text describes: a positive float32, as a number or as `2^k`.

    Raises:
        ValueError: it is neither.
    """
    base, power, exponent = text.strip()[:64].partition("^")
    try:
        scale = 2.0 ** int(exponent) if power and float(base) == 2.0 else float(base) if not power else 0.0
    except (ValueError, OverflowError):
        scale = 0.0
    if not MIN_SCALE <= scale <= MAX_SCALE:
        raise ValueError("scale must be a positive number, such as 448 or 2^-5, that float32 can hold.")
    return scale
