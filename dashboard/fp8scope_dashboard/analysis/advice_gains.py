"""The gain of following advice: the time of a step of a run with a finding, against a later run without it.

A later run belongs to the same lineage if it has the same group, comes from the earlier run, or is another
start of the same script. Findings that end in the same run share one gain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final
from uuid import UUID

from django.db.models import Q, QuerySet

from fp8scope_dashboard.analysis.quantities import ratios
from fp8scope_dashboard.analysis.quantity_comparisons import measured
from fp8scope_dashboard.analysis.reading import read_arms
from fp8scope_dashboard.runs.advice import ADVICE, StoredFinding, advice_of
from fp8scope_dashboard.runs.models import Run, RunState

MAX_RELATIVES: Final = 24
"""The nearest runs before and after a run that are looked at."""


@dataclass(frozen=True, kw_only=True)
class MeasuredGain:
    """The findings that `before` has and `after` has not, and the share of a step's time that was saved.

    Attributes:
        gain: 1 - (time after / time before), negative if steps became longer; None if it cannot be told.
        interval: of `gain`, at 95 %; None without one.
        low, high: what the findings together were expected to gain.
    """

    before: Run
    after: Run
    findings: tuple[StoredFinding, ...]
    gain: float | None
    interval: tuple[float, float] | None
    low: float
    high: float

    @property
    def is_expected(self) -> bool | None:
        """True if the gain can lie in the expected range; None if it cannot be told."""
        if self.gain is None:
            return None
        least, most = self.interval or (self.gain, self.gain)
        return most >= self.low and least <= self.high


def gains_of(run: Run) -> list[MeasuredGain]:
    """Return what ended with this run, and what ended after it: at most one gain each way."""
    if advice_of(run.environment) is None or run.state == RunState.RUNNING:
        return []
    runs = _lineage(run)
    before = runs.filter(created_at__lt=run.created_at).order_by("-created_at")[:MAX_RELATIVES]
    after = runs.filter(created_at__gt=run.created_at).order_by("created_at")[:MAX_RELATIVES]
    earlier = next((other for other in before if _ended(other, run)), None)
    later = next((other for other in after if _ended(run, other)), None)
    pairs = [(earlier, run)] if earlier is not None else []
    pairs += [(run, later)] if later is not None else []
    return [_gain(*pair) for pair in pairs]


def _lineage(run: Run) -> QuerySet[Run]:
    """Return the other checked runs of the lineage that do not train any more."""
    lineage = Q(parent=str(run.pk))
    if run.group:
        lineage |= Q(group=run.group)
    if run.parent:
        lineage |= Q(parent=run.parent) | Q(pk__in=_ids(run.parent))
    if script := _script(run.environment):
        lineage |= Q(environment__command__startswith=script[0])
    runs = Run.objects.filter(lineage, project_id=run.project_id, environment__has_key=ADVICE)
    return runs.exclude(pk=run.pk).exclude(state=RunState.RUNNING).select_related("project")


def _script(environment: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the script of a run and its folder; nothing if the run does not say."""
    command, folder = environment.get("command"), environment.get("working_directory", "")
    return (command.split(" ", 1)[0], str(folder)) if isinstance(command, str) and command else ()


def _ids(text: str) -> Sequence[str]:
    """Return the id of a run as a list; empty if it is none."""
    try:
        return [str(UUID(text))]
    except ValueError:
        return []


def _ended(before: Run, after: Run) -> tuple[StoredFinding, ...]:
    """Return the findings of a run that another does not have. Other scripts and devices tell nothing."""
    old, new = advice_of(before.environment), advice_of(after.environment)
    scripts = {_script(run.environment) for run in (before, after)} - {()}
    if old is None or new is None or len(scripts) > 1 or _devices(before) != _devices(after):
        return ()
    practices = {finding.practice for finding in new.findings}
    return tuple(finding for finding in old.findings if finding.practice not in practices)


def _devices(run: Run) -> tuple[Any, ...]:
    names = ("gpu", "gpu_count", "world_size")
    return tuple(run.environment.get(name) for name in names)


def _gain(before: Run, after: Run) -> MeasuredGain:
    findings = _ended(before, after)
    ours, theirs = read_arms([after.pk], [before.pk])
    ratio = ratios.mean_time(measured(ours[0]), measured(theirs[0]))
    interval = None if ratio.interval is None else (1 - ratio.interval[1], 1 - ratio.interval[0])
    return MeasuredGain(
        before=before,
        after=after,
        findings=findings,
        gain=None if ratio.value is None else 1 - ratio.value,
        interval=interval,
        low=max(finding.low for finding in findings),
        # What is left after each of them; savings of one time do not add up to more than that.
        high=1 - prod(1 - finding.high for finding in findings),
    )
