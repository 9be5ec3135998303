"""The marks of runs' charts: their alerts, their annotations, and the notes of people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final
from uuid import UUID

from django.urls import reverse

from fp8scope_dashboard.alerts.models import Alert, Severity
from fp8scope_dashboard.control.models import Report, ReportKind
from fp8scope_dashboard.pages.charts.curves import Curve
from fp8scope_dashboard.pages.charts.marks import NOTE, Mark
from fp8scope_dashboard.pages.charts.series import Options
from fp8scope_dashboard.pages.charts.step_places import StepPlaces, placed
from fp8scope_dashboard.runs.models import Run, StepNote

# The latest of each kind. A chart draws at most MAX_MARKS.
MAX_ALERTS: Final = 50
MAX_ANNOTATIONS: Final = 100
MAX_NOTES: Final = 50


def marks_of(run: Run, options: Options, places: StepPlaces | None = None) -> list[Mark]:
    """All marks of a run, each with its page; none if they are off.

    Over another axis than steps they are at the `places` of their steps, and without these there are none.
    """
    if not options.marks:
        return []
    marks = [mark for _, mark in _marks([run])]
    if options.axis == "step":
        return marks
    return placed(marks, places) if places is not None else []


def marks_of_runs(runs: Sequence[Run], curves: Sequence[Curve], options: Options) -> list[Mark]:
    """The marks of several runs of one project. Each names its run and has the colour of its curve."""
    if not options.marks:
        return []
    shown = {curve.run_id: curve for curve in curves}
    marks = []
    for run_id, mark in _marks(run for run in runs if run.pk in shown):
        curve = shown[run_id]
        own = replace(mark, text=f"{curve.arm}: {mark.text}", slot=curve.slot)
        marks += [own] if options.axis == "step" else placed([own], curve.places) if curve.places else []
    return marks


def annotated_step(report: Report) -> int:
    """The step that an annotation is about: an incident is written some steps after its own."""
    incident = report.document.get("incident") or {}
    return int(incident.get("target", report.step))


def _marks(runs: Iterable[Run]) -> Iterator[tuple[UUID, Mark]]:
    """The marks at their steps, with the ids of their runs."""
    of = {run.pk: run for run in runs}
    yield from _alerts(of)
    yield from _annotations(of)
    yield from _notes(of)


def _alerts(runs: Mapping[UUID, Run]) -> Iterator[tuple[UUID, Mark]]:
    for alert in Alert.objects.filter(run__in=runs).order_by("-step")[:MAX_ALERTS]:
        yield (
            alert.run_id,
            Mark(
                x=float(alert.onset_step),
                text=f"{alert.get_kind_display()} from step {alert.onset_in_words}",
                severe=alert.severity == Severity.CRITICAL,
                detail=alert.message,
                address=reverse("alert", args=[runs[alert.run_id].project.slug, alert.pk]),
            ),
        )


def _annotations(runs: Mapping[UUID, Run]) -> Iterator[tuple[UUID, Mark]]:
    reports = Report.objects.filter(run__in=runs, kind=ReportKind.ANNOTATION).order_by("-step", "-id")
    for report in reports[:MAX_ANNOTATIONS]:
        yield (
            report.run_id,
            Mark(
                x=float(annotated_step(report)),
                text=_said_of(report),
                label=report.document["name"],
                address=_notes_address(runs[report.run_id], "marks-title"),
            ),
        )


def _said_of(report: Report) -> str:
    document = report.document
    why = f" ({document['why']})" if document.get("why") else ""
    return f"step {annotated_step(report):,}: {document['text']}{why}"


def _notes(runs: Mapping[UUID, Run]) -> Iterator[tuple[UUID, Mark]]:
    notes = StepNote.objects.filter(run__in=runs).select_related("written_by").order_by("-step", "-id")
    for note in notes[:MAX_NOTES]:
        yield (
            note.run_id,
            Mark(
                x=float(note.step),
                text=f"Note at step {note.step:,}{note.by}",
                label=NOTE,
                detail=note.text,
                address=_notes_address(runs[note.run_id], note.anchor),
            ),
        )


def _notes_address(run: Run, anchor: str) -> str:
    return f"{reverse('run', args=[run.project.slug, run.pk])}?tab=notes#{anchor}"
