"""The note of a run, notes at its steps, and the links to its artefacts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse

from fp8scope_dashboard.accounts import permissions
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.pages.access import POST, in_project, page, person, run_of
from fp8scope_dashboard.pages.address_values import whole_number
from fp8scope_dashboard.pages.run import tabs
from fp8scope_dashboard.pages.run.views import head_context
from fp8scope_dashboard.runs.models import Artefact, Run, StepNote
from fp8scope_dashboard.runs.notes import (
    MAX_STEP,
    STEP_NOTE_LENGTH,
    NoteError,
    add_artefact,
    add_step_note,
    change_step_note,
    remove_step_note,
    save_note,
)
from fp8scope_dashboard.text.markdown import MAX_CHARACTERS

# Characters of a step that the form shows again.
MAX_TYPED: Final = 32


@in_project(permissions.DESCRIBE_RUNS, methods=POST)
def note_save(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """Save the note. Text that cannot be saved is shown again, with what to change."""
    run = run_of(project, run_id)
    text, version = request.POST.get("text", ""), whole_number(request.POST.get("version", ""), 8) or 0
    try:
        save_note(run, text, version, person(request))
    except NoteError as error:
        return _again(request, project, run, text[: 2 * MAX_CHARACTERS], str(error))
    messages.success(request, "The note is saved.")
    return _back(run)


@in_project(permissions.DESCRIBE_RUNS, methods=POST)
def note_preview(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """A text as HTML, as the saved note would be shown."""
    run_of(project, run_id)
    return HttpResponse(tabs.note_html(request.POST.get("text", "")))


@in_project()
def step_note(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """The form of a new note at the step `step`, or of the note with the number `note`."""
    run = run_of(project, run_id)
    number, step = whole_number(request.GET.get("note", "")), whole_number(request.GET.get("step", ""))
    if number is None:
        return _step_note_form(request, project, run, StepNoteForm(step="" if step is None else str(step)))
    note = get_object_or_404(StepNote, run=run, pk=number)
    form = StepNoteForm(note=str(note.pk), step=str(note.step), text=note.text)
    return _step_note_form(request, project, run, form)


@in_project(permissions.DESCRIBE_RUNS, methods=POST)
def step_note_save(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """Save a note at a step, a new one without a number; the form again, if it cannot be saved."""
    run = run_of(project, run_id)
    post = request.POST
    step, text = whole_number(post.get("step", "")), post.get("text", "")
    number = whole_number(post.get("note", ""))
    try:
        if number is None:
            note = add_step_note(run, step, text, person(request))
        else:
            note = get_object_or_404(StepNote, run=run, pk=number)
            change_step_note(note, step, text, person(request))
    except NoteError as error:
        form = StepNoteForm(
            note="" if number is None else str(number),
            step=post.get("step", "")[:MAX_TYPED],
            text=text[: 2 * STEP_NOTE_LENGTH],
            problem=str(error),
        )
        return _step_note_form(request, project, run, form)
    said = f"The note at step {note.step:,} is saved."
    if "HX-Request" in request.headers:
        # The dialog closes, and the charts draw the mark.
        return HttpResponse(status=204, headers={"HX-Trigger": json.dumps({"fp8:noted": {"said": said}})})
    messages.success(request, said)
    return redirect(f"{_notes_tab(run)}#{note.anchor}")


@in_project(permissions.DESCRIBE_RUNS, methods=POST)
def step_note_remove(request: HttpRequest, project: Project, run_id: UUID, note_id: int) -> HttpResponse:
    """Remove a note at a step."""
    run = run_of(project, run_id)
    note = get_object_or_404(StepNote, run=run, pk=note_id)
    remove_step_note(note)
    messages.success(request, f"Removed the note at step {note.step:,}: {note.text}")
    return _back(run)


@dataclass(frozen=True, kw_only=True)
class StepNoteForm:
    """The values of the form of a note at a step. `note` is the number of a changed note."""

    note: str = ""
    step: str = ""
    text: str = ""
    problem: str = ""
    max_step: str = str(MAX_STEP)
    max_length: str = str(STEP_NOTE_LENGTH)

    @property
    def title(self) -> str:
        return "Change the note" if self.note else "Note at a step"


def _step_note_form(request: HttpRequest, project: Project, run: Run, form: StepNoteForm) -> HttpResponse:
    is_part = "HX-Request" in request.headers
    template = "pages/run/_step_note.html" if is_part else "pages/run/step_note.html"
    # htmx puts only answers with a status of success into the page.
    status = 200 if is_part or not form.problem else 422
    return page(request, project, "runs", template, {"run": run, "form": form}, status)


@in_project(permissions.DESCRIBE_RUNS, methods=POST)
def artefact_new(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """Add a link to an artefact."""
    run = run_of(project, run_id)
    try:
        added = add_artefact(
            run, request.POST.get("name", ""), request.POST.get("address", ""), person(request)
        )
    except NoteError as error:
        messages.error(request, str(error))
    else:
        messages.success(request, f"Added: {added.name}.")
    return _back(run)


@in_project(permissions.DESCRIBE_RUNS, methods=POST)
def artefact_remove(request: HttpRequest, project: Project, run_id: UUID, artefact_id: int) -> HttpResponse:
    """Remove a link to an artefact; the artefact itself stays where it is."""
    run = run_of(project, run_id)
    artefact = get_object_or_404(Artefact, run=run, pk=artefact_id)
    artefact.delete()
    messages.success(request, f"Removed the link to {artefact.name}: {artefact.address}")
    return _back(run)


def _again(request: HttpRequest, project: Project, run: Run, text: str, problem: str) -> HttpResponse:
    context = {
        "tab": "notes",
        "tabs": tabs.links_of(run, "notes", request.GET),
        "template": tabs.TABS["notes"].template,
        "problem": problem,
        "draft": text,
        **head_context(run),
        **tabs.notes_context(run),
    }
    return page(request, project, "runs", "pages/run/run.html", context, status=409)


def _back(run: Run) -> HttpResponse:
    return redirect(_notes_tab(run))


def _notes_tab(run: Run) -> str:
    return f"{reverse('run', args=[run.project.slug, run.id])}?tab=notes"
