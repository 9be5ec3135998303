"""Read the facts of the onset strip of a run: alerts, diagnosis, comparison, changes and starts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any, Final

import numpy as np
from django.urls import reverse

from fp8scope_dashboard.alerts.beginnings import after_step, onset_of_further
from fp8scope_dashboard.alerts.models import Alert, AlertState
from fp8scope_dashboard.analysis.coverage import Standing
from fp8scope_dashboard.control.models import Command, CommandKind, Report, ReportKind, ResultState
from fp8scope_dashboard.diagnosis.conclusion import CAUSES
from fp8scope_dashboard.pages.charts.run_marks import annotated_step
from fp8scope_dashboard.pages.formatting import difference
from fp8scope_dashboard.pages.run.diagnosis import after_of
from fp8scope_dashboard.pages.run.onset_strip import (
    AlertFact,
    ChangeFact,
    DepartureFact,
    DiagnosisFact,
    StartFact,
    StripFacts,
    departure_of,
)
from fp8scope_dashboard.runs.console import last_exception
from fp8scope_dashboard.runs.models import Run, Writer
from fp8scope_dashboard.telemetry import queries

# The earliest, if there are more.
MAX_ALERTS: Final = 200
MAX_CHANGES: Final = 200
MAX_WRITERS: Final = 5_000
# A thinned line keeps the first NaN of each bucket.
LOSS_POINTS: Final = 1_000
TEXT_LENGTH: Final = 60

CALM_MARKS: Final = frozenset({"incident"})
_ENDINGS: Final[Mapping[Standing, str]] = {
    "failed": "the training script fails",
    "silent": "the run falls silent",
    "finished_early": "the run ends before its planned end",
}


def facts_of(run: Run, standing: Standing) -> StripFacts:
    """The facts of a run. The number of queries is bounded, and so is what they read."""
    ending = _ENDINGS.get(standing, "")
    return StripFacts(
        last_step=run.last_step,
        alerts=_alerts(run),
        diagnosis=_diagnosis(run),
        departure=_departure(run),
        nonfinite_step=_nonfinite_step(run),
        changes=[*_marks(run), *_windows(run), *_commands(run)],
        starts=_starts(run),
        ending=ending,
        ending_detail=failure_line(run) if standing == "failed" else "",
    )


_POSITION = "\n\nThe training was here:\n"


def last_line(text: str) -> str:
    """The last line of a traceback that is not empty: the exception.

    After SIGTERM the agent sends what happened, and below it where the training was.
    """
    why = text.partition(_POSITION)[0]
    return next((line.strip() for line in reversed(why.splitlines()) if line.strip()), "")


def failure_line(run: Run) -> str:
    """Return what a failed run died of, in one line.

    If the agent could not see it, as after `os._exit` or `kill -9`, it is the last exception that the console
    log has.
    """
    if "Traceback" in run.error or _POSITION in run.error:
        return last_line(run.error)
    return last_exception(run) or last_line(run.error)


def _alerts(run: Run) -> list[AlertFact]:
    alerts = Alert.objects.filter(run=run).order_by("onset_step", "id")[:MAX_ALERTS]
    slug = run.project.slug
    facts = []
    for alert in alerts:
        address = reverse("alert", args=[slug, alert.pk])
        facts += [_alert(alert, address), *_further(alert, address)]
    return facts


def _further(alert: Alert, address: str) -> list[AlertFact]:
    """Return what other rules found about the tensors of an alert: they saturate after their scale froze."""
    return [
        AlertFact(
            kind=further["kind"],
            onset=onset_of_further(further),
            severity=further["severity"],
            message=further["message"],
            address=address,
            name=further["title"],
            tensors=tuple(str(tensor["name"]) for tensor in further["tensors"]),
            tensors_over=int(further.get("tensors_over", len(further["tensors"]))),
            after=after_step(further, onset_of_further(further)),
            is_resolved=alert.state == AlertState.RESOLVED,
        )
        for further in alert.evidence.get("further", [])
        # Earlier versions kept no tensors.
        if further.get("tensors") and further["kind"] != alert.kind
    ]


def _alert(alert: Alert, address: str) -> AlertFact:
    tensors = alert.evidence.get("tensors") or []
    return AlertFact(
        kind=alert.kind,
        onset=alert.onset_step,
        severity=alert.severity,
        message=alert.message,
        address=address,
        name=alert.rule_name or str(alert.get_kind_display()).lower(),
        tensors=tuple(str(tensor["name"]) for tensor in tensors),
        tensors_over=int(alert.evidence.get("tensors_over", len(tensors))),
        after=alert.after_step,
        is_resolved=alert.state == AlertState.RESOLVED,
    )


def _diagnosis(run: Run) -> DiagnosisFact | None:
    stored = getattr(run, "diagnosis", None)
    onset = stored.result.get("onset") if stored is not None else None
    if stored is None or not stored.cause or onset is None:
        return None
    decided_by = stored.result.get("decided_by")
    decisive = [finding for finding in stored.result.get("findings", []) if finding["step"] == decided_by]
    return DiagnosisFact(
        cause=CAUSES.get(stored.cause, stored.cause),
        outcome=stored.outcome,
        onset=int(onset),
        sentence=stored.sentence,
        address=reverse("diagnosis", args=[run.project.slug, run.pk]),
        after=after_of(decisive[0]) if decisive else None,
    )


def _departure(run: Run) -> DepartureFact | None:
    comparison = getattr(run, "comparison", None)
    result: Mapping[str, Any] = comparison.result if comparison is not None else {}
    address = f"{reverse('compare', args=[run.project.slug])}?runs={run.pk}"
    if onset := result.get("onset"):
        detail = (
            "From about this step on the loss is above that of BF16, by the noise before it. Decided at "
            f"step {int(onset['decided_step']):,}."
        )
        return DepartureFact(int(onset["since_step"]), True, detail, address)
    curve = result.get("curve") or {}
    tolerance = result.get("tolerance") or result.get("margin")
    if not curve.get("x") or not tolerance:
        return None
    x, low, high = (np.asarray(curve[key], np.float64) for key in ("x", "low", "high"))
    departed = departure_of(steps_at(run, x, str(curve.get("x_name", "steps"))), low, high, float(tolerance))
    if departed is None:
        return None
    step, is_above = departed
    unit = str(result.get("unit", "relative"))
    side = "above" if is_above else "below"
    detail = (
        f"From this step on, the interval of the difference lies {side} "
        f"the tolerance of ±{difference(float(tolerance), unit)}."
    )
    return DepartureFact(step, is_above, detail, address)


def steps_at(run: Run, x: np.ndarray[tuple[int], np.dtype[np.float64]], axis: str) -> Any:
    """The run's steps, float64[N], at points of the axis that a comparison is aligned on."""
    if axis != "tokens":
        return x
    tokens = queries.scalar(run.id, "tokens", points=LOSS_POINTS, timed=False)
    return np.round(np.interp(x, tokens.values, tokens.steps)) if len(tokens) else x


