"""What the head of a run's page says: in ten seconds, whether and where FP8 hurts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.utils import timezone

from fp8scope_dashboard.alerts.models import Event, EventState, Severity
from fp8scope_dashboard.analysis.coverage import in_full, in_short, is_dead
from fp8scope_dashboard.analysis.judging import judged_now, standing_now
from fp8scope_dashboard.analysis.models import EvaluationComparison
from fp8scope_dashboard.pages.verdicts import Badge, loss_badge
from fp8scope_dashboard.runs.models import Run, RunState
from fp8scope_dashboard.telemetry import queries

WORST = 3
# All tensors of the largest run.
EVERY_TENSOR = 20_000
OPEN_ALERTS_SHOWN = 3

NAME_A_BASELINE = 'baseline="bf16" in fp8scope.attach or fp8scope.init, or fp8scope run --baseline bf16'
"""How a run says what it is compared with."""


@dataclass(frozen=True)
class Verdict:
    """The loss against the baseline, ready to be shown."""

    badge: Badge
    explanation: str = ""
    # Why the verdict does not stand for the whole run; empty for a final one.
    reason: str = ""
    # What it judges, of how much: a sentence, and in short.
    coverage: str = ""
    share: str = ""
    final: bool = False
    delta: float | None = None
    tolerance: float | None = None
    margin: float | None = None
    interval: tuple[float, float] | None = None
    baseline: str = ""
    seeds: int = 0
    so_far: bool = False

    @property
    def gauge(self) -> Gauge | None:
        """Where delta lies relative to the tolerance; None without both."""
        if self.delta is None or not self.tolerance:
            return None
        return Gauge.of(self.delta, self.tolerance, self.interval)


@dataclass(frozen=True)
class Gauge:
    """Places on a bar from -3 to +3 tolerances, in per cent of its width."""

    low: float
    high: float
    place: float
    off_scale: bool
    whisker: tuple[float, float] | None

    REACH = 3.0

    @classmethod
    def of(cls, delta: float, tolerance: float, interval: tuple[float, float] | None) -> Gauge:
        """Scale delta and its interval to the bar."""

        def at(value: float) -> float:
            return round(50.0 + 50.0 * max(-1.0, min(1.0, value / tolerance / cls.REACH)), 2)

        whisker = None
        if interval is not None:
            whisker = (at(interval[0]), round(at(interval[1]) - at(interval[0]), 2))
        return cls(at(-tolerance), at(tolerance), at(delta), abs(delta) > cls.REACH * tolerance, whisker)


@dataclass(frozen=True)
class Worst:
    """A tensor that overflows."""

    index: int
    name: str
    rate: float


@dataclass(frozen=True)
class Overflow:
    """Overflow over the last hundred steps."""

    observed: int
    overflowing: int
    worst: list[Worst]
    badge: Badge


@dataclass(frozen=True)
class Summary:
    """All of it."""

    run: Run
    verdict: Verdict
    overflow: Overflow | None
    # The run ended without doing all it had planned: nothing about it is shown as good.
    is_dead: bool = False
    events: list[Event] = field(default_factory=list)
    open_events: int = 0
    scores: list[EvaluationComparison] = field(default_factory=list)
    now: datetime = field(default_factory=timezone.now)

    @property
    def progress(self) -> float | None:
        """Per cent of the steps done; None where nobody said how many there will be."""
        if not self.run.total_steps or self.run.last_step is None:
            return None
        return min(100.0, 100.0 * self.run.last_step / self.run.total_steps)

    @property
    def more_events(self) -> int:
        return self.open_events - len(self.events)

    @property
    def is_live(self) -> bool:
        return self.run.state == RunState.RUNNING

    @property
    def lost(self) -> int | None:
        """Points sent and not stored, known when the run has finished."""
        if self.run.points_sent is None:
            return None
        return max(0, self.run.points_sent - self.run.points_stored)

    @property
    def duration(self) -> float:
        end = self.run.finished_at or (self.now if self.is_live else self.run.heartbeat_at)
        return (end - self.run.created_at).total_seconds()


def summarise(run: Run) -> Summary:
    """Gather a run's summary; a handful of queries, whatever the run's length."""
    ended_badly = is_dead(standing_now(run))
    pending = Event.objects.filter(run=run, state=EventState.OPEN)
    critical_first = sorted(
        pending.order_by("-step")[:100], key=lambda event: event.severity != Severity.CRITICAL
    )
    latest = EvaluationComparison.objects.filter(run=run).order_by("name", "metric", "-step")
    return Summary(
        run=run,
        verdict=verdict_of(run, baseline_groups(run.project_id)),
        overflow=_overflow(run, ended_badly),
        is_dead=ended_badly,
        events=critical_first[:OPEN_ALERTS_SHOWN],
        open_events=pending.count(),
        scores=list(latest.distinct("name", "metric")[:OPEN_ALERTS_SHOWN]),
    )


def verdict_of(run: Run, baselines: Collection[str]) -> Verdict:
    """The verdict on a run's loss as stored, or why there is none. `baselines`: see baseline_groups."""
    comparison = getattr(run, "comparison", None)
    if comparison is None:
        is_baseline = bool(run.group) and not run.baseline and run.group in baselines
        badge = loss_badge(None, has_baseline=bool(run.baseline), is_baseline=is_baseline)
        return Verdict(badge, _why_none(run, is_baseline), baseline=run.baseline)
    result: Mapping[str, Any] = comparison.result
    interval = result.get("interval")
    judgement = judged_now(run, comparison)
    share = in_short(judgement.coverage)
    return Verdict(
        badge=loss_badge(judgement, has_baseline=True, is_baseline=False),
        explanation=str(result.get("explanation", "")),
        reason=judgement.reason,
        coverage=in_full(judgement.coverage),
        share=f"so far: {share}" if share and run.state == RunState.RUNNING else share,
        final=judgement.final,
        delta=result.get("delta"),
        tolerance=result.get("tolerance"),
        margin=result.get("margin"),
        interval=(interval[0], interval[1]) if interval else None,
        baseline=comparison.baseline,
        seeds=int(result.get("k_baseline") or 0),
        so_far=run.state == RunState.RUNNING,
    )


