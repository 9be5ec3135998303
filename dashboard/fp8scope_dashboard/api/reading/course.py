"""The course of a run, and its processes."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.http import HttpRequest
from ninja import Router

from fp8scope_dashboard.analysis.verdict_coverage import standing_now
from fp8scope_dashboard.api.auth import RUN_READER, run_of
from fp8scope_dashboard.api.reading.schemas import CourseOut, RanksOut
from fp8scope_dashboard.api.responses import ERRORS
from fp8scope_dashboard.pages.run.onset_facts import facts_of
from fp8scope_dashboard.pages.run.onset_strip import StripOnset, strip_of
from fp8scope_dashboard.pages.run.ranks import Disagreement, Rank, ranks_of
from fp8scope_dashboard.wire import schemas

router = Router(tags=["runs"], auth=RUN_READER)


@router.get("/runs/{run}/course", response={200: CourseOut, ERRORS: schemas.ErrorOut})
def get_course(request: HttpRequest, run: UUID) -> dict[str, Any]:
    """The course of the run, as its page tells it: alerts, the loss, commands, starts, the end."""
    stored = run_of(request, run)
    strip = strip_of(facts_of(stored, standing_now(stored)))
    onsets = sorted([*strip.shown, *strip.folded], key=lambda onset: onset.step)
    return {"onsets": [_onset(onset) for onset in onsets], "more": strip.more, "calm": strip.calm}


def _onset(onset: StripOnset) -> dict[str, Any]:
    return {
        "step": onset.step,
        "earliest": onset.begin,
        "until": onset.until,
        "title": onset.title,
        "detail": onset.detail,
        "tone": onset.tone,
    }


@router.get("/runs/{run}/ranks", response={200: RanksOut, ERRORS: schemas.ErrorOut})
def get_ranks(request: HttpRequest, run: UUID) -> dict[str, Any]:
    """The ranks of the latest attempt, and whether they disagree on a scale."""
    ranks = ranks_of(run_of(request, run))
    return {
        "total": ranks.count,
        "ranks": [_rank(rank) for rank in ranks.ranks],
        "disagreement": None if ranks.disagreement is None else _disagreement(ranks.disagreement),
    }


def _rank(rank: Rank) -> dict[str, Any]:
    fields = ("rank", "hostname", "last_step", "lag", "error", "seen_at")
    return {**{name: getattr(rank, name) for name in fields}, "state": rank.badge.label}


def _disagreement(shown: Disagreement) -> dict[str, Any]:
    fields = ("step", "names", "compared", "deviating", "factor")
    return {**{name: getattr(shown, name) for name in fields}, "tensors": shown.count}
