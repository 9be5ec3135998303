"""Try a rule on past runs: what it would have reported, from the stored rows and the same detectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from fp8scope_dashboard.accounts.models import Project, User
from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.custom_rules.documents import RuleDocumentError, parse
from fp8scope_dashboard.alerts.detection import baselines, generations
from fp8scope_dashboard.alerts.detection import streams as detection
from fp8scope_dashboard.alerts.detection.generations import WriterStream
from fp8scope_dashboard.alerts.detection.run_conditions import ConditionFacts, run_failed, run_finished
from fp8scope_dashboard.alerts.detectors import ConditionChange
from fp8scope_dashboard.alerts.models import Rule, RuleKind, RuleTrial, TrialState
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries

MAX_RUNS: Final = 20
MAX_ALERTS: Final = 50
# Trials of a project that are kept.
MAX_TRIALS: Final = 20
CHUNKS_AT_ONCE: Final = 16
# The worker of an older trial that has no result was killed.
LOST_AFTER: Final = timedelta(minutes=15)
BASELINE: Final = "above_baseline"
# The key under which the states of an unsaved rule are kept.
UNSAVED: Final = 0

Report = Callable[[float], None]

# How a run ended is stored with it.
ENDS: Final = {"run_failed": run_failed, "run_finished": run_finished}
# Why rules cannot be tried on stored rows.
NOT_STORED: Final = {
    "run_silent": "it depends on when the run was heard from, which is not stored",
    "rank_behind": "it depends on when the rows of each rank arrived, which is not stored",
    "scale_disagreement": "it compares ranks while they train; a trial reads one rank after the other",
}


@dataclass(frozen=True)
class WouldBe:
    """An alert that the rule would have opened; `ended_step` is None if its condition had not ended."""

    onset_step: int
    step: int
    ended_step: int | None
    message: str


def can_be_tried(rule: Rule) -> bool:
    """Return whether a rule depends only on what is stored."""
    detectors = (*detection.LOSS_DETECTORS, *detection.SCALAR_DETECTORS, *detection.TENSOR_DETECTORS, *ENDS)
    return rule.kind in (*detectors, BASELINE, RuleKind.THRESHOLD)


def begin(project: Project, document: dict[str, Any], run_ids: Sequence[UUID], user: User) -> RuleTrial:
    """Store a trial that is to be run. Older trials of the project are deleted.

    Raises:
        RuleDocumentError: if the rule is invalid or cannot be tried, or there are no runs.
    """
    rule = parse(project, document).rule
    if not can_be_tried(rule):
        raise RuleDocumentError((), f"This rule cannot be tried: {NOT_STORED[rule.kind]}.")
    readable = Run.objects.filter(project=project, pk__in=list(run_ids)[:MAX_RUNS]).values_list(
        "pk", flat=True
    )
    if not readable:
        raise RuleDocumentError((), f"Choose 1 to {MAX_RUNS} runs to try the rule on.")
    trial = RuleTrial.objects.create(
        project=project, document=document, runs=[str(run_id) for run_id in readable], created_by=user
    )
    newest = RuleTrial.objects.filter(project=project).order_by("-id").values_list("pk", flat=True)
    RuleTrial.objects.filter(project=project).exclude(pk__in=list(newest[:MAX_TRIALS])).delete()
    return trial


def carry_out(trial_id: int) -> None:
    """Run a trial that nobody runs yet, and store its result."""
    waiting = RuleTrial.objects.filter(pk=trial_id, state=TrialState.WAITING)
    if waiting.update(state=TrialState.RUNNING) != 1:
        return
    trial = RuleTrial.objects.select_related("project").get(pk=trial_id)
    stored = RuleTrial.objects.filter(pk=trial_id)
    try:
        rule = parse(trial.project, trial.document).rule
        result = []
        for number, run_id in enumerate(trial.runs):
            run = Run.objects.select_related("project").filter(pk=run_id).first()
            if run is None:
                continue

            def report(share: float, done: int = number) -> None:
                stored.update(share=(done + share) / len(trial.runs))

            alerts = replay(run, rule, report)
            result.append(
                {"run": run_id, "name": run.name, "alerts": [asdict(alert) for alert in alerts[:MAX_ALERTS]]}
                | {"count": len(alerts)}
            )
    except RuleDocumentError as error:
        stored.update(state=TrialState.FAILED, problem=str(error)[:500])
    except Exception:
        stored.update(state=TrialState.FAILED, problem="The trial failed; see the worker’s log.")
        raise
    else:
        stored.update(state=TrialState.DONE, share=1.0, result=result)


def replay(run: Run, rule: Rule, report: Report = lambda share: None) -> list[WouldBe]:
    """The alerts that a rule would have opened in a run, had it been there from the beginning.

    As in the evaluation, one alert is open at a time in each start of the training.

    Args:
        rule: need not be saved.
        report: called with the share that is done, from 0 to 1.
    """
    rule.pk = rule.pk or UNSAVED
    if rule.kind in ENDS:
        heard = run.heartbeat_at.timestamp()
        facts = ConditionFacts(
            state=run.state, last_step=run.last_step or 0, now=heard, heartbeat=heard, error=run.error
        )
        return _alerts([("", finding) for finding in ENDS[rule.kind]({}, facts, {})[1]])
    streams = generations.streams_of(run)
    if rule.kind == BASELINE:
        if not run.baseline:
            return []
        numbers = rules.saved_parameters(rule.kind, rule.parameters)
        numbers |= {"margin": run.equivalence_margin, "alpha": run.project.alpha}
        return _alerts([("", finding) for finding in baselines.follow(run, {}, numbers).findings])
    findings = []
    for number, stream in enumerate(streams):
        for share, generation, finding in _findings(run, rule, stream):
            if finding is None:
                report((number + share) / len(streams))
            else:
                findings.append((generation, finding))
    return _alerts(findings)


def _findings(
    run: Run, rule: Rule, stream: WriterStream
) -> Iterator[tuple[float, str, ConditionChange | None]]:
    """The findings in one stream, each with the share that is read; None after each piece."""
    scalars, statistics = detection.columns_read([rule])
    facts = detection.facts_of(run, stream.catalogue)
    position: dict[str, Any] = {}
    states: dict[str, Any] = {}
    last = max(1, stream.last_step or 1)
    seq, returns = 0, 0
    while pieces := queries.stream(
        run.id, stream.writer, seq, CHUNKS_AT_ONCE, scalars=scalars, statistics=statistics
    ):
        for _, data in pieces:
            position, segments = generations.segments(position, data.steps)
            for segment in segments:
                if segment.returned_to is not None:
                    states, returns = {}, returns + 1
                rows = data.rows(slice(segment.first, segment.last))
                share = min(1.0, int(data.steps[-1]) / last)
                for _, finding in detection.detect([rule], states, rows, facts, leads=stream.leads):
                    yield share, stream.generation(returns), finding
            yield min(1.0, int(data.steps[-1]) / last), "", None
        seq = pieces[-1][0] + 1


def _alerts(findings: Sequence[tuple[str, ConditionChange]]) -> list[WouldBe]:
    alerts: list[WouldBe] = []
    for generation in dict.fromkeys(generation for generation, _ in findings):
        of_generation = [finding for rule, finding in findings if rule == generation and not finding.update]
        holders: set[int] = set()
        for finding in sorted(of_generation, key=lambda pair: (pair.step, pair.opened)):
            if finding.opened:
                if not holders:
                    alerts.append(WouldBe(finding.onset_step, finding.step, None, finding.message))
                holders.add(finding.onset_step)
            elif finding.onset_step in holders:
                holders.discard(finding.onset_step)
                if not holders:
                    opened = alerts.pop()
                    alerts.append(WouldBe(opened.onset_step, opened.step, finding.step, opened.message))
    return sorted(alerts, key=lambda alert: (alert.step, alert.onset_step))
