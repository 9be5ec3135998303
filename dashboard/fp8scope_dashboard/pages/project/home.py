"""The start page: the projects of a user, each with its state, and the form that makes one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db.models import Count, F, Max, Min, Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from fp8scope_dashboard.accounts import projects
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.accounts.services import projects_of
from fp8scope_dashboard.audit.log import actor_of, record
from fp8scope_dashboard.audit.models import Action
from fp8scope_dashboard.pages.access import open_alerts_by_project, person
from fp8scope_dashboard.pages.badges import Badge
from fp8scope_dashboard.pages.formatting import count as count_text
from fp8scope_dashboard.pages.runs.columns import verdict_rank
from fp8scope_dashboard.pages.runs.groups import worst_badge
from fp8scope_dashboard.runs.models import Run, RunState

PROJECTS_A_PAGE = 100
# The worst verdict is that of runs that were active in this time.
RECENT: Final = timedelta(days=7)


@dataclass(frozen=True, kw_only=True)
class ProjectState:
    """A project as the start page shows it. `worst` is None without a verdict."""

    project: Project
    alerts: int
    today: str
    runs: str
    worst: Badge | None


@never_cache
@require_safe
@login_required
def home(request: HttpRequest) -> HttpResponse:
    """The user's projects, or a redirect if there is only one and `all` does not ask for the list."""
    own = projects_of(person(request))
    archived = own.filter(archived_at__isnull=False).order_by("name")
    listed = own.filter(archived_at=None)
    slugs = list(listed.values_list("slug", flat=True)[:2])
    if len(slugs) == 1 and "all" not in request.GET:
        return redirect("project", slug=slugs[0])
    not_deleted = Q(runs__deleted_at=None)
    # The project where something happens comes first.
    by_activity = listed.annotate(
        run_count=Count("runs", filter=not_deleted), latest=Max("runs__heartbeat_at", filter=not_deleted)
    ).order_by(F("latest").desc(nulls_last=True), "name")
    shown = Paginator(by_activity, PROJECTS_A_PAGE).get_page(request.GET.get("page"))
    context = {
        "section": "projects",
        "pages": shown,
        "projects": _states(list(shown)),
        "archived": archived[:PROJECTS_A_PAGE],
        "may_make": person(request).is_superuser,
    }
    return render(request, "pages/project/home.html", context)


def _states(shown: Sequence[Project]) -> list[ProjectState]:
    now = timezone.now()
    midnight = timezone.localtime(now).replace(hour=0, minute=0, second=0, microsecond=0)
    recent = Run.objects.filter(project__in=shown, heartbeat_at__gte=now - RECENT, archived_at=None)
    counted = (
        recent.order_by()
        .values("project")
        .annotate(
            today=Count("pk", filter=Q(created_at__gte=midnight)),
            running=Count("pk", filter=Q(state=RunState.RUNNING)),
            worst=Min(verdict_rank()),
        )
    )
    facts: dict[int, dict[str, Any]] = {row["project"]: dict(row) for row in counted}
    alerts = open_alerts_by_project([project.pk for project in shown])
    states = []
    for project in shown:
        row: dict[str, Any] = facts.get(project.pk, {})
        running, worst = row.get("running", 0), row.get("worst")
        states.append(
            ProjectState(
                project=project,
                alerts=alerts.get(project.pk, 0),
                today=_runs(row.get("today", 0), "today")
                + (f", {count_text(running)} running" if running else ""),
                runs=_runs(project.run_count, "in all"),  # type: ignore[attr-defined]
                worst=None if worst is None else worst_badge(worst),
            )
        )
    return states


def _runs(number: int, when: str) -> str:
    return f"{count_text(number)} run{'' if number == 1 else 's'} {when}"


@never_cache
@require_POST
@login_required
def project_new(request: HttpRequest) -> HttpResponse:
    """Make a project. Only administrators of the server do."""
    user = person(request)
    if not user.is_superuser:
        raise PermissionDenied("Only administrators of the server make projects.")
    fields = {name: request.POST.get(name, "").replace("\0", "") for name in ("slug", "name", "description")}
    try:
        project = projects.make(fields["slug"], fields["name"], fields["description"], user)
    except projects.ProjectError as error:
        messages.error(request, str(error))
        return redirect("/?all=1")
    record(actor_of(request), project, Action.PROJECT, f"made “{project.name}”")
    messages.success(request, f"Made the project “{project.name}”. You administer it.")
    return redirect("project", slug=project.slug)
