"""Ranks and attempts of a run: who writes, who lags, who is gone, and who disagrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby

import numpy as np
from django.utils import timezone

from fp8scope_dashboard.pages.verdicts import Badge
from fp8scope_dashboard.runs.models import Run, RunState, Tensor, Writer
from fp8scope_dashboard.runs.services import SILENT_AFTER
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.codec import Float64s

SHOWN = 64
ATTEMPTS_SHOWN = 50
# Ranks whose scales are compared; reading more would take longer than a page may.
MOST_COMPARED = 256
# Batches of the ranks arrive at different moments: only what is further behind is worth a word.
LAGGING_STEPS = 50
# Scales are float32.
RELATIVE = 1e-6
NAMED = 3

WRITING = Badge("Writing", "live", "pulse")
FINISHED = Badge("Finished", "neutral", "check")
FAILED = Badge("Failed", "danger", "cross")
LOST = Badge("Not heard of", "danger", "question")
LAGS = Badge("Lags", "warning", "clock")


@dataclass(frozen=True)
class Rank:
    """One rank of the latest attempt.

    `lag`: steps behind the foremost. `error`: the last line of its traceback.
    """

    rank: int
    hostname: str
    last_step: int | None
    lag: int
    seen_at: datetime
    badge: Badge
    error: str = ""
    children: int = 0


@dataclass(frozen=True)
class Attempt:
    """One time that the run was begun. `kept_until`: what it stored from this step on has been replaced."""

    number: int
    first_step: int | None
    last_step: int | None
    kept_until: int | None
    began_at: datetime
    ranks: int
    badge: Badge


@dataclass(frozen=True)
class Disagreement:
    """Tensors whose scale is not the same on all ranks that stored `step`.

    `apart`: the ranks that differ from more than half of all; none where no scale has such a majority.
    """

    step: int
    count: int
    names: list[str]
    compared: int
    weights: bool
    apart: list[int]


@dataclass(frozen=True)
class Ranks:
    """All of it."""

    ranks: list[Rank]
    count: int
    attempts: list[Attempt]
    disagreement: Disagreement | None = None
    troubled: list[Rank] = field(default_factory=list)


def ranks_of(run: Run) -> Ranks:
    """Gather them; a handful of queries, whatever the run's length."""
    writers = list(Writer.objects.filter(run=run).order_by("-attempt", "rank", "created_at"))
    attempts = [
        (number, list(group)) for number, group in groupby(writers, key=lambda writer: writer.attempt)
    ]
    if not attempts:
        return Ranks([], 0, [])
    found = _ranks(run, attempts[0][1])
    troubled = [one for one in found if one.badge in (FAILED, LOST, LAGS)]
    # What is wrong comes first: of a thousand ranks nobody looks for the one.
    shown = sorted(found, key=lambda one: (one not in troubled, one.rank))[:SHOWN]
    return Ranks(
        sorted(shown, key=lambda one: one.rank),
        len(found),
        _attempts(run, attempts[:ATTEMPTS_SHOWN]),
        _disagreement(run, found),
        troubled,
    )


def _ranks(run: Run, writers: Sequence[Writer]) -> list[Rank]:
    foremost = max((writer.last_step for writer in writers if writer.last_step is not None), default=0)
    found = []
    for number, group in groupby(writers, key=lambda writer: writer.rank):
        # The first is the process that began the run; forked children come after it.
        main, *children = group
        lag = foremost - (main.last_step or 0)
        error = main.error.strip().rpartition("\n")[2][:300] if main.failed else ""
        found.append(
            Rank(
                number,
                main.hostname,
                main.last_step,
                lag,
                main.seen_at,
                _badge(run, main, lag),
                error,
                len(children),
            )
        )
    return found


def _badge(run: Run, writer: Writer, lag: int = 0) -> Badge:
    if writer.finished_at is not None:
        return FAILED if writer.failed else FINISHED
    if run.state != RunState.RUNNING or timezone.now() - writer.seen_at > SILENT_AFTER:
        return LOST
    return LAGS if lag > LAGGING_STEPS else WRITING


def _attempts(run: Run, attempts: Sequence[tuple[int, list[Writer]]]) -> list[Attempt]:
    """Latest first."""
    found, kept_until = [], None
    for number, writers in attempts:
        firsts = [writer.first_step for writer in writers if writer.first_step is not None]
        lasts = [writer.last_step for writer in writers if writer.last_step is not None]
        badges = [_badge(run, writer) for writer in writers]
        worst = next((one for one in (FAILED, LOST, WRITING) if one in badges), FINISHED)
        found.append(
            Attempt(
                number + 1,
                min(firsts, default=None),
                max(lasts, default=None),
                kept_until if kept_until is not None and lasts and kept_until <= max(lasts) else None,
                min(writer.created_at for writer in writers),
                len({writer.rank for writer in writers}),
                worst,
            )
        )
        if firsts:
            kept_until = min(firsts) if kept_until is None else min(kept_until, *firsts)
    return found


def _disagreement(run: Run, ranks: Sequence[Rank]) -> Disagreement | None:
    """Where scales differ that should not.

    Weights are the same on all ranks, and so have to be their scales. The scales of activations and gradients
    are each rank's own unless the recipe reduces amaxes over the ranks.
    """
    lasts = [one.last_step for one in ranks if one.last_step is not None]
    if not 2 <= len(lasts) <= MOST_COMPARED or "scale" not in run.statistics:
        return None
    tensors = Tensor.objects.filter(run=run).order_by("index")
    if not run.recipe.get("reduce_amax"):
        tensors = tensors.filter(role="weight")
    names = list(tensors.values_list("index", "name", "role"))
    step = min(lasts)
    scales = queries.by_rank(run.id, "scale", np.array([index for index, _, _ in names], np.int64), step)
    if len(scales) < 2 or not names:
        return None
    table = np.array(list(scales.values()))
    seen = (~np.isnan(table)).sum(axis=0) > 1
    low, high = np.nanmin(table[:, seen], axis=0), np.nanmax(table[:, seen], axis=0)
    wrong = np.flatnonzero(seen)[high - low > RELATIVE * np.abs(high)]
    if not len(wrong):
        return None
    found = [names[i] for i in wrong]
    return Disagreement(
        step,
        len(found),
        [name for _, name, _ in found[:NAMED]],
        len(scales),
        any(role == "weight" for _, _, role in found),
        _apart(table[:, wrong], list(scales))[:SHOWN],
    )


def _apart(scales: Float64s, ranks: Sequence[int]) -> list[int]:
    """Ranks (rows of float64[ranks, tensors]) that do not have what more than half of them have."""
    # The median is the majority's value where there is a majority.
    median = np.nanmedian(scales, axis=0)
    same = np.abs(scales - median) <= RELATIVE * np.abs(median)
    agreed = same.sum(axis=0) > len(ranks) / 2
    return [rank for rank, row in zip(ranks, ~same & ~np.isnan(scales) & agreed, strict=True) if row.any()]
