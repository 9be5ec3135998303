"""The media of runs, without those of an earlier start of the training that a later one has replaced."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from uuid import UUID

from django.db.models import Min, Q, QuerySet

from fp8scope_dashboard.media.models import MediaItem
from fp8scope_dashboard.runs.models import Run, Writer


@dataclass(frozen=True)
class MediaName:
    """A name under which runs have media, their kind, and the steps at which they have them."""

    name: str
    kind: str
    steps: tuple[int, ...]

    @property
    def is_alone(self) -> bool:
        """Return whether there is nothing to choose among the steps."""
        return len(self.steps) < 2


def media_of(run: Run) -> QuerySet[MediaItem]:
    """The media of a run that count, by name and step."""
    return MediaItem.objects.filter(_counts(run), run=run).select_related("content", "writer")


def _counts(run: Run) -> Q:
    """The condition for what no later start has replaced."""
    starts = (
        Writer.objects.filter(run=run)
        .values_list("attempt")
        .annotate(first=Min("first_step"))
        .order_by("attempt")
    )
    firsts = [(attempt, first) for attempt, first in starts if first is not None]
    condition, following = Q(), None
    for attempt, first in reversed(firsts):
        if following is not None:
            condition &= Q(writer__attempt__gt=attempt) | Q(step__lt=following)
        following = first if following is None else min(first, following)
    return condition


def names_of(runs: Iterable[Run]) -> list[MediaName]:
    """The names under which any of these runs has media, each with the steps of all."""
    steps: dict[str, set[int]] = {}
    kinds: dict[str, str] = {}
    for run in runs:
        for name, kind, step in media_of(run).values_list("name", "kind", "step").distinct():
            steps.setdefault(name, set()).add(step)
            kinds.setdefault(name, kind)
    return [MediaName(name, kinds[name], tuple(sorted(steps[name]))) for name in sorted(steps)]


def runs_with_media(runs: Iterable[Run]) -> set[UUID]:
    """The ids of those of these runs that have media."""
    ids = MediaItem.objects.filter(run__in=[run.pk for run in runs]).order_by()
    return set(ids.values_list("run_id", flat=True).distinct())


def items_at(run: Run, name: str, step: int) -> list[MediaItem]:
    """The media of this name at the step, or at the last step before it that has some."""
    mine = media_of(run).filter(name=name)
    last = mine.filter(step__lte=step).order_by("-step").values_list("step", flat=True).first()
    return [] if last is None else list(mine.filter(step=last).order_by("writer__rank", "id"))


def nearest(steps: Sequence[int], step: int) -> int:
    """The index of the last of some sorted steps that is not after `step`; 0 if all are."""
    return max(0, bisect_right(steps, step) - 1)
