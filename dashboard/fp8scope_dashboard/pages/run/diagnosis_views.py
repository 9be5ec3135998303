"""The diagnosis of a run."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.http import HttpRequest, HttpResponse

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.diagnosis.models import Diagnosis
from fp8scope_dashboard.diagnosis.reading import inputs_of
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.pages.access import in_project, page, run_of
from fp8scope_dashboard.pages.run.diagnosis import OUTCOMES, shown_findings, tensor_charts, tensors_to_draw


@in_project()
def diagnosis(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """The page of a run's diagnosis. Starts one if the stored diagnosis is not of the present data."""
    run = run_of(project, run_id)
    stored: Diagnosis | None = getattr(run, "diagnosis", None)
    is_current = stored is not None and stored.inputs == inputs_of(run)
    if not is_current:
        run_changed(run.id, run.project_id, "diagnosis")
    context: dict[str, Any] = {"run": run, "stored": stored, "is_current": is_current}
    context["page_scripts"] = ["pages/js/marks.js"]
    # Results of an earlier version have other keys.
    if stored is not None and "findings" in stored.result:
        context |= {
            "badge": OUTCOMES[stored.outcome],
            "findings": shown_findings(run, stored.result),
            "drawn": tensor_charts(run, tensors_to_draw(stored.result)),
            "suggestion": stored.result.get("suggestion", ""),
        }
    template = (
        "pages/run/_diagnosis.html"
        if request.headers.get("HX-Target") == "diagnosis"
        else "pages/run/diagnosis.html"
    )
    return page(request, project, "runs", template, context)
