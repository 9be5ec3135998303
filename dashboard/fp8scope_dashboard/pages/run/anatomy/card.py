"""The content of the card that tells where a step's time goes, from the last steps of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from fp8scope_dashboard.pages import glossary
from fp8scope_dashboard.pages.badges import Badge
from fp8scope_dashboard.pages.formatting import aligned, number, percent
from fp8scope_dashboard.pages.run.anatomy.parts import PARTS, SCALARS, WAITS, WORK, scalar_of
from fp8scope_dashboard.pages.run.anatomy.stragglers import RankScore, scores_of, spreads_of
from fp8scope_dashboard.pages.run.anatomy.verdict import Verdict, WaitVerdict, judge_waits
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.codec import Int64s
from fp8scope_dashboard.text.numbers import count

RECENT_STEPS: Final = 200
MAX_STEPS: Final = 10_000
"""The most steps among which those that were measured are looked for, where not every step is."""
SMALL: Final = 0.01
"""A smaller share of waiting is not worth a sentence."""
RANKS_NAMED: Final = 5
LAUNCH_BOUND: Final = "launch_bound_seconds"

DOINGS: Final = {
    "data": "waiting for data",
    "copy": "copying from the host",
    "communication": "waiting for other ranks",
    "checkpoint": "saving and loading checkpoints",
}
BADGES: Final[dict[Verdict, Badge]] = {
    "waits": Badge("Wait-bound", "warning", "clock"),
    "works": Badge("Not wait-bound", "good", "check"),
    "unknown": Badge("Cannot tell yet", "neutral", "question"),
}


@dataclass(frozen=True, kw_only=True)
class PartRow:
    """A part in the table of ranks, in milliseconds."""

    name: str
    median: str
    worst: str
    worst_rank: int
    skew: str


@dataclass(frozen=True, kw_only=True)
class StepAnatomy:
    """The content of the card. `parts` and `scores` are empty for a single rank."""

    sentence: str
    badge: Badge
    reason: str
    launch: str = ""
    ranks: int = 1
    steps: int = 0
    parts: list[PartRow] = field(default_factory=list)
    stragglers: list[str] = field(default_factory=list)
    scores: str = ""


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Steps that all ranks have measured: `seconds` float64[ranks, PARTS, steps]; `launch` is as wide.

    `launch` float64[ranks, steps] is NaN where a rank cannot say.
    """

    ranks: list[int]
    seconds: Floats
    launch: Floats


def read_times(run: Run) -> RankTimes | None:
    """Return the times of the last steps; None if no step has an anatomy."""
    every = run.last_scalars.get("measured_every")
    span = RECENT_STEPS * (int(every) if isinstance(every, int | float) and every >= 1 else 1)
    rows = queries.rank_scalars(run.id, (*SCALARS, LAUNCH_BOUND), steps=min(span, MAX_STEPS))
    needed = [PARTS.index(part) for part in WORK]
    # A rank without any measured step, e.g. one that only evaluates, is not compared.
    measured = [(row, np.isfinite(row.values[needed]).all(axis=0)) for row in rows]
    measured = [(row, valid) for row, valid in measured if valid.any()]
    if not measured:
        return None
    steps: Int64s = measured[0][0].steps[measured[0][1]]
    for row, valid in measured[1:]:
        steps = np.intersect1d(steps, row.steps[valid], assume_unique=True)
    if not len(steps):
        return None
    steps = steps[-RECENT_STEPS:]
    values = np.stack([row.values[:, np.searchsorted(row.steps, steps)] for row, _ in measured])
    seconds = np.nan_to_num(values[:, : len(PARTS)], posinf=0.0)
    return RankTimes(
        ranks=[row.rank for row, _ in measured], seconds=np.maximum(seconds, 0.0), launch=values[:, -1]
    )


def anatomy_of(run: Run) -> StepAnatomy | None:
    """Return the content of the card; None for a run whose agent does not measure it."""
    if scalar_of(WORK[0]) not in run.last_scalars:
        return None
    times = read_times(run)
    return None if times is None else describe(times)


