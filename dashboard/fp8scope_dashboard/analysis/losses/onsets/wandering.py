"""A test of a rise against a difference that wanders.

Seeds of one configuration may wander away from each other, lastingly. A mean that has wandered above the
tolerance is no harm. So a rise must also exceed what wandering over its duration produces, as far as the time
before it shows. Of the run, nothing that follows a suspected onset is used.

The state has the difference as means of at most BLOCKS successive blocks, which are merged in pairs when they
become too many, and the deviations of the first SEEDS seeds likewise.

**Bound.** A change begins at a block j. Let D be the mean of the window less the mean of r blocks that end
at j. The difference is taken for a random walk plus noise. The Allan variance A(m) of means of m blocks is
half the mean square of successive differences: s m / 3 for a walk whose steps have the variance s, and
A(1) / m for noise. So

    s <= 3 (A(m) - A(1) / m) / m,    V = A(1) (1 / q + 1 / r) + s (g + q / 3 + r / 3)

and V is the variance of D, for a window of q blocks that begins g blocks after j. The tightest m counts, of
those that are known well enough. A(m) is measured on the recent half of the blocks before j, in both
directions, and on the deviations of the seeds from there on, in which no harm is. With f degrees of freedom
it is taken to be as large as it may be: f / chi^2_f(UNCERTAIN) times the estimate.

**Prior.** Loud noise that is not shared hides how the seeds wander: no m bounds s then. So s is at most that
of a walk which has gone PRIOR_SPREADS spreads between seeds by now, unless A(m) shows more.

**Sure rises.** Seeds that part in the warm-up and then stay look like noise that may grow for the whole run.
A rise is also found where that noise hides it, if D exceeds SURE_QUANTILE deviations with A(m) m / q in place
of A(1) / q. Unless the time before it (without its first third) shows that noise falls with the length, s is
then the largest that some m allows, without the prior.

A rise that begins with the first point has nothing before it. There D is the mean itself, and A(m) is
measured on all blocks or on their recent half: a rise makes it larger, and a level that stands still is no
walk.

The rise is explained unless D exceeds QUANTILE standard deviations for some j and r. The quantile is that of
the largest of many, for all onsets, stretches and looks. It is calibrated on walks, not derived
(`benchmarks/verdicts.py`). This condition only adds to the others, so it costs nothing of the error budget.

Source: Allan (1966).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.losses.onsets.base import State
from fp8scope_dashboard.statistics.arrays import Floats

Indices = NDArray[np.int64]

# Blocks of the history before they are merged, and the seeds whose deviations it has.
BLOCKS, SEEDS = 128, 4
# The blocks before an onset of which the recent half shows how the difference wanders.
MIN_BLOCKS = 8
# Deviations that a rise must exceed, and the probability that their estimate is too low: of the run alone,
# and with several seeds.
QUANTILE, UNCERTAIN_ALONE, UNCERTAIN = 3.8, 0.07, 0.1
# Degrees of freedom of a variance that counts: of the run alone, and with several seeds. Several lengths are
# known well with seeds, and the least of their variances is too low by chance.
MIN_FREEDOM_ALONE, MIN_FREEDOM = 3.0, 5.0


# The prior of a walk: by so many spreads between seeds one seed has walked by now, at most. The variance
# between seeds is below that with probability .99, by the public prior of 3 degrees of freedom:
# sqrt(3 / chi^2_3(.01)).
PRIOR_SPREADS = 5.11
# The probability that the estimate of a walk beyond the prior is too low.
SHOWN = 0.75
# The walk is plain, and the prior does not count, where A(m) is so many times what noise alone may give it.
PLAIN = 3.0


# A rise that counts whatever the noise was in the warm-up: deviations; blocks before its onset; points of the
# record, and the least of the window.
SURE_QUANTILE, SURE_BLOCKS, SURE_POINTS, WINDOW_POINTS = 5.0, 32, 256, 32
# The longest noise is known: its Allan variance is at most so much of the largest at the greatest length that
# is known, and so much of that of single blocks at the next one. White noise has a quarter or less, and half.
FALLEN, FALLEN_NEXT = 0.35, 0.75


def fresh() -> State:
    """The state before the first point."""
    return {"length": 1, "steps": [], "rows": [], "block": [0, None, []], "refused": None}


def add(state: State, step: int, value: float, deviations: Sequence[float | None]) -> None:
    """Add a point: the run's difference, and the deviations of the seeds from their mean."""
    seeds = list(deviations[:SEEDS]) if len(deviations) > 1 else []
    points, since, sums = state["block"]
    row = [value, *seeds]
    state["block"] = [
        points + 1,
        step if since is None else since,
        row if since is None else _added(sums, row),
    ]
    if points + 1 < state["length"]:
        return
    points, since, sums = state["block"]
    state["steps"].append(since)
    state["rows"].append([None if total is None else total / points for total in sums])
    state["block"] = [0, None, []]
    if len(state["rows"]) == BLOCKS:
        rows = state["rows"]
        state.update(
            length=2 * state["length"],
            steps=state["steps"][::2],
            rows=[
                [None if total is None else 0.5 * total for total in _added(rows[i], rows[i + 1])]
                for i in range(0, BLOCKS, 2)
            ],
        )