def _why_none(run: Run, is_baseline: bool) -> str:
    if is_baseline:
        return "Other runs are compared with this group."
    if run.baseline:
        return f"The comparison with “{run.baseline}” comes a moment after both sides have logged a loss."
    if run.precision == "bf16":
        if run.group:
            return f"An FP8 run is compared with this group when it names it: baseline=“{run.group}”."
        return "Give the BF16 runs a group (group=“bf16”), and FP8 runs can be compared with it."
    return f"Name the group of BF16 runs to compare with: {NAME_A_BASELINE}."


def baseline_groups(project_id: int) -> set[str]:
    """The groups that some run of the project is compared with."""
    named = Run.objects.filter(project_id=project_id).exclude(baseline="").order_by()
    return set(named.values_list("baseline", flat=True).distinct())


def _overflow(run: Run, ended_badly: bool) -> Overflow | None:
    if not {"saturated", "nonfinite", "numel"} <= set(run.statistics):
        return None
    ranked = queries.top(run.id, "overflow_rate", EVERY_TENSOR)
    overflowing = sum(1 for _, _, rate in ranked if rate > 0)
    worst = [Worst(index, name, rate) for index, name, rate in ranked[:WORST] if rate > 0]
    return Overflow(
        len(ranked), overflowing, worst, _overflow_badge(worst[0].rate if worst else 0.0, ended_badly)
    )


def _overflow_badge(rate: float, ended_badly: bool) -> Badge:
    """In words; the thresholds are those of the default rule (0.1 %) and a tenth of it."""
    if rate >= 1e-3:
        return Badge("Overflowing", "danger", "cross")
    if rate >= 1e-4:
        return Badge("Some overflow", "warning", "alert")
    return Badge("In range", "neutral", "minus") if ended_badly else Badge("In range", "good", "check")