def describe(times: RankTimes) -> StepAnatomy:
    """Put the times of the ranks into words: those of the median rank in each part."""
    whole = times.seconds.sum(axis=1)
    waits = times.seconds[:, [PARTS.index(part) for part in WAITS]].sum(axis=1)
    # The rank whose share of waiting is the middle one stands for all; of two, the one that waits more.
    shares = waits.sum(axis=1) / np.maximum(whole.sum(axis=1), np.finfo(float).tiny)
    middle = int(np.argsort(shares, kind="stable")[len(shares) // 2])
    judged = judge_waits(waits[middle], whole[middle])
    several = len(times.ranks) > 1
    scores = scores_of(times.ranks, times.seconds) if several else []
    return StepAnatomy(
        sentence=_sentence(times.seconds[middle], times.ranks[middle] if several else None),
        badge=BADGES[judged.verdict],
        reason=_reason(judged, whole.shape[1]),
        launch=_launch(times.launch[middle], whole[middle]),
        ranks=len(times.ranks),
        steps=whole.shape[1],
        parts=_rows(times) if several else [],
        stragglers=[_straggler(score) for score in scores if score.is_straggler][:RANKS_NAMED],
        scores=_scores(scores),
    )


def duration(seconds: float) -> str:
    """A time of a step: 412 ms, 1.2 s."""
    return f"{number(seconds, 3)} s" if seconds >= 1 else f"{number(1e3 * seconds, 3)} ms"


def share_in_words(share: float) -> str:
    """A share of a step in whole per cent, unless it is small."""
    return f"{100 * share:.0f} %" if share >= SMALL else percent(share)


def _sentence(seconds: Floats, rank: int | None) -> str:
    """The step's time, and the largest wait of a rank; `seconds` float64[PARTS, steps]."""
    means = seconds.mean(axis=1)
    whole = float(means.sum())
    if whole <= 0:
        return "The time of a step is not known."
    of = dict(zip(PARTS, (means / whole).tolist(), strict=True))
    largest = max(WAITS, key=lambda part: of[part])
    taken = f"A step takes {duration(whole)}" + (f" on rank {rank}" if rank is not None else "")
    if of[largest] >= SMALL:
        return f"{taken}; {share_in_words(of[largest])} is {DOINGS[largest]}."
    work = sum(of[part] for part in WORK)
    return f"{taken}; {share_in_words(work)} is forward, loss, backward and optimizer."


def _reason(judged: WaitVerdict, steps: int) -> str:
    if np.isnan(judged.share):
        return f"{count(steps, 'measured step')} are too few to judge."
    interval = f"{100 * judged.low:.0f} to {100 * judged.high:.0f} %"
    return f"All waits are {share_in_words(judged.share)} of the time (95 % interval {interval})."


def _launch(launch: Floats, whole: Floats) -> str:
    """The launch-bound share; empty where no device says it, as on a CPU."""
    valid = np.isfinite(launch)
    if not valid.any() or not whole[valid].sum() > 0:
        return ""
    return share_in_words(float(launch[valid].sum() / whole[valid].sum()))


def _rows(times: RankTimes) -> list[PartRow]:
    spreads = spreads_of(times.ranks, times.seconds)
    medians = aligned([1e3 * spread.median for spread in spreads], 3)
    worst = aligned([1e3 * spread.worst for spread in spreads], 3)
    return [
        PartRow(
            name=glossary.title(scalar_of(spread.part)),
            median=medians[row],
            worst=worst[row],
            worst_rank=spread.worst_rank,
            skew=percent(spread.skew, signed=True) if spread.skew is not None else number(None),
        )
        for row, spread in enumerate(spreads)
    ]


def _straggler(score: RankScore) -> str:
    part = glossary.title(scalar_of(score.part)).lower()
    return (
        f"Rank {score.rank} is a straggler: its score is {score.score:.2f}. Most of it is {part}, "
        f"{duration(score.beyond)} more in a step than the median rank."
    )


def _scores(scores: Sequence[RankScore]) -> str:
    if not scores:
        return ""
    worst = min(scores, key=lambda score: score.score)
    return f"The lowest straggler score is {worst.score:.2f}, of rank {worst.rank}."
