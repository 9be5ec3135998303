"""The head of a run's page: verdict, overflow, alerts, scores and progress."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.utils import timezone

from fp8scope_dashboard.alerts.models import Alert, AlertState, Severity
from fp8scope_dashboard.alerts.services import unjudged
from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.analysis.coverage import in_full, in_short, is_dead
from fp8scope_dashboard.analysis.models import EvaluationComparison
from fp8scope_dashboard.analysis.verdict_coverage import judged_now, standing_now
from fp8scope_dashboard.cold_store.errors import ColdStoreError
from fp8scope_dashboard.pages.badges import Badge, loss_badge
from fp8scope_dashboard.pages.formatting import NOTHING, difference
from fp8scope_dashboard.pages.settled import kept_or_read
from fp8scope_dashboard.runs.models import Run, RunState
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.cold.bodies import explained

WORST = 3
# All tensors of the largest run.
EVERY_TENSOR = 20_000
OPEN_ALERTS_SHOWN = 3
# Of these open alerts the critical ones are shown first.
LATEST_ALERTS = 100

HOW_TO_SET_BASELINE = 'baseline="bf16" in fp8scope.attach or fp8scope.init, or fp8scope run --baseline bf16'
"""The way to set a run's baseline, for messages."""


@dataclass(frozen=True, kw_only=True)
class ShownVerdict:
    """The verdict on a run's loss, prepared for the page."""

    badge: Badge
    # As programs read it (see `Judgement`); empty without a comparison.
    verdict: str = ""
    measured: str = ""
    explanation: str = ""
    # Why the verdict does not cover the whole run; empty if it does.
    reason: str = ""
    # The part of the run that the verdict covers, as a sentence and in short.
    coverage: str = ""
    share: str = ""
    final: bool = False
    delta: float | None = None
    tolerance: float | None = None
    margin: float | None = None
    interval: tuple[float, float] | None = None
    smallest_detectable: float | None = None
    unit: str = "relative"
    warnings: tuple[str, ...] = ()
    baseline: str = ""
    seeds: int = 0
    so_far: bool = False
    # The run's own difference; delta and badge are those of its group, if that has several runs.
    own: float | None = None
    members: tuple[Mapping[str, Any], ...] = ()
    has_left: bool = False

    @property
    def runs(self) -> int:
        """The number of runs of the group that were compared."""
        return max(1, sum(1 for member in self.members if member["difference"] is not None))

    @property
    def is_of_group(self) -> bool:
        """Return whether the verdict is that of several runs."""
        return len(self.members) > 1

    @property
    def left(self) -> list[Mapping[str, Any]]:
        """The runs that left their group."""
        return [member for member in self.members if member["left"]] if self.is_of_group else []

    @property
    def own_left(self) -> bool:
        """Return whether this run is one of them."""
        return self.is_of_group and self.has_left

    @property
    def own_in_words(self) -> str:
        """The run's own difference, or why it has none."""
        if self.own is None:
            return "not finite" if self.has_left else NOTHING
        return difference(self.own, self.unit, signed=True)

    @property
    def gauge_label(self) -> str:
        """Return what the gauge shows, for readers of the screen."""
        delta = difference(self.delta, self.unit, signed=True)
        return f"Delta {delta}, tolerance plus or minus {difference(self.tolerance, self.unit)}"

    @property
    def gauge(self) -> Gauge | None:
        """The position of delta relative to the tolerance; None without both."""
        if self.delta is None or not self.tolerance:
            return None
        return Gauge.of(self.delta, self.tolerance, self.interval)


@dataclass(frozen=True)
class Gauge:
    """Positions on a bar from -3 to +3 tolerances, in per cent of its width."""

    low: float
    high: float
    point: float
    off_scale: bool
    whisker: tuple[float, float] | None

    REACH = 3.0

    @property
    def whisker_style(self) -> str:
        """The position of the whisker as CSS; empty without one."""
        if self.whisker is None:
            return ""
        start, width = self.whisker
        return f"left:{start:.2f}%;width:{width:.2f}%"

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
    """A tensor that overflows, with its rate."""

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


@dataclass(frozen=True, kw_only=True)
class RunHead:
    """The content of the head of the page."""

    run: Run
    verdict: ShownVerdict
    overflow: Overflow | None
    # The reason that old values are not shown; empty if they are.
    notice: str = ""
    # The run ended before its planned end, so nothing about it is shown as good.
    is_dead: bool = False
    alerts: list[Alert] = field(default_factory=list)
    open_alerts: int = 0
    # What the rules cannot judge, and why.
    unjudged: list[str] = field(default_factory=list)
    scores: list[EvaluationComparison] = field(default_factory=list)

    @property
    def more_alerts(self) -> int:
        return self.open_alerts - len(self.alerts)

    @property
    def lost(self) -> int | None:
        """Points that were sent but not stored; None until the run has finished."""
        if self.run.points_sent is None:
            return None
        return max(0, self.run.points_sent - self.run.points_stored)


@dataclass(frozen=True)
class Progress:
    """The progress of a run: per cent of the planned steps, None if there is no plan, and seconds so far."""

    percent: float | None
    seconds: float
    is_live: bool


def progress_of(run: Run) -> Progress:
    """The progress of a run, from its row."""
    is_live = run.state == RunState.RUNNING
    end = run.finished_at or (timezone.now() if is_live else run.heartbeat_at)
    percent = None
    if run.total_steps and run.last_step is not None:
        percent = min(100.0, 100.0 * run.last_step / run.total_steps)
    return Progress(percent, (end - run.created_at).total_seconds(), is_live)


