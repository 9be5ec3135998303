"""The Triton kernels; backend.py launches them. Import this module only if Triton is installed.

Each program writes its sums to `partials`, int64 [programs, PARTIALS], and one more program adds those up.
There are no atomics, so that results do not depend on the order of programs. Addresses are int64.
"""

import triton
import triton.language as tl

from fp8scope_kernels.triton.elements import (
    block_scale,
    count_nonfinite,
    finite_bits,
    is_saturated,
    load_wide,
    quantized_bits,
    small_counts,
    widened,
)
from fp8scope_kernels.triton.random import bits_at_random, random_words

MAX_PROGRAMS = 2048
"""Programs per launch, each of which loops over tiles. A power of two: one program reads all partials."""
PARTIALS = 6
"""Columns of `partials`: amax as bits, saturated, underflow, subnormal, nonfinite, saturated blocks."""

_INF = tl.constexpr(0x7F800000)
_MAX_PROGRAMS = tl.constexpr(MAX_PROGRAMS)
_PARTIALS = tl.constexpr(PARTIALS)


@triton.jit  # type: ignore[untyped-decorator]
def store_partials(
    partials: tl.tensor,
    amax: tl.tensor,
    saturated: tl.tensor,
    small: tl.tensor,
    nonfinite: tl.tensor,
    saturated_blocks: tl.tensor,
) -> None:
    """Write this program's sums; `small` has underflow in its lower and subnormal in its upper 32 bits."""
    mine = partials + tl.program_id(0) * _PARTIALS
    tl.store(mine, amax.to(tl.int64))
    tl.store(mine + 1, saturated)
    tl.store(mine + 2, small & 0xFFFFFFFF)
    tl.store(mine + 3, small >> 32)
    tl.store(mine + 4, nonfinite)
    tl.store(mine + 5, saturated_blocks)


