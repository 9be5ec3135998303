"""The sentence about tensors that have changed, on the page of a run."""

from __future__ import annotations

from uuid import UUID

from django.http import HttpRequest, HttpResponse

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis.tensor_changes import changed_tensors
from fp8scope_dashboard.pages import glossary
from fp8scope_dashboard.pages.access import in_project, page, run_of
from fp8scope_dashboard.telemetry import queries


@in_project()
def changes(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """Return how many tensors changed the statistic of the address.

    Empty if it is unknown or has few steps.
    """
    run = run_of(project, run_id)
    statistic = request.GET.get("statistic", "amax")
    is_known = statistic in queries.statistic_names(run.pk)
    title = glossary.title(statistic)
    context = {
        "changes": changed_tensors(run.pk, statistic) if is_known else None,
        # Abbreviations such as amax stay as they are.
        "statistic": f"their {title[:1].lower()}{title[1:]}",
    }
    return page(request, project, "runs", "pages/tensors/_changes.html", context)
