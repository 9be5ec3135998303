"""The start page."""

from __future__ import annotations

from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.db.models import Count, F, Max, Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from fp8scope_dashboard.accounts.services import projects_of
from fp8scope_dashboard.pages.access import open_alerts_by_project, person

PROJECTS_A_PAGE = 100


@never_cache
@require_safe
@login_required
def home(request: HttpRequest) -> HttpResponse:
    """The list of the user's projects, or a redirect if there is only one."""
    projects = projects_of(person(request))
    slugs = list(projects.values_list("slug", flat=True)[:2])
    if len(slugs) == 1:
        return redirect("project", slug=slugs[0])
    kept = Q(runs__deleted_at=None)
    listed = projects.annotate(
        run_count=Count("runs", filter=kept), latest=Max("runs__heartbeat_at", filter=kept)
    )
    # The project where something happens comes first.
    by_activity = listed.order_by(F("latest").desc(nulls_last=True), "name")
    shown = Paginator(by_activity, PROJECTS_A_PAGE).get_page(request.GET.get("page"))
    alerts = open_alerts_by_project([project.pk for project in shown])
    context = {
        "section": "projects",
        "pages": shown,
        "projects": [(project, alerts.get(project.pk, 0)) for project in shown],
    }
    return render(request, "pages/project/home.html", context)
