"""The addresses of media: runs beside each other, and the contents."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from django.http import Http404, HttpRequest, HttpResponse

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.media.models import MediaItem
from fp8scope_dashboard.pages.access import in_project, page, run_of
from fp8scope_dashboard.pages.address_values import uuid_in
from fp8scope_dashboard.pages.media.content import sheet_of
from fp8scope_dashboard.pages.media.serving import respond
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.wire.limits import MAX_INT

MAX_ASKED: Final = 400
LARGE_COLUMNS: Final = ("config", "environment", "summary", "error")


@in_project()
def media(request: HttpRequest, project: Project) -> HttpResponse:
    """The media of the runs in the address, in their order, beside each other."""
    texts = request.GET.getlist("runs")[:MAX_ASKED]
    ids = [run_id for text in dict.fromkeys(texts) if (run_id := uuid_in(text)) is not None]
    stored = Run.objects.filter(project=project, pk__in=ids).defer(*LARGE_COLUMNS).in_bulk()
    runs = [stored[run_id] for run_id in ids if run_id in stored]
    for run in runs:
        run.project = project
    context = {"sheet": sheet_of(runs, request.GET)}
    is_part = request.headers.get("HX-Target", "") in ("media", "media-columns")
    template = "pages/media/_media.html" if is_part else "pages/media/media.html"
    return page(request, project, "compare", template, context)


@in_project(cacheable=True)
def media_content(request: HttpRequest, project: Project, run_id: UUID, item_id: int) -> HttpResponse:
    """The content of one media: an image is shown, anything else is a download."""
    run = run_of(project, run_id)
    items = MediaItem.objects.filter(run=run, pk=min(item_id, MAX_INT)).select_related("content")
    item = items.first()
    if item is None:
        raise Http404("No such media in this run.")
    return respond(request, item)
