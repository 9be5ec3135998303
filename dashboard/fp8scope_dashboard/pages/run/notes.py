"""The note of a run, and the links to its artefacts."""

from __future__ import annotations

from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse

from fp8scope_dashboard.accounts.models import Project, Role
from fp8scope_dashboard.pages.access import POST, in_project, page, person, run_of
from fp8scope_dashboard.pages.address_values import whole_number
from fp8scope_dashboard.pages.run import tabs
from fp8scope_dashboard.pages.run.views import head_context
from fp8scope_dashboard.runs.models import Artefact, Run
from fp8scope_dashboard.runs.notes import NoteError, add_artefact, save_note
from fp8scope_dashboard.text.markdown import MOST_CHARACTERS


@in_project(Role.MEMBER, methods=POST)
def note_save(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """Save the note. Text that cannot be saved is shown again, with what to change."""
    run = run_of(project, run_id)
    text, version = request.POST.get("text", ""), whole_number(request.POST.get("version", ""), 8) or 0
    try:
        save_note(run, text, version, person(request))
    except NoteError as error:
        return _again(request, project, run, text[: 2 * MOST_CHARACTERS], str(error))
    messages.success(request, "The note is saved.")
    return _back(run)


@in_project(Role.MEMBER, methods=POST)
def note_preview(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """A text as HTML, as the saved note would be shown."""
    run_of(project, run_id)
    return HttpResponse(tabs.note_html(request.POST.get("text", "")))


@in_project(Role.MEMBER, methods=POST)
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


@in_project(Role.MEMBER, methods=POST)
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
    return redirect(f"{reverse('run', args=[run.project.slug, run.id])}?tab=notes")
