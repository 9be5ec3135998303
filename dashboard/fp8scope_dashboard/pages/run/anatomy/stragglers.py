"""Compare ranks part by part, and find those that the others wait for. Pure functions of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fp8scope_dashboard.pages.run.anatomy.parts import PARTS
from fp8scope_dashboard.statistics.arrays import Floats

STRAGGLER: Final = 0.7
"""A rank with a lower score is a straggler: the default of nvidia-resiliency-ext."""
MIN_SECONDS: Final = 0.001
"""Ranks with less work in a step are not judged: it is about the time of a few calls."""
COMMUNICATION: Final = PARTS.index("communication")


@dataclass(frozen=True, kw_only=True)
class PartSpread:
    """Mean seconds of a part in a step: of the median rank, and of the rank with the most.

    `skew`: (worst - median) / median; None if the median rank spends no time in it.
    """

    part: str
    median: float
    worst: float
    worst_rank: int
    skew: float | None


@dataclass(frozen=True, kw_only=True)
class RankScore:
    """The score of a rank, at most 1; `part` is where it spends the most time beyond the median rank."""

    rank: int
    score: float
    part: str
    beyond: float

    @property
    def is_straggler(self) -> bool:
        return self.score < STRAGGLER


def spreads_of(ranks: Sequence[int], seconds: Floats) -> list[PartSpread]:
    """Return the spread of each part that takes time. `seconds` float64[ranks, PARTS, steps]."""
    means = seconds.mean(axis=2)
    medians, worst = np.median(means, axis=0), means.argmax(axis=0)
    return [
        PartSpread(
            part=part,
            median=float(medians[index]),
            worst=float(means[worst[index], index]),
            worst_rank=ranks[worst[index]],
            skew=float(means[worst[index], index] / medians[index] - 1) if medians[index] > 0 else None,
        )
        for index, part in enumerate(PARTS)
        if means[:, index].any()
    ]


def scores_of(ranks: Sequence[int], seconds: Floats) -> list[RankScore]:
    """Return the score of each rank: the work of the median rank over its own, at most 1.

    Work is the time of a step outside of communication, in which a rank waits for others; the median over
    the steps. Of an even number of ranks the lower median counts, which of two is the faster. Empty if there
    is too little work. `seconds` is as in `spreads_of`.
    """
    work = np.median(seconds.sum(axis=1) - seconds[:, COMMUNICATION], axis=1)
    typical = float(np.sort(work)[(len(work) - 1) // 2])
    if typical < MIN_SECONDS:
        return []
    medians = np.median(seconds, axis=2)
    beyond = medians - np.median(medians, axis=0)
    beyond[:, COMMUNICATION] = -np.inf
    causes = beyond.argmax(axis=1)
    return [
        RankScore(
            rank=rank,
            score=min(1.0, typical / float(work[row])),
            part=PARTS[causes[row]],
            beyond=float(beyond[row, causes[row]]),
        )
        for row, rank in enumerate(ranks)
    ]