def summarise(run: Run) -> RunHead:
    """Read a run's summary. The number of queries does not depend on the run's length."""
    ended_badly = is_dead(standing_now(run))
    pending = Alert.objects.filter(run=run, state=AlertState.OPEN)
    latest_alerts = list(pending.order_by("-step")[:LATEST_ALERTS])
    critical_first = sorted(latest_alerts, key=lambda alert: alert.severity != Severity.CRITICAL)
    latest = EvaluationComparison.objects.filter(run=run).order_by("name", "metric", "-step")
    overflow, notice = None, ""
    try:
        overflow = _overflow(run, ended_badly)
    except ColdStoreError as error:
        notice = explained(error)
    return RunHead(
        run=run,
        verdict=verdict_of(run, baseline_groups(run.project_id)),
        overflow=overflow,
        notice=notice,
        is_dead=ended_badly,
        alerts=critical_first[:OPEN_ALERTS_SHOWN],
        open_alerts=len(latest_alerts) if len(latest_alerts) < LATEST_ALERTS else pending.count(),
        unjudged=unjudged(run),
        scores=list(latest.distinct("name", "metric")[:OPEN_ALERTS_SHOWN]),
    )


def verdict_of(run: Run, baselines: Collection[str]) -> ShownVerdict:
    """The stored verdict on a run's loss, or why there is none. `baselines`: see baseline_groups."""
    comparison = getattr(run, "comparison", None)
    if comparison is None:
        is_baseline = bool(run.group) and not run.baseline and run.group in baselines
        badge = loss_badge(None, has_baseline=bool(run.baseline), is_baseline=is_baseline)
        return ShownVerdict(
            badge=badge, explanation=_missing_verdict_reason(run, is_baseline), baseline=run.baseline
        )
    result: Mapping[str, Any] = comparison.result
    interval = result.get("interval")
    judgement = judged_now(run, comparison)
    share = in_short(judgement.coverage)
    return ShownVerdict(
        badge=loss_badge(judgement, has_baseline=True, is_baseline=False, within=_within(result)),
        verdict=judgement.verdict,
        measured=judgement.measured,
        explanation=str(result.get("explanation", "")),
        reason=judgement.reason,
        coverage=in_full(judgement.coverage),
        share=f"so far: {share}" if share and run.state == RunState.RUNNING else share,
        final=judgement.final,
        delta=result.get("delta"),
        tolerance=result.get("tolerance"),
        margin=result.get("margin"),
        interval=(interval[0], interval[1]) if interval else None,
        smallest_detectable=result.get("smallest_detectable"),
        unit=str(result.get("unit", "relative")),
        warnings=tuple(result.get("warnings", ())),
        baseline=comparison.baseline,
        seeds=int(result.get("k_baseline") or 0),
        so_far=run.state == RunState.RUNNING,
        own=comparison.own_difference if "own" in result else _delta_of_one(result),
        members=tuple((result.get("group") or {}).get("runs", ())),
        has_left=bool((result.get("own") or {}).get("left")),
    )


def _within(result: Mapping[str, Any]) -> str:
    """The margin of an equivalence, in words, if it is not the project's."""
    judged, margin = result.get("judged_margin"), result.get("margin")
    if not judged or not margin or judged <= margin:
        return ""
    return f"{100.0 * judged:.3g} %" if result.get("unit") == "relative" else f"{judged:.3g}"


def _delta_of_one(result: Mapping[str, Any]) -> float | None:
    """The delta of a comparison by an earlier version, if it is that of a single run."""
    return result.get("delta") if result.get("k_run") == 1 else None


def _missing_verdict_reason(run: Run, is_baseline: bool) -> str:
    if is_baseline:
        return "Other runs are compared with this group."
    if run.baseline:
        label = comparison_runs.baseline_label(run)
        return f"The comparison with “{label}” starts once both sides have logged a loss."
    if run.precision == "bf16":
        if run.group:
            return f"To compare an FP8 run with this group, set its baseline=“{run.group}”."
        return "To compare FP8 runs with this run, give the BF16 runs a group (group=“bf16”)."
    return f"To get a verdict, set the group of BF16 runs to compare with: {HOW_TO_SET_BASELINE}."


def baseline_groups(project_id: int) -> set[str]:
    """The groups that are the baseline of a run of the project."""
    named = Run.objects.filter(project_id=project_id).exclude(baseline="").order_by()
    return set(named.values_list("baseline", flat=True).distinct())


def _overflow(run: Run, ended_badly: bool) -> Overflow | None:
    name = queries.overflow_name(queries.available_statistics(run.statistics))
    if name is None:
        return None
    # Thousands of tensors take a third of the page's time.
    observed, overflowing, first = kept_or_read(run, f"top:{name}", lambda: _overflowing(run, name))
    if not observed:
        return None
    worst = [Worst(*tensor) for tensor in first]
    return Overflow(
        observed, overflowing, worst, _overflow_badge(worst[0].rate if worst else 0.0, ended_badly)
    )


def _overflowing(run: Run, statistic: str) -> tuple[int, int, list[tuple[int, str, float]]]:
    """The numbers of tensors that are observed and that overflow, and those that overflow most."""
    ranked = queries.top(run.id, statistic, EVERY_TENSOR)
    overflowing = [tensor for tensor in ranked if tensor[2] > 0]
    return len(ranked), len(overflowing), overflowing[:WORST]


def _overflow_badge(rate: float, ended_badly: bool) -> Badge:
    """The badge of a rate. The thresholds are that of the default rule (0.1 %) and a tenth of it."""
    if rate >= 1e-3:
        return Badge("Overflowing", "danger", "cross")
    if rate >= 1e-4:
        return Badge("Some overflow", "warning", "alert")
    return Badge("In range", "neutral", "minus") if ended_badly else Badge("In range", "good", "check")