def _added(row: Sequence[float | None], other: Sequence[float | None]) -> list[float | None]:
    """The sum of two rows; None where one of them has no value, and for seeds that one of them lacks."""
    short = min(len(row), len(other))
    sums = [
        None if a is None or b is None else a + b for a, b in zip(row[:short], other[:short], strict=True)
    ]
    return sums + [None] * (max(len(row), len(other)) - short)


def restarted(state: State, step: int) -> State:
    """The state without the points from `step` on, which were trained again."""
    earlier = sum(1 for start in state["steps"] if start < step)
    return {
        **state,
        "steps": state["steps"][:earlier],
        "rows": state["rows"][:earlier],
        "block": [0, None, []],
        "refused": None,
    }


def explains(state: State, points: int, runs: float, seeds: int, spread: float) -> bool:
    """Return whether the difference may have wandered up to the mean of so many latest points.

    The window begins with the block of the first of them. A rise that was refused is judged again with the
    next block.

    Args:
        runs: seeds that the difference is the mean of.
        seeds: of the baseline.
        spread: prior spread between seeds, in the unit of the differences.
    """
    rows = state["rows"]
    if state["refused"] == [state["length"], len(rows)]:
        return True
    stretch = _stretch(state, points, runs, seeds, spread)
    if stretch is None:
        return False
    record, mean, last = stretch
    explained = not (_exceeds_since_start(record, mean) or _exceeds(record, mean, last))
    state["refused"] = [state["length"], len(rows)] if explained else None
    return explained