@triton.jit  # type: ignore[untyped-decorator]
def observe_tiles(
    x: tl.tensor,
    row: tl.tensor,
    row_bits: tl.tensor,
    size: tl.tensor,
    repeat: tl.tensor,
    tiles: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """One pass over `size` elements, each of which counts `repeat` times: numel, amax and nonfinite of a row.

    `row` is float64; `row_bits` is the same memory as int64, in which non-negative numbers have the same
    order. Programs use atomics whose result does not depend on their order: a maximum, and sums of whole
    numbers below 2^53.
    """
    amax = tl.full((), 0, tl.int32)
    nonfinite = tl.full((), 0, tl.int64)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at = tl.full((), tile, tl.int64) * WIDTH + tl.arange(0, WIDTH)
        wide = load_wide(x + at, at < size)
        amax = tl.maximum(amax, tl.max(finite_bits(wide)))
        nonfinite += tl.sum(count_nonfinite(wide)).to(tl.int64)
    largest = amax.to(tl.float32, bitcast=True).to(tl.float64)
    tl.atomic_max(row_bits + 1, largest.to(tl.int64, bitcast=True))
    if nonfinite > 0:
        tl.atomic_add(row + 6, (nonfinite * repeat).to(tl.float64))
    if tl.program_id(0) == 0:
        # The launcher passes a size of 1 as a constant, which is no tensor.
        tl.store(row, tl.load(row) + tl.full((), size, tl.float64) * repeat)
        tl.store(row + 2, 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def quantize_tiles(
    x: tl.tensor,
    scale: tl.tensor,
    q: tl.tensor,
    q_t: tl.tensor,
    partials: tl.tensor,
    statistics: tl.tensor,
    known_amax: tl.tensor,
    known_nonfinite: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    tiles_across: tl.tensor,
    tiles: tl.tensor,
    MAX: tl.constexpr,
    LIMIT: tl.constexpr,
    NORMAL: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    MAX_CODE: tl.constexpr,
    BEYOND: tl.constexpr,
    NAN: tl.constexpr,
    SATURATE: tl.constexpr,
    PROPAGATE: tl.constexpr,
    BYTES: tl.constexpr,
    CAST: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    COUNT: tl.constexpr,
    MEASURE: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """One pass over x [rows, columns] with one scale: cast (and transpose), counters, amax, as requested.

    Where x was measured before, counters are added to the row `statistics` at once, by atomics: sums of whole
    numbers below 2^53 do not depend on their order. Else they go to `partials`.
    """
    amax = tl.full((), 0, tl.int32)
    saturated = tl.full((), 0, tl.int64)
    small = tl.full((), 0, tl.int64)
    nonfinite = tl.full((), 0, tl.int64)
    if CAST:
        s = tl.load(scale)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tile // tiles_across).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
        column = (tile % tiles_across).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        # A tile reads zeros outside of x, which count as nothing.
        at = row[:, None] * row_stride + column[None, :] * column_stride
        wide = load_wide(x + at, inside)
        if MEASURE:
            amax = tl.maximum(amax, tl.max(finite_bits(wide)))
            nonfinite += tl.sum(count_nonfinite(wide)).to(tl.int64)
        if CAST:
            scaled = wide * s
            stored, code = quantized_bits(
                wide, scaled, MAX, NORMAL, MANTISSA, BIAS, MAX_CODE, BEYOND, NAN, SATURATE, PROPAGATE, BYTES
            )
            tl.store(q + (row[:, None] * columns + column[None, :]), stored, mask=inside)
            if TRANSPOSE:
                beside = (column < columns)[:, None] & (row < rows)[None, :]
                tl.store(q_t + (column[:, None] * rows + row[None, :]), tl.trans(stored), mask=beside)
            if COUNT:
                small += widened(tl.sum(small_counts(wide, code, MANTISSA)))
                saturated += tl.sum(is_saturated(wide, scaled, LIMIT)).to(tl.int64)
    if MEASURE:
        store_partials(partials, amax, saturated, small, nonfinite, tl.full((), 0, tl.int64))
    elif COUNT:
        tl.atomic_add(statistics + 3, saturated.to(tl.float64))
        tl.atomic_add(statistics + 4, (small & 0xFFFFFFFF).to(tl.float64))
        tl.atomic_add(statistics + 5, (small >> 32).to(tl.float64))
        if tl.program_id(0) == 0:
            # The launcher passes a size of 1 as a constant, which is no tensor.
            size = tl.full((), rows, tl.float64) * columns
            largest = tl.load(known_amax).to(tl.float64)
            tl.store(statistics, tl.load(statistics) + size)
            tl.store(statistics + 1, tl.maximum(tl.load(statistics + 1), largest))
            tl.store(statistics + 2, tl.load(scale).to(tl.float64))
            bad = tl.load(known_nonfinite).to(tl.float64)
            tl.store(statistics + 6, tl.load(statistics + 6) + bad)


@triton.jit  # type: ignore[untyped-decorator]
def quantize_at_random_tiles(
    x: tl.tensor,
    scale: tl.tensor,
    q: tl.tensor,
    partials: tl.tensor,
    stream: tl.tensor,
    rank: tl.tensor,
    size: tl.tensor,
    tiles: tl.tensor,
    MAX: tl.constexpr,
    LIMIT: tl.constexpr,
    NORMAL: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    NAN: tl.constexpr,
    PROPAGATE: tl.constexpr,
    BYTES: tl.constexpr,
    COUNT: tl.constexpr,
    MEASURE: tl.constexpr,
    GROUPS: tl.constexpr,
    COUNTERS: tl.constexpr,
) -> None:
    """One pass over `size` contiguous elements with one scale, rounded at random by random_stream.py's words.

    A tile has GROUPS groups of four words for each of COUNTERS counters. It is read in four parts, one for
    each word, so that every counter is computed once. `stream`: int64, the seed and the number of the call.
    """
    amax = tl.full((), 0, tl.int32)
    saturated = tl.full((), 0, tl.int64)
    small = tl.full((), 0, tl.int64)
    nonfinite = tl.full((), 0, tl.int64)
    s = tl.load(scale)
    lane = tl.arange(0, COUNTERS).to(tl.int64)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        group = tl.full((), tile, tl.int64) * GROUPS + tl.arange(0, GROUPS)
        words = random_words(stream, rank, group[:, None] * COUNTERS + lane[None, :])
        for index in tl.static_range(4):
            at = group[:, None] * (4 * COUNTERS) + (index * COUNTERS + lane)[None, :]
            inside = at < size
            # A tile reads zeros outside of x, which count as nothing.
            wide = load_wide(x + at, inside)
            if MEASURE:
                amax = tl.maximum(amax, tl.max(finite_bits(wide)))
                nonfinite += tl.sum(count_nonfinite(wide)).to(tl.int64)
            scaled = wide * s
            stored, code = bits_at_random(
                wide, scaled, words[index], MAX, NORMAL, MANTISSA, BIAS, NAN, PROPAGATE, BYTES
            )
            tl.store(q + at, stored, mask=inside)
            if COUNT:
                small += widened(tl.sum(small_counts(wide, code, MANTISSA)))
                saturated += tl.sum(is_saturated(wide, scaled, LIMIT)).to(tl.int64)
    if COUNT or MEASURE:
        store_partials(partials, amax, saturated, small, nonfinite, tl.full((), 0, tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def quantize_block_tiles(
    x: tl.tensor,
    q: tl.tensor,
    scales: tl.tensor,
    partials: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    block_width: tl.tensor,
    blocks_across: tl.tensor,
    tiles: tl.tensor,
    LARGEST: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    MAX_SCALE: tl.constexpr,
    MODE: tl.constexpr,
    MAX: tl.constexpr,
    LIMIT: tl.constexpr,
    NORMAL: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    PROPAGATE: tl.constexpr,
    TALL: tl.constexpr,
    COUNT: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """x [rows, columns] with a scale per block of 1 x block_width, or of HEIGHT x block_width if TALL.

    A tile is one block, or a column of HEIGHT blocks. It is read WIDTH columns at a time: once for its scale
    and a second time, from the cache, for the cast.
    """
    amax = tl.full((), 0, tl.int32)
    saturated = tl.full((), 0, tl.int64)
    small = tl.full((), 0, tl.int64)
    nonfinite = tl.full((), 0, tl.int64)
    saturated_blocks = tl.full((), 0, tl.int64)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        down = (tile // blocks_across).to(tl.int64)
        row = down * HEIGHT + tl.arange(0, HEIGHT)
        across = (tile % blocks_across).to(tl.int64)
        start = across * block_width
        end = tl.minimum(start + block_width, columns)
        largest = tl.full((HEIGHT,), 0, tl.int32)
        for offset in range(start, end, WIDTH):
            column = offset + tl.arange(0, WIDTH)
            inside = (row < rows)[:, None] & (column < end)[None, :]
            at = row[:, None] * row_stride + column[None, :] * column_stride
            wide = load_wide(x + at, inside)
            largest = tl.maximum(largest, tl.max(finite_bits(wide), 1))
        if TALL:
            largest = tl.full((HEIGHT,), 0, tl.int32) + tl.max(largest, 0)
        s = block_scale(largest.to(tl.float32, bitcast=True), LARGEST, MIN_SCALE, MAX_SCALE, MODE)
        if TALL:
            tl.store(scales + (down * blocks_across + across), tl.max(s, 0))
        else:
            tl.store(scales + (row * blocks_across + across), s, mask=row < rows)
        spoilt = tl.full((HEIGHT,), 0, tl.int32)
        for offset in range(start, end, WIDTH):
            column = offset + tl.arange(0, WIDTH)
            inside = (row < rows)[:, None] & (column < end)[None, :]
            at = row[:, None] * row_stride + column[None, :] * column_stride
            wide = load_wide(x + at, inside)
            scaled = wide * s[:, None]
            stored, code = quantized_bits(
                wide, scaled, MAX, NORMAL, MANTISSA, BIAS, 0, 0, 0, True, PROPAGATE, False
            )
            tl.store(q + (row[:, None] * columns + column[None, :]), stored, mask=inside)
            if COUNT:
                beyond = is_saturated(wide, scaled, LIMIT)
                spoilt = tl.maximum(spoilt, tl.max(beyond, 1))
                saturated += tl.sum(beyond).to(tl.int64)
                nonfinite += tl.sum(count_nonfinite(wide)).to(tl.int64)
                small += widened(tl.sum(small_counts(wide, code, MANTISSA)))
        if COUNT:
            amax = tl.maximum(amax, tl.max(largest, 0))
            saturated_blocks += (tl.max(spoilt, 0) if TALL else tl.sum(spoilt)).to(tl.int64)
    if COUNT:
        store_partials(partials, amax, saturated, small, nonfinite, saturated_blocks)


@triton.jit  # type: ignore[untyped-decorator]
def finish(
    partials: tl.tensor,
    programs: tl.tensor,
    numel: tl.tensor,
    amax: tl.tensor,
    nonfinite: tl.tensor,
    scale: tl.tensor,
    row: tl.tensor,
    block_row: tl.tensor,
    history: tl.tensor,
    calls: tl.tensor,
    length: tl.tensor,
    MEASURED: tl.constexpr,
    HAS_ROW: tl.constexpr,
    HAS_BLOCK_ROW: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """Add up the partials of one launch, in one program.

    Writes `amax` (float32) and `nonfinite` (float64), or reads them if they were MEASURED before. Accumulates
    into `row` and `block_row`, float64, as `StatisticsBuffer` describes; in the latter only saturated blocks.
    With a history, `length` float32, adds the amax to it and counts the call, as `ScalingState.remember`.
    """
    program = tl.arange(0, _MAX_PROGRAMS)
    there = program < programs
    mine = partials + program * _PARTIALS
    if MEASURED:
        largest = tl.load(amax)
        bad = tl.load(nonfinite).to(tl.float64)
    else:
        bits = tl.max(tl.load(mine, mask=there, other=0), 0)
        largest = bits.to(tl.int32).to(tl.float32, bitcast=True)
        bad = tl.sum(tl.load(mine + 4, mask=there, other=0), 0).to(tl.float64)
        tl.store(amax, largest)
        tl.store(nonfinite, bad)
    if HAS_ROW:
        tl.store(row, tl.load(row) + numel)
        tl.store(row + 1, tl.maximum(tl.load(row + 1), largest.to(tl.float64)))
        tl.store(row + 2, tl.load(scale).to(tl.float64))
        for counter in tl.static_range(1, 4):
            total = tl.sum(tl.load(mine + counter, mask=there, other=0), 0)
            tl.store(row + 2 + counter, tl.load(row + 2 + counter) + total.to(tl.float64))
        tl.store(row + 6, tl.load(row + 6) + bad)
    if HAS_BLOCK_ROW:
        spoilt = tl.sum(tl.load(mine + 5, mask=there, other=0), 0)
        tl.store(block_row + 1, tl.load(block_row + 1) + spoilt.to(tl.float64))
    # HAS_HISTORY is known when this is compiled, the amax when it runs.
    if HAS_HISTORY:  # noqa: SIM102
        if largest > 0:
            parts = tl.cdiv(length, PART)
            # From the end, so that nothing is overwritten before it has moved.
            for part in range(0, parts):
                at = (parts - 1 - part) * PART + tl.arange(0, PART)
                moved = tl.load(history + at - 1, mask=(at > 0) & (at < length), other=0.0)
                # Threads write where others read.
                tl.debug_barrier()
                tl.store(history + at, tl.where(at == 0, largest, moved), mask=at < length)
                tl.debug_barrier()
            tl.store(calls, tl.load(calls) + 1)


@triton.jit  # type: ignore[untyped-decorator]
def delayed_scale(
    history: tl.tensor,
    scale: tl.tensor,
    calls: tl.tensor,
    chosen: tl.tensor,
    length: tl.tensor,
    interval: tl.tensor,
    top: tl.tensor,
    MIN_SCALE: tl.constexpr,
    MAX_SCALE: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """The scale of a delayed state from the first `length` of its history, in one program.

    Writes it to `scale` at every `interval`-th call. `chosen`, float32 [2], takes the scale and its inverse.
    """
    used = tl.load(scale)
    # The launcher passes an interval of 1 as a constant.
    if tl.load(calls) % tl.full((), interval, tl.int64) == 0:
        largest = tl.full((), 0, tl.int32)
        for start in range(0, length, PART):
            at = start + tl.arange(0, PART)
            past = tl.load(history + at, mask=at < length, other=0.0)
            # As bits, Inf and NaN are larger than every number.
            largest = tl.maximum(largest, tl.max(past.to(tl.int32, bitcast=True)))
        amax = largest.to(tl.float32, bitcast=True)
        scaled = tl.minimum(tl.maximum(tl.div_rn(tl.full((), top, tl.float32), amax), MIN_SCALE), MAX_SCALE)
        used = tl.where((largest > 0) & (largest < _INF), scaled, used)
        tl.store(scale, used)
    tl.store(chosen, used)
    tl.store(chosen + 1, tl.div_rn(tl.full((), 1.0, tl.float32), used))


@triton.jit  # type: ignore[untyped-decorator]
def current_scale(
    partials: tl.tensor,
    programs: tl.tensor,
    amax: tl.tensor,
    nonfinite: tl.tensor,
    scale: tl.tensor,
    chosen: tl.tensor,
    top: tl.tensor,
    MIN_SCALE: tl.constexpr,
    MAX_SCALE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    HAS_SCALE: tl.constexpr,
) -> None:
    """Add up the partials of a measurement, as `finish` does, and choose the scale of its amax.

    Writes `amax` (float32) and `nonfinite` (float64); to `chosen`, float32 [2], the scale and its inverse;
    and the scale to `scale`.
    """
    program = tl.arange(0, _MAX_PROGRAMS)
    there = program < programs
    mine = partials + program * _PARTIALS
    bits = tl.max(tl.load(mine, mask=there, other=0), 0)
    largest = bits.to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(amax, largest)
    tl.store(nonfinite, tl.sum(tl.load(mine + 4, mask=there, other=0), 0).to(tl.float64))
    used = tl.minimum(tl.maximum(tl.div_rn(tl.full((), top, tl.float32), largest), MIN_SCALE), MAX_SCALE)
    if POWER_OF_TWO:
        used = (used.to(tl.int32, bitcast=True) & _INF).to(tl.float32, bitcast=True)
    used = tl.where(largest > 0, used, 1.0)
    tl.store(chosen, used)
    tl.store(chosen + 1, tl.div_rn(tl.full((), 1.0, tl.float32), used))
    if HAS_SCALE:
        tl.store(scale, used)
