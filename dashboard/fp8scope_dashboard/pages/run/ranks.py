"""The ranks and attempts of a run: which rank lags, has stopped reporting, or has deviating scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby
from typing import Final

import numpy as np
from django.utils import timezone

from fp8scope_dashboard.alerts.detectors.rank_scales import spread_of
from fp8scope_dashboard.alerts.kinds.tensors import SCALE_DISAGREEMENT
from fp8scope_dashboard.alerts.models import Alert, AlertState
from fp8scope_dashboard.cold_store.errors import ColdStoreError
from fp8scope_dashboard.pages.badges import Badge
from fp8scope_dashboard.runs.models import Run, RunState, Tensor, Writer
from fp8scope_dashboard.runs.services import SILENT_AFTER
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.codec import Float64s
from fp8scope_dashboard.text.numbers import as_factor

RANKS_SHOWN = 64
ATTEMPTS_SHOWN = 50
# The most ranks whose scales are compared: reading more takes too long for a page.
MAX_COMPARED = 256
# Batches of the ranks arrive at different times, so a smaller lag is normal.
LAGGING_STEPS = 50
# In powers of two, as of the alert: its rule may have another limit, which is that project's choice.
MIN_SPREAD: Final = SCALE_DISAGREEMENT.parameters["octaves"].default
NAMES_SHOWN = 3

WRITING = Badge("Writing", "live", "pulse")
FINISHED = Badge("Finished", "neutral", "check")
FAILED = Badge("Failed", "danger", "cross")
LOST = Badge("Not reporting", "danger", "question")
LAGGING = Badge("Lagging", "warning", "clock")


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank of the latest attempt.

    `lag`: steps behind the rank with the most steps. `error`: the last line of its traceback.
    """

    rank: int
    hostname: str
    last_step: int | None
    lag: int
    seen_at: datetime
    badge: Badge
    error: str = ""
    children: int = 0


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt. A later attempt replaced its data from step `replaced_from` on."""

    number: int
    first_step: int | None
    last_step: int | None
    replaced_from: int | None
    began_at: datetime
    ranks: int
    badge: Badge


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """Tensors whose scale differs between the ranks that stored `step`.

    `deviating`: the ranks that differ from a majority of more than half; empty if there is no majority.
    `factor`: the largest of a tensor's scales over its smallest, of the tensor with the largest one.
    `since`: the step from which on they differ, in words, as the alert says; empty without an alert.
    """

    step: int
    count: int
    names: list[str]
    compared: int
    weights: bool
    deviating: list[int]
    factor: str
    since: str = ""


@dataclass(frozen=True)
class Ranks:
    """The content of the card. `count`: all ranks, of which `ranks` lists the first."""

    ranks: list[Rank]
    count: int
    attempts: list[Attempt]
    disagreement: Disagreement | None = None
    troubled: list[Rank] = field(default_factory=list)

    @property
    def has_news(self) -> bool:
        """Return whether there is more to say than the state of the run, which is that of a single rank."""
        return self.disagreement is not None or (bool(self.troubled) and self.count > 1)

    @property
    def silent_together(self) -> bool:
        """Return whether no rank reports: one sentence says it better than one for each."""
        return (
            self.count > 1
            and len(self.troubled) == self.count
            and all(rank.badge is LOST for rank in self.troubled)
        )


def ranks_of(run: Run) -> Ranks:
    """Read the ranks of a run. The number of queries does not depend on the run's length."""
    writers = list(Writer.objects.filter(run=run).order_by("-attempt", "rank", "created_at"))
    attempts = [
        (number, list(group)) for number, group in groupby(writers, key=lambda writer: writer.attempt)
    ]
    if not attempts:
        return Ranks([], 0, [])
    ranks = _ranks(run, attempts[0][1])
    troubled = [rank for rank in ranks if rank.badge in (FAILED, LOST, LAGGING)]
    # If not all ranks fit, those with a problem take precedence.
    shown = sorted(ranks, key=lambda rank: (rank not in troubled, rank.rank))[:RANKS_SHOWN]
    return Ranks(
        sorted(shown, key=lambda rank: rank.rank),
        len(ranks),
        _attempts(run, attempts[:ATTEMPTS_SHOWN]),
        _disagreement(run, ranks),
        troubled,
    )