def _nonfinite_step(run: Run) -> int | None:
    loss = queries.scalar(run.id, "loss", points=LOSS_POINTS, timed=False)
    broken = np.flatnonzero(~np.isfinite(loss.values))
    return int(loss.steps[broken[0]]) if len(broken) else None


def _marks(run: Run) -> list[ChangeFact]:
    """Annotations: layers that fell back, incidents, and what the script notes."""
    reports = Report.objects.filter(run=run, kind=ReportKind.ANNOTATION).order_by("step", "id")
    address = _on_page(run, "reports")
    changes = []
    for report in reports[:MAX_CHANGES]:
        name, text = str(report.document.get("name", "")), str(report.document.get("text", ""))
        if name in CALM_MARKS:
            changes.append(
                ChangeFact(
                    step=annotated_step(report),
                    kind=name,
                    text="an incident is kept",
                    detail=text,
                    address=address,
                )
            )
        else:
            kind = "mark" if name == "fallback" else name
            changes.append(
                ChangeFact(
                    step=report.step, kind=kind, text=_short(text), detail=str(report.document.get("why", ""))
                )
            )
    return changes


def _windows(run: Run) -> list[ChangeFact]:
    """The first reference window in which FP8 is over the tolerance."""
    over = Report.objects.filter(run=run, kind=ReportKind.REFERENCE, document__verdict="over")
    first = over.order_by("step", "id").first()
    if first is None:
        return []
    delta = difference(float(first.document["delta"]), "relative", signed=True)
    detail = f"The same batches in BF16 from the same state: FP8 − BF16 is {delta}."
    return [
        ChangeFact(
            step=first.step,
            kind="window",
            text="reference window over its tolerance",
            detail=detail,
            address=_on_page(run, "reports"),
            is_bad=True,
        )
    ]


def _commands(run: Run) -> list[ChangeFact]:
    """Commands that the training process has answered with a step, at the step of their first answer."""
    commands = Command.objects.filter(run=run).prefetch_related("results").order_by("id")
    changes = []
    for command in commands[:MAX_CHANGES]:
        steps = [result.step for result in command.results.all() if result.step is not None]
        states = {result.state for result in command.results.all()}
        if not steps or states <= {ResultState.REFUSED}:
            continue
        kind = CommandKind(command.kind)
        failed = ResultState.FAILED in states
        text = f"command fails: {kind.label.lower()}" if failed else f"command: {kind.label.lower()}"
        address = _on_page(run, "commands")
        changes.append(
            ChangeFact(
                step=min(steps),
                kind=kind.value,
                text=text,
                detail=command.reason,
                address=address,
                is_bad=failed,
            )
        )
    return changes


def _starts(run: Run) -> list[StartFact]:
    """The later starts of the training, from the steps that each has stored."""
    rows = Writer.objects.filter(run=run, first_step__isnull=False).order_by("attempt")
    spans = rows.values_list("attempt", "first_step", "last_step")[:MAX_WRITERS]
    starts: list[StartFact] = []
    before: int | None = None
    for attempt, writers in groupby(spans, key=lambda span: span[0]):
        listed = list(writers)
        first = min(first for _, first, _ in listed if first is not None)
        last = max((last for _, _, last in listed if last is not None), default=first)
        if before is not None:
            starts.append(StartFact(attempt + 1, first, before))
        before = last
    return starts


def _on_page(run: Run, part: str) -> str:
    return f"{reverse('run', args=[run.project.slug, run.pk])}#{part}"


def _short(text: str) -> str:
    return text if len(text) <= TEXT_LENGTH else f"{text[: TEXT_LENGTH - 1]}…"