def sure_rise(state: State, limit: float, runs: float, seeds: int, spread: float) -> tuple[int, float] | None:
    """The points and the mean of the latest blocks, if they are above a limit and far beyond any wandering.

    It is asked for once with each block. The arguments are as for `explains`.
    """
    rows, length = state["rows"], state["length"]
    if state["block"][0] or len(rows) < SURE_BLOCKS or length * len(rows) < SURE_POINTS:
        return None
    blocks = max(WINDOW_POINTS // length, 1)
    while blocks <= len(rows) // 4:
        mean = sum(row[0] for row in rows[-blocks:]) / blocks
        stretch = _stretch(state, blocks * length, runs, seeds, spread) if mean > limit else None
        if stretch is not None and _surely_exceeds(*stretch):
            return blocks * length, mean
        blocks *= 2
    return None


def _stretch(
    state: State, points: int, runs: float, seeds: int, spread: float
) -> tuple[_Record, float, int] | None:
    """The record, the mean of the latest points and the blocks before them; None if these are too few."""
    rows = state["rows"]
    count = len(rows) * state["length"] + state["block"][0]
    last = min((count - points) // state["length"], len(rows))
    if last < MIN_BLOCKS:
        return None
    # From a deviation from the mean of K runs to a difference to the mean of K others.
    factor = (1.0 / runs + 1.0 / seeds) / (1.0 - 1.0 / seeds) if seeds > 1 else 0.0
    own, deviations = np.array([row[0] for row in rows], np.float64), _deviations(rows)
    points = count - last * state["length"]
    latest = float(own[last:].sum()) * state["length"] + (state["block"][2][0] if state["block"][0] else 0.0)
    usual = PRIOR_SPREADS**2 * spread**2 * (1.0 / runs + 1.0 / seeds) * state["length"] / count
    record = _Record(
        own=own,
        deviations=deviations,
        factor=factor,
        usual=usual,
        count=count / state["length"],
        window=points / state["length"],
    )
    return record, latest / points, last


@dataclass(frozen=True, kw_only=True)
class _Record:
    """The blocks, own float64[M] and of seeds float64[K, M], and in blocks the points so far and the window.

    `factor` is the variance of the difference over that of a seed's deviation; `usual` the variance of the
    steps of a walk, as far as it is to be expected of any seeds.
    """

    own: Floats
    deviations: Floats
    factor: float
    usual: float
    count: float
    window: float


def _deviations(rows: Sequence[Sequence[float | None]]) -> Floats:
    """The deviations of seeds that have a value in all blocks, float64[seeds, blocks]."""
    width = min(len(row) for row in rows)
    columns = [[row[i] for row in rows] for i in range(1, width)]
    complete = [column for column in columns if all(value is not None for value in column)]
    return np.array(complete, np.float64) if len(complete) > 1 else np.empty((0, len(rows)))


def _variances(record: _Record, begin: Indices, end: Indices) -> Mapping[int, tuple[Floats, Floats]]:
    """By the number of blocks m: A(m) of the difference on own[begin:end], and its degrees of freedom.

    That of the seeds is on all blocks from `begin` on. A variance that is not known is 0 with 0 degrees.
    """
    variances = {}
    last = np.full_like(begin, len(record.own))
    for level in range(BLOCKS.bit_length()):
        m = 1 << level
        if 2 * m > len(record.own):
            break
        variance, freedom = _allan(record.own, m, begin, end)
        if len(record.deviations):
            squares = [_allan(row, m, begin, last) for row in record.deviations]
            of_seeds = record.factor * np.mean([square for square, _ in squares], axis=0)
            theirs = (len(record.deviations) - 1) * squares[0][1]
            total = np.maximum(freedom + theirs, np.finfo(np.float64).tiny)
            variance, freedom = (freedom * variance + theirs * of_seeds) / total, freedom + theirs
        variances[m] = variance, freedom
    return variances


def _allan(values: Floats, m: int, begin: Indices, end: Indices) -> tuple[Floats, Floats]:
    """The Allan variance of means of m values on each of values[begin:end], and its degrees of freedom."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    means = (sums[m:] - sums[:-m]) / m
    squares = np.concatenate([[0.0], np.cumsum(0.5 * (means[m:] - means[:-m]) ** 2)])
    stop = np.maximum(end - 2 * m + 1, begin)
    count = stop - begin
    total = squares[np.minimum(stop, len(squares) - 1)] - squares[np.minimum(begin, len(squares) - 1)]
    freedom = np.where(count > 0, np.maximum((end - begin) / m - 1.0, 0.0), 0.0)
    return np.maximum(total, 0.0) / np.maximum(count, 1), freedom


@dataclass(frozen=True)
class _Known:
    """The history of the difference before each onset, float64[onsets] each, at most.

    Attributes:
        noise: variance of a block's mean.
        walk: variance of the steps of a walk, by the block count that bounds it most; infinite if none does.
    """

    noise: Floats
    walk: Floats


def _known(record: _Record, begin: Indices, end: Indices) -> _Known:
    variances = _variances(record, begin, end)
    several = len(record.deviations) > 0
    least, uncertain = (MIN_FREEDOM, UNCERTAIN) if several else (MIN_FREEDOM_ALONE, UNCERTAIN_ALONE)
    single, freedom = variances[1]
    surely, most = single * _ratio(freedom, 1.0 - uncertain), single * _ratio(freedom, uncertain)
    steps = [np.where(freedom >= least, 3.0 * most, np.inf)]
    shown = np.full_like(single, record.usual)
    for m, (variance, degrees) in variances.items():
        if m > 1:
            walk = np.maximum(variance * _ratio(degrees, uncertain) - surely / m, 0.0)
            steps.append(np.where(degrees >= least, 3.0 * walk / m, np.inf))
            seen = 3.0 * (variance * _ratio(degrees, SHOWN) - most / m) / m
            shown = np.maximum(shown, np.where(degrees >= least, seen, 0.0))
            is_plain = (degrees >= least) & (variance > PLAIN * most / m)
            shown = np.where(is_plain, np.inf, shown)
    return _Known(most, np.minimum(np.min(steps, axis=0), shown))


def _ratio(freedom: Floats, level: float) -> Floats:
    """A variance over its estimate is above this with the probability `level`."""
    return _cached_ratio(np.maximum(freedom, 1.0).tobytes(), level)


# Degrees of freedom follow from numbers of blocks, which recur at every look and in every run; the quantiles
# would take most of a look's time. An entry has at most two numbers for each of BLOCKS onsets.
@lru_cache(maxsize=4_096)
def _cached_ratio(freedom: bytes, level: float) -> Floats:
    degrees = np.frombuffer(freedom)
    ratio = np.asarray(degrees / scipy.special.chdtri(degrees, 1.0 - level))
    ratio.flags.writeable = False
    return ratio


def _exceeds_since_start(record: _Record, mean: float) -> bool:
    """Return whether the mean is further above 0 than a walk from the first point on explains.

    The whole record shows the walk, or its recent half: a rise that is part of it makes the bound wider, and
    a level that stands still is no walk.
    """
    blocks = len(record.own)
    history = _known(record, np.array([0, blocks // 2]), np.array([blocks, blocks]))
    since = record.count - 2.0 / 3.0 * record.window
    bounds = QUANTILE * np.sqrt(history.noise / record.window + history.walk * since)
    return bool((mean > bounds).any())


def _exceeds(record: _Record, mean: float, last: int) -> bool:
    """Return whether the mean is further above the blocks before some onset than wandering explains.

    Onsets are at MIN_BLOCKS to `last` blocks.
    """
    onsets = np.arange(MIN_BLOCKS, last + 1)
    history = _known(record, onsets // 2, onsets)
    for before, blocks, rise, since in _rises(record, mean, onsets):
        noise = history.noise[before] * (1.0 / record.window + 1.0 / blocks)
        if bool((rise > QUANTILE * np.sqrt(noise + history.walk[before] * since)).any()):
            return True
    return False


def _surely_exceeds(record: _Record, mean: float, last: int) -> bool:
    """Return whether it is above what wandering and noise that lasts for a while explain together.

    Noise that lasts for m blocks has the Allan variance A(m) there. A mean of q blocks has as much of it, or
    A(m) m / q of it if it is longer. If A has not fallen at the longest m, the noise may be a walk there.
    """
    onsets = np.arange(SURE_BLOCKS, last + 1)
    if not len(onsets):
        return False
    histories, variances = _known(record, onsets // 2, onsets), _variances(record, onsets // 3, onsets)
    enough = {m: freedom >= MIN_FREEDOM_ALONE for m, (_, freedom) in variances.items()}
    seen = [np.where(enough[m], variance, 0.0) for m, (variance, _) in variances.items()]
    longest = seen[0]
    for variance, is_known in zip(seen, enough.values(), strict=True):
        longest = np.where(is_known, variance, longest)
    falls = (longest <= FALLEN * np.max(seen, axis=0)) & (seen[1] <= FALLEN_NEXT * seen[0])
    lasting = {
        m: np.where(enough[m], variance * _ratio(freedom, UNCERTAIN), 0.0)
        for m, (variance, freedom) in variances.items()
    }
    most = np.max([3.0 * variance / m for m, variance in lasting.items()], axis=0)
    walk = np.where(falls, histories.walk, most)
    window = np.max([v * min(m / record.window, 1.0) for m, v in lasting.items()], axis=0)
    for before, blocks, rise, since in _rises(record, mean, onsets):
        noise = window + np.max([v * min(m / blocks, 1.0) for m, v in lasting.items()], axis=0)
        if bool((rise > SURE_QUANTILE * np.sqrt(noise[before] + walk[before] * since)).any()):
            return True
    return False


def _rises(
    record: _Record, mean: float, onsets: Indices
) -> Iterator[tuple[NDArray[np.bool_], int, Floats, Floats]]:
    """By the number of blocks before them: the onsets that have these, the rise of the mean above these, and
    the length of a walk in between.
    """
    sums = np.concatenate([[0.0], np.cumsum(record.own)])
    blocks = 1
    while blocks <= onsets[-1]:
        before = onsets >= blocks
        at = onsets[before]
        rise = np.asarray(mean - (sums[at] - sums[at - blocks]) / blocks, np.float64)
        walked = np.asarray(record.count - at - 2.0 / 3.0 * record.window + blocks / 3.0, np.float64)
        yield before, blocks, rise, walked
        blocks *= 2
