"""Suggest a run's baseline and its seed group from the configurations. A suggestion is used only by a person.

The pure functions take `Candidate`, what `runs.configuration` derives from a run; the queries below read at
most MAX_CANDIDATES of them.
"""

from __future__ import annotations

import os.path
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from fp8scope_dashboard.runs.models import HIGH_PRECISIONS, Relation, Run, RunState

# Precisions of a baseline, the best first.
# Runs with an equal configuration that are considered: the newest, if there are more.
MAX_CANDIDATES = 500


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A run as suggestions see it. `digest` is equal for equal configurations; empty if nothing is known."""

    id: str
    name: str
    created_at: datetime
    digest: str
    precision: str = "unknown"
    recipe: str = ""
    group: str = ""
    baseline: str = ""
    seed: int | None = None
    total_steps: int | None = None
    finished: bool = False


@dataclass(frozen=True)
class Suggestion:
    """A suggested baseline: the name of a group, or the id of a run without one."""

    value: str
    label: str
    precision: str
    runs: int


@dataclass(frozen=True)
class SuggestedGroup:
    """A suggested seed group: its name, and the ids of the runs that are in no group yet."""

    name: str
    ids: tuple[str, ...]
    # Runs that already are in the group.
    members: int = 0


def suggest(run: Candidate, others: Iterable[Candidate]) -> Suggestion | None:
    """The baseline of a run: the runs in BF16 (else FP16, else FP32) with the same configuration otherwise.

    Configurations are equal but for precision, recipe, seed, names, paths and times. Of several groups the
    one with the most finished runs is suggested, then the one with the most runs, then the newest. None for
    runs that have a baseline, an unknown precision, or one of HIGH_PRECISIONS themselves.
    """
    if run.baseline or run.precision in ("unknown", *HIGH_PRECISIONS):
        return None
    arms: dict[tuple[str, str], list[Candidate]] = defaultdict(list)
    for other in others:
        if other.precision in HIGH_PRECISIONS and _same_training(run, other):
            if other.group and other.group == run.group:
                continue
            arms[other.precision, other.group or other.id].append(other)
    if not arms:
        return None
    (precision, value), runs = min(arms.items(), key=lambda arm: _rank(arm[0][0], arm[1]))
    return Suggestion(value, runs[0].group or runs[0].name, precision, len(runs))


def _rank(precision: str, runs: list[Candidate]) -> tuple[int, int, int, float]:
    newest = max(other.created_at for other in runs).timestamp()
    finished = sum(other.finished for other in runs)
    return HIGH_PRECISIONS.index(precision), -finished, -len(runs), -newest


def suggest_group(
    run: Candidate, others: Iterable[Candidate], taken: Collection[str] = ()
) -> SuggestedGroup | None:
    """The seed group of a run without one: runs with the same configuration, precision, recipe and baseline,
    and another seed.

    An existing group of such runs is suggested first. `taken` are names that a new group cannot have.
    """
    if run.group or run.seed is None:
        return None
    mates = [
        other
        for other in others
        if _same_training(run, other)
        and (run.precision, run.recipe, run.baseline) == (other.precision, other.recipe, other.baseline)
        and other.seed not in (None, run.seed)
    ]
    groups = [other.group for other in mates if other.group]
    if groups:
        name = max(sorted(set(groups)), key=groups.count)
        return SuggestedGroup(name, (run.id,), groups.count(name))
    by_seed = {
        other.seed: other
        for other in sorted(mates, key=lambda candidate: (candidate.created_at, candidate.id))
    }
    if not by_seed:
        return None
    names = [run.name, *(other.name for other in by_seed.values())]
    return SuggestedGroup(
        _unused(_common_name(names) or run.precision, taken),
        (run.id, *(other.id for other in by_seed.values())),
    )


def _same_training(run: Candidate, other: Candidate) -> bool:
    if run.id == other.id or not run.digest or run.digest != other.digest:
        return False
    return run.total_steps == other.total_steps or None in (run.total_steps, other.total_steps)


def _common_name(names: Collection[str]) -> str:
    """Return what the names begin with, without the word for the seed."""
    common = os.path.commonprefix(list(names))
    return re.sub(r"[\W_]*(seed|s)?[\W_]*$", "", common, flags=re.IGNORECASE)[:100]


def _unused(name: str, taken: Collection[str]) -> str:
    return next(
        candidate
        for candidate in (name, *(f"{name}-{number}" for number in range(2, len(taken) + 3)))
        if candidate not in taken
    )


def suggested_baseline(run: Run) -> Suggestion | None:
    """The baseline that is suggested for a stored run."""
    if run.baseline or not run.config_digest:
        return None
    return suggest(_candidate(run), _equals(run))


def suggested_group(run: Run) -> SuggestedGroup | None:
    """The seed group that is suggested for a stored run."""
    if run.group or not run.config_digest:
        return None
    equals = _equals(run)
    suggested = suggest_group(_candidate(run), equals)
    if suggested is None or suggested.members:
        return suggested
    begins = Run.objects.filter(project_id=run.project_id, group__startswith=suggested.name)
    taken = set(begins.values_list("group", flat=True).distinct()[:MAX_CANDIDATES])
    return replace(suggested, name=_unused(suggested.name, taken))


def _equals(run: Run) -> list[Candidate]:
    """The newest runs of the project whose configuration is equal. A reference window is a part of a run."""
    same = Run.objects.filter(project_id=run.project_id, config_digest=run.config_digest).exclude(pk=run.pk)
    same = same.exclude(relation=Relation.REFERENCE)
    narrow = same.defer("config", "environment", "summary", "error", "last_scalars")
    return [_candidate(other) for other in narrow.order_by("-created_at", "id")[:MAX_CANDIDATES]]


def _candidate(run: Run) -> Candidate:
    recipe: Any = sorted(run.recipe.items())
    return Candidate(
        id=str(run.id),
        name=run.name,
        created_at=run.created_at,
        digest=run.config_digest,
        precision=run.precision,
        recipe=repr(recipe) if run.recipe else "",
        group=run.group,
        baseline=run.baseline,
        seed=run.seed,
        total_steps=run.total_steps,
        finished=run.state == RunState.FINISHED,
    )
