"""The start page."""

from __future__ import annotations

from django.contrib.auth.decorators import login_required
from django.db.models import Count, Max, Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache

from fp8scope_dashboard.accounts.services import projects_of
from fp8scope_dashboard.pages.access import person


@never_cache
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
    return render(request, "pages/home.html", {"projects": listed.order_by("name")})
