"""The progress of long jobs, as a part of a page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import render

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis.progress import running_jobs
from fp8scope_dashboard.pages.access import in_project
from fp8scope_dashboard.pages.address_values import uuids_in
from fp8scope_dashboard.runs.models import Run

# Runs in one address; further ones are ignored.
MAX_RUNS = 64


@in_project()
def progress(request: HttpRequest, project: Project) -> HttpResponse:
    """The jobs of the runs in the address that are running now."""
    ids = uuids_in(request.GET.getlist("runs"), MAX_RUNS)
    readable = Run.objects.filter(project=project, pk__in=ids).values_list("pk", flat=True)
    return render(request, "pages/_progress.html", {"project": project, **progress_context(readable)})


def progress_context(run_ids: Iterable[UUID]) -> dict[str, Any]:
    """Return what `pages/_progress.html` needs for these runs."""
    ids = list(run_ids)[:MAX_RUNS]
    query = QueryDict(mutable=True)
    query.setlist("runs", [str(run_id) for run_id in ids])
    return {"jobs": running_jobs(ids), "jobs_query": query.urlencode()}
