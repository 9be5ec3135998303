"""A run's storage, missing messages, export and deletion; and how long a project keeps tensors' values."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.http import require_POST

from fp8scope_dashboard.accounts.models import Project, Role
from fp8scope_dashboard.exports import formats, streaming
from fp8scope_dashboard.pages.access import in_project, page, run_of
from fp8scope_dashboard.receipts.dedup import message_counts
from fp8scope_dashboard.telemetry import deletion, storage
from fp8scope_dashboard.wire.errors import SlowDownError

# What a person calls the tables; the rest is "other".
KINDS = {
    "telemetry_chunk": "Batches as they came",
    "telemetry_tile": "Compacted values",
    "telemetry_rollup": "Roll-ups",
    "telemetry_histogram": "Histograms of exponents",
    "ingest_receipt": "Receipts of messages",
}
MOST_WRITERS = 200


@in_project()
def run_data(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """A run's storage, its writers' messages, its export and its deletion."""
    run = run_of(project, run_id)
    stored = storage.of_run(run.pk, run.points_stored)
    kinds: dict[str, int] = {}
    for table, (size, _) in stored.tables.items():
        kind = KINDS.get(table, "Everything else")
        kinds[kind] = kinds.get(kind, 0) + size
    arrived = message_counts(run.pk)
    writers = run.writers.order_by("attempt", "rank", "created_at")
    context: dict[str, Any] = {
        "run": run,
        "stored": stored,
        "kinds": sorted(kinds.items(), key=lambda item: -item[1]),
        "writers": [(one, *arrived.get(one.uuid, (0, 0))) for one in writers[:MOST_WRITERS]],
        "missing": sum(missing for _, missing in arrived.values()),
        "formats": list(formats.MEDIA_TYPES),
    }
    return page(request, project, "runs", "pages/data.html", context)


@in_project()
def run_export(request: HttpRequest, project: Project, run_id: UUID, form: str) -> HttpResponseBase:
    """The run as a file."""
    if form not in formats.MEDIA_TYPES:
        raise Http404("No such format.")
    try:
        return streaming.respond(run_of(project, run_id), form)
    except SlowDownError as error:
        return HttpResponse(f"{error.message} {error.hint}", status=429, headers=error.headers())


@require_POST
@in_project(Role.MEMBER)
def run_delete(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """Delete a run whose name was typed as well."""
    run = run_of(project, run_id)
    if request.POST.get("name", "").strip() != run.name.strip():
        messages.error(request, "Nothing was deleted: what you typed is not the name of this run.")
        return redirect("run_data", project.slug, run.pk)
    deletion.begin(run)
    messages.success(
        request, f"Deleting “{run.name}”. It is hidden from now on; the settings show how far it is."
    )
    return redirect("project", project.slug)


@require_POST
@in_project(Role.ADMIN)
def retention(request: HttpRequest, project: Project) -> HttpResponse:
    """Change for how many days tensors' raw values are kept; nothing: for ever."""
    text = request.POST.get("raw_days", "").strip()
    try:
        project.raw_days = int(text) if text else None
        project.full_clean()
    except ValueError:
        messages.error(request, "Days must be a whole number, or empty: for ever.")
    except ValidationError as error:
        messages.error(request, " ".join(" ".join(texts) for texts in error.message_dict.values()))
    else:
        project.save(update_fields=["raw_days"])
        kept = f"for {project.raw_days} days" if project.raw_days else "for ever"
        messages.success(request, f"Saved. Tensors' values are kept {kept}, roll-ups and scalars always.")
    return redirect(f"{reverse('settings', args=[project.slug])}#storage")


def deletions(project: Project) -> list[dict[str, Any]]:
    """The project's runs that are being deleted, and how far each is."""
    found = []
    for run in deletion.unfinished(project):
        progress = deletion.progress_of(run.pk, project)
        if progress is not None:
            found.append({"run": run, "progress": progress, "percent": 100 * progress.share})
    return found
