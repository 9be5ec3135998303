"""The marks of a run's charts over steps: its alerts, its annotations, and the notes of people."""

from __future__ import annotations

from typing import Final

from django.urls import reverse

from fp8scope_dashboard.alerts.models import Alert, Severity
from fp8scope_dashboard.control.models import Report, ReportKind
from fp8scope_dashboard.pages.charts.marks import NOTE, Mark
from fp8scope_dashboard.pages.charts.series import Options
from fp8scope_dashboard.runs.models import Run, StepNote

# The latest of each kind.
MAX_ALERTS: Final = 50
MAX_ANNOTATIONS: Final = 100
MAX_NOTES: Final = 50


def marks_of(run: Run, options: Options) -> list[Mark]:
    """All marks of a run, each with its page; none if they are off, or over another axis than steps."""
    if not options.marks or options.axis != "step":
        return []
    return [*_alerts(run), *_annotations(run), *_notes(run)]


def annotated_step(report: Report) -> int:
    """The step that an annotation is about: an incident is written some steps after its own."""
    incident = report.document.get("incident") or {}
    return int(incident.get("target", report.step))


def _alerts(run: Run) -> list[Mark]:
    events = Alert.objects.filter(run=run).order_by("-step")[:MAX_ALERTS]
    return [
        Mark(
            x=float(event.onset_step),
            text=f"{event.get_kind_display()} from step {event.onset_in_words}",
            severe=event.severity == Severity.CRITICAL,
            detail=event.message,
            address=reverse("alert", args=[run.project.slug, event.pk]),
        )
        for event in events
    ]


def _annotations(run: Run) -> list[Mark]:
    reports = Report.objects.filter(run=run, kind=ReportKind.ANNOTATION).order_by("-step", "-id")
    return [
        Mark(
            x=float(annotated_step(report)),
            text=_said_of(report),
            label=report.document["name"],
            address=_notes_address(run, "marks-title"),
        )
        for report in reports[:MAX_ANNOTATIONS]
    ]


def _said_of(report: Report) -> str:
    document = report.document
    why = f" ({document['why']})" if document.get("why") else ""
    return f"step {annotated_step(report):,}: {document['text']}{why}"


def _notes(run: Run) -> list[Mark]:
    notes = StepNote.objects.filter(run=run).select_related("written_by").order_by("-step", "-id")
    return [
        Mark(
            x=float(note.step),
            text=f"Note at step {note.step:,}{note.by}",
            label=NOTE,
            detail=note.text,
            address=_notes_address(run, note.anchor),
        )
        for note in notes[:MAX_NOTES]
    ]


def _notes_address(run: Run, anchor: str) -> str:
    return f"{reverse('run', args=[run.project.slug, run.pk])}?tab=notes#{anchor}"