def _ranks(run: Run, writers: Sequence[Writer]) -> list[Rank]:
    foremost = max((writer.last_step for writer in writers if writer.last_step is not None), default=0)
    ranks = []
    for number, group in groupby(writers, key=lambda writer: writer.rank):
        # The first writer is the process that started the run; the others are its forked children.
        main, *children = group
        lag = foremost - (main.last_step or 0)
        error = main.error.strip().rpartition("\n")[2][:300] if main.failed else ""
        ranks.append(
            Rank(
                rank=number,
                hostname=main.hostname,
                last_step=main.last_step,
                lag=lag,
                seen_at=main.seen_at,
                badge=_badge(run, main, lag),
                error=error,
                children=len(children),
            )
        )
    return ranks


def _badge(run: Run, writer: Writer, lag: int = 0) -> Badge:
    if writer.finished_at is not None:
        return FAILED if writer.failed else FINISHED
    if run.state != RunState.RUNNING or timezone.now() - writer.seen_at > SILENT_AFTER:
        return LOST
    return LAGGING if lag > LAGGING_STEPS else WRITING


def _attempts(run: Run, attempts: Sequence[tuple[int, list[Writer]]]) -> list[Attempt]:
    """The attempts, latest first."""
    listed, replaced_from = [], None
    for number, writers in attempts:
        firsts = [writer.first_step for writer in writers if writer.first_step is not None]
        lasts = [writer.last_step for writer in writers if writer.last_step is not None]
        is_replaced = replaced_from is not None and bool(lasts) and replaced_from <= max(lasts)
        badges = [_badge(run, writer) for writer in writers]
        worst = next((badge for badge in (FAILED, LOST, WRITING) if badge in badges), FINISHED)
        listed.append(
            Attempt(
                number=number + 1,
                first_step=min(firsts, default=None),
                last_step=max(lasts, default=None),
                replaced_from=replaced_from if is_replaced else None,
                began_at=min(writer.created_at for writer in writers),
                ranks=len({writer.rank for writer in writers}),
                badge=worst,
            )
        )
        if firsts:
            replaced_from = min(firsts) if replaced_from is None else min(replaced_from, *firsts)
    return listed


def _disagreement(run: Run, ranks: Sequence[Rank]) -> Disagreement | None:
    """Find scales that differ between ranks although they must be equal, as the alert measures it.

    All ranks hold the same weights, so the scales of weights must be equal. The scales of activations and
    gradients must be equal only if the recipe reduces amax over the ranks.
    """
    lasts = [rank.last_step for rank in ranks if rank.last_step is not None]
    if not 2 <= len(lasts) <= MAX_COMPARED or "scale" not in run.statistics:
        return None
    tensors = Tensor.objects.filter(run=run).order_by("index")
    if not run.recipe.get("reduce_amax"):
        tensors = tensors.filter(role="weight")
    names = list(tensors.values_list("index", "name", "role"))
    step = min(lasts)
    try:
        scales = queries.by_rank(run.id, "scale", np.array([index for index, _, _ in names], np.int64), step)
    except ColdStoreError:
        # The card of tensors on the same page says why.
        return None
    if len(scales) < 2 or not names:
        return None
    table = np.array(list(scales.values()))
    spread = spread_of(table)
    with np.errstate(invalid="ignore"):
        wrong = np.flatnonzero(spread > MIN_SPREAD)
    if not len(wrong):
        return None
    # The furthest apart come first: they are the evidence.
    wrong = wrong[np.argsort(-spread[wrong], kind="stable")]
    unequal = [names[i] for i in wrong]
    return Disagreement(
        step=step,
        count=len(unequal),
        names=[name for _, name, _ in unequal[:NAMES_SHOWN]],
        compared=len(scales),
        weights=any(role == "weight" for _, _, role in unequal),
        deviating=_deviating(table[:, wrong], list(scales))[:RANKS_SHOWN],
        factor=as_factor(float(spread[wrong[0]])),
        since=_since(run),
    )


def _since(run: Run) -> str:
    """Since when the ranks differ, as the earliest alert that lasts says."""
    alerts = Alert.objects.filter(run=run, kind=SCALE_DISAGREEMENT.name)
    first = alerts.exclude(state=AlertState.RESOLVED).order_by("onset_step").first()
    return "" if first is None else first.onset_in_words


def _deviating(scales: Float64s, ranks: Sequence[int]) -> list[int]:
    """Ranks, the rows of float64[ranks, tensors], whose scale differs from that of more than half of them."""
    # If there is a majority, the median is its value.
    median = np.nanmedian(scales, axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        same = np.abs(np.log2(scales / median)) <= MIN_SPREAD
    agreed = same.sum(axis=0) > len(ranks) / 2
    return [rank for rank, row in zip(ranks, ~same & ~np.isnan(scales) & agreed, strict=True) if row.any()]
