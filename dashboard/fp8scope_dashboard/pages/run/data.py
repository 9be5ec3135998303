"""Storage, missing messages, export and deletion of a run, and the retention of a project."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.urls import reverse

from fp8scope_dashboard.accounts import permissions
from fp8scope_dashboard.accounts.addresses import server_address
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.audit.log import actor_of, record
from fp8scope_dashboard.audit.models import Action
from fp8scope_dashboard.exports import formats, streaming
from fp8scope_dashboard.pages.access import POST, in_project, may_for, page, person, require_own, run_of
from fp8scope_dashboard.pages.run import tabs
from fp8scope_dashboard.pages.run.model_card import model_card
from fp8scope_dashboard.receipts.dedup import message_counts
from fp8scope_dashboard.runs import bulk
from fp8scope_dashboard.runs.models import BulkAction, Run
from fp8scope_dashboard.telemetry import deletion, storage
from fp8scope_dashboard.wire.errors import SlowDownError

# Names of the tables on the page; all others are "Everything else".
KINDS = {
    "telemetry_chunk": "Batches, not compacted yet",
    "telemetry_tile": "Compacted values",
    "telemetry_rollup": "Roll-ups",
    "telemetry_histogram": "Exponent histograms",
    "ingest_receipt": "Message receipts",
    "runs_consoleline": "Console log",
    "media_mediachunk": "Media",
}
MAX_WRITERS = 200


@in_project()
def run_data(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """The page with a run's storage, messages, export and deletion."""
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
        "tabs": tabs.links_of(run, "data", request.GET),
        "stored": stored,
        "kinds": sorted(kinds.items(), key=lambda item: -item[1]),
        "writers": [(writer, *arrived.get(writer.uuid, (0, 0))) for writer in writers[:MAX_WRITERS]],
        "missing": sum(missing for _, missing in arrived.values()),
        "formats": list(formats.MEDIA_TYPES),
        "card": model_card(run, server_address(request)),
        "may_delete": may_for(request, project, permissions.DELETE_RUNS, run.owner_id),
    }
    return page(request, project, "runs", "pages/run/data.html", context)


@in_project()
def run_export(request: HttpRequest, project: Project, run_id: UUID, form: str) -> HttpResponseBase:
    """Export the run as a file."""
    if form not in formats.MEDIA_TYPES:
        raise Http404("No such format.")
    run = run_of(project, run_id)
    try:
        answer = streaming.respond(run, form)
        record(actor_of(request), project, Action.EXPORTED, f"“{run.name}”, as {form}", run=str(run.pk))
        return answer
    except SlowDownError as error:
        return HttpResponse(f"{error.message} {error.hint}", status=429, headers=error.headers())


@in_project(permissions.DELETE_RUNS, methods=POST)
def run_delete(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """Delete a run. The form must contain its name as a confirmation."""
    run = run_of(project, run_id)
    require_own(request, project, permissions.DELETE_RUNS, run.owner_id)
    if request.POST.get("name", "").strip() != run.name.strip():
        messages.error(request, "The run was not deleted: the name does not match.")
        return redirect("run_data", project.slug, run.pk)
    bulk.change(project, Run.objects.filter(pk=run.pk), BulkAction.Kind.DELETE, person(request))
    record(actor_of(request), project, Action.RUN_DELETED, f"“{run.name}”", run=str(run.pk))
    messages.success(
        request,
        f"Deleted “{run.name}”. For 10 minutes this can be undone; then its data is deleted.",
    )
    return redirect("project", project.slug)


@in_project(permissions.CHANGE_PROJECT, methods=POST)
def retention(request: HttpRequest, project: Project) -> HttpResponse:
    """Set the number of days after which raw tensor values are deleted; empty means never."""
    text = request.POST.get("raw_days", "").strip()
    try:
        project.raw_days = int(text) if text else None
        project.full_clean()
    except ValueError:
        messages.error(
            request, "Enter a whole number of days, or leave the field empty to keep values forever."
        )
    except ValidationError as error:
        messages.error(request, " ".join(" ".join(texts) for texts in error.message_dict.values()))
    else:
        project.save(update_fields=["raw_days"])
        record(actor_of(request), project, Action.PROJECT, f"days of tensor values: {text or 'all'}")
        duration = f"for {project.raw_days} days" if project.raw_days else "forever"
        messages.success(
            request, f"Saved. Tensor values are kept {duration}; roll-ups and scalars are always kept."
        )
    return redirect(f"{reverse('settings', args=[project.slug])}#storage")


def deletions(project: Project) -> list[dict[str, Any]]:
    """The runs that are being deleted, with their progress."""
    pending = []
    for run in deletion.unfinished(project):
        progress = deletion.progress_of(run.pk, project)
        if progress is not None:
            pending.append({"run": run, "progress": progress, "percent": 100 * progress.share})
    return pending
