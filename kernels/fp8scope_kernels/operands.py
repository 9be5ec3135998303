"""Quantises the three matrices of a linear layer, each with the scale, or scales, of its recipe."""

from typing import Literal

from torch import Tensor

from fp8scope_kernels import backends
from fp8scope_kernels.matmul import (
    Operand,
    can_multiply,
    to_block_operand,
    to_operand,
    to_operands_in_one_pass,
    without_bytes,
)
from fp8scope_kernels.quantization import measure_now
from fp8scope_kernels.random_stream import Draw, RandomStream
from fp8scope_kernels.recipes import Recipe, Role
from fp8scope_kernels.reference import Extent
from fp8scope_kernels.sampling import accumulate_sample
from fp8scope_kernels.scaling_state import ScalingState
from fp8scope_kernels.statistics import Slot
from fp8scope_kernels.triton.backend import ChosenScale
from fp8scope_kernels.unit_products import granularity_of, has_fp8_units, log_once, reason_for_size


def quantize_matrix(
    recipe: Recipe,
    role: Role,
    state: ScalingState,
    x: Tensor,
    slot: Slot | None = None,
    *,
    update: bool = False,
    transpose: bool = False,
    stream: RandomStream | None = None,
) -> tuple[Operand, Operand]:
    """Quantise one of a layer's three matrices: its operand, and the transpose for its other product.

    With one scale per tensor they are views of each other. Blocks lie along the dimension that a product
    sums over, so that the transpose is quantised separately, and only with `transpose`. Statistics of the
    first operand are added to the rows of `slot`. With `update`, the state advances, and so does the
    `stream`, by which the matrix is rounded at random; without one it is rounded to nearest.
    """
    state.materialize(x.device)
    if stream is not None:
        stream.materialize(x.device)
    row = None if slot is None else slot.row
    grid = recipe.block_of(role)
    if grid is not None:
        block_row = None if slot is None else slot.block_row
        operand = to_block_operand(
            x, state.format, grid, recipe, row, block_row,
            stochastic=_drawn(stream, update), fp8=takes_fp8_operands(recipe, x),
        )  # fmt: skip
        _sample(slot, x, operand)
        if not transpose:
            return operand, operand
        turned_fp8 = takes_fp8_operands(recipe, x.t())
        is_square = grid[0] == grid[1] and stream is None and not recipe.rotates(role)
        if is_square and (operand.is_fp8 or not turned_fp8):
            # Square blocks are the same blocks in the transpose.
            return operand, (operand if turned_fp8 else without_bytes(operand)).t()
        return operand, to_block_operand(
            x.t(), state.format, grid, recipe,
            stochastic=_drawn(stream, update), rotated=recipe.rotates(role),
            fp8=turned_fp8,
        )  # fmt: skip
    operand, turned = _quantize_whole(
        recipe, state, x, row, update=update, transpose=transpose, stochastic=_drawn(stream, update)
    )
    _sample(slot, x, operand)
    return operand, turned


def takes_fp8_operands(recipe: Recipe, x: Tensor) -> bool:
    """Return whether products of this recipe with the operand x [rows, k] run on FP8 units of its device."""
    granularity = granularity_of(recipe)
    if granularity is None or not has_fp8_units(x.device, granularity):
        return False
    forward, backward = (recipe.format_of(role, x.device) for role in ("input", "grad_output"))
    if not (can_multiply(forward, forward) and can_multiply(forward, backward)):
        return False
    reason = reason_for_size(granularity, *x.shape)
    if reason:
        log_once(f"{recipe.kind}, {reason}")
    return not reason


def _quantize_whole(
    recipe: Recipe,
    state: ScalingState,
    x: Tensor,
    row: Tensor | None,
    *,
    update: bool,
    transpose: bool,
    stochastic: Draw | Literal[False],
) -> tuple[Operand, Operand]:
    """`quantize_matrix` with one scale. One pass suffices if it is known first (not in eager torch)."""
    saturate, nonfinite, fp8 = recipe.saturate, recipe.nonfinite, takes_fp8_operands(recipe, x)
    to_nearest = stochastic is False
    fused = to_nearest and (backends.use_triton(x, "quantize") or (saturate and backends.use_compiled(x)))
    (scale, inverse), extent = _choose_scale(recipe, state, x, update=update, fused=fused)
    measuring = extent is None and update
    history = state.history_to_launch() if measuring else None
    passed = None
    if fused:
        passed = to_operands_in_one_pass(
            x, ChosenScale(scale, inverse), state.format, row,
            saturate=saturate, extent=extent, fp8=fp8, measure=measuring, transpose=transpose,
            nonfinite=nonfinite, history=history,
        )  # fmt: skip
    if passed is None:
        history = None
        extent = extent or measure_now(x)
        operand = to_operand(
            x, scale, state.format, row,
            saturate=saturate, extent=extent, fp8=fp8, stochastic=stochastic,
            nonfinite=nonfinite,
        )  # fmt: skip
        passed = operand, operand.t(), extent
    operand, turned, extent = passed
    if measuring and history is not None:
        state.remembered()
    elif measuring and extent is not None:
        state.remember(extent.amax)
    return operand, turned


def _choose_scale(
    recipe: Recipe, state: ScalingState, x: Tensor, *, update: bool, fused: bool
) -> tuple[ChosenScale, Extent | None]:
    """The scale, and the extent of x if it depends on that."""
    past = state.past_scale(update=update) if fused else None
    if past is not None:
        return past, None
    launched = state.measure_and_scale(x, update=update) if fused else None
    if launched is not None:
        return launched
    extent = measure_now(x)
    scale = state.next_scale(extent.amax, update=update)
    return ChosenScale(scale, scale.reciprocal()), extent


def _drawn(stream: RandomStream | None, update: bool) -> Draw | Literal[False]:
    """The next random words; False to round to nearest."""
    return False if stream is None else stream.draw(advance=update)


def _sample(slot: Slot | None, x: Tensor, operand: Operand) -> None:
    sample = None if slot is None else slot.sample_row
    if sample is not None:
        accumulate_sample(sample, x, *without_bytes(operand))
