"""The settings of a project: its name, members, tokens, channels, rules, margins and storage."""

from __future__ import annotations

import math
from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db.models import Count, OuterRef, Subquery
from django.db.models.functions import Coalesce
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from fp8scope_dashboard.accounts import members, people, permissions, projects
from fp8scope_dashboard.accounts.addresses import server_address
from fp8scope_dashboard.accounts.members import MAX_MEMBERS
from fp8scope_dashboard.accounts.models import (
    MAX_PRICE,
    MIN_PRICE,
    ApiToken,
    Membership,
    Project,
    Role,
    User,
)
from fp8scope_dashboard.accounts.services import create_sign_in_link
from fp8scope_dashboard.accounts.tokens import UNEXPIRED, working_tokens
from fp8scope_dashboard.alerts.models import Channel, Rule
from fp8scope_dashboard.audit import member_changes
from fp8scope_dashboard.audit.log import actor_of, record
from fp8scope_dashboard.audit.models import Action, Entry
from fp8scope_dashboard.pages.access import POST, in_project, may, page, person
from fp8scope_dashboard.pages.hours.wording import price_of
from fp8scope_dashboard.pages.project import tokens
from fp8scope_dashboard.pages.project.audit import changes_shown
from fp8scope_dashboard.pages.project.quota_use import quota_use
from fp8scope_dashboard.pages.run.data import deletions
from fp8scope_dashboard.pages.undo_offer import offer_undo
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.shared_reports.services import working_links

MAX_GROUPS = 200


@in_project()
def settings(request: HttpRequest, project: Project) -> HttpResponse:
    """The settings page."""
    return _page(request, project)


def _page(request: HttpRequest, project: Project, **more: Any) -> HttpResponse:
    context = {
        **_context(project),
        **tokens.tokens_context(request, project),
        **changes_shown(request, project),
        "quotas": quota_use(project, working_tokens(project)),
        **more,
    }
    return page(request, project, "settings", "pages/project/settings.html", context)


def _context(project: Project) -> dict[str, Any]:
    memberships = Membership.objects.filter(project=project).select_related("user")
    memberships = memberships.annotate(live_tokens=_live_tokens(), live_links=_live_links())
    groups = Run.objects.filter(project=project).exclude(group="").order_by("group")
    return {
        "members": memberships.order_by("user__username")[:MAX_MEMBERS],
        "roles": Role.choices,
        "groups": groups.values_list("group", flat=True).distinct()[:MAX_GROUPS],
        "rules_on": Rule.objects.filter(project=project, enabled=True).count(),
        "channels": Channel.objects.filter(project=project).order_by("id"),
        "deletions": deletions(project),
    }


def _live_tokens() -> Coalesce:
    """The number of tokens of a membership that work."""
    own = ApiToken.objects.filter(
        UNEXPIRED, project=OuterRef("project"), created_by=OuterRef("user"), revoked_at=None
    ).order_by()
    return Coalesce(Subquery(own.values("created_by").annotate(count=Count("pk")).values("count")), 0)


def _live_links() -> Coalesce:
    """The number of links to reports of a membership that work."""
    own = working_links().filter(report__project=OuterRef("project"), created_by=OuterRef("user")).order_by()
    return Coalesce(Subquery(own.values("created_by").annotate(count=Count("pk")).values("count")), 0)


@in_project(permissions.CHANGE_PROJECT, methods=POST)
def general(request: HttpRequest, project: Project) -> HttpResponse:
    """Change the project's name, its description, its default baseline and its price of a GPU hour."""
    project.default_baseline = request.POST.get("default_baseline", "").strip()
    text = request.POST.get("gpu_hour_price", "")
    project.gpu_hour_price = price_of(text)
    if text.strip() and project.gpu_hour_price is None:
        messages.error(request, f"The price is a number from {MIN_PRICE} to {MAX_PRICE:g}, such as 2.50.")
        return _settings(project, "general")
    try:
        changes = projects.change(
            project, name=request.POST.get("name", ""), description=request.POST.get("description", "")
        )
    except projects.ProjectError as error:
        messages.error(request, str(error))
    else:
        project.save(update_fields=["default_baseline", "gpu_hour_price"])
        price = "none" if project.gpu_hour_price is None else f"{project.gpu_hour_price:g}"
        changes += [f"default baseline “{project.default_baseline}”", f"price of a GPU hour {price}"]
        text = ", ".join(changes)
        record(actor_of(request), project, Action.PROJECT, text)
        messages.success(request, "Saved.")
    return _settings(project, "general")


@in_project(permissions.CHANGE_PROJECT, methods=POST)
def archive(request: HttpRequest, project: Project) -> HttpResponse:
    """Archive the project (`archived=1`), or list it with the others again."""
    wanted = request.POST.get("archived") == "1"
    if changes := projects.change(project, archived=wanted):
        record(actor_of(request), project, Action.PROJECT, ", ".join(changes))
    said = (
        "Archived: the project is listed apart, and everything in it goes on." if wanted else "Listed again."
    )
    messages.success(request, said)
    return _settings(project, "general")


@in_project(permissions.CHANGE_MEMBERS, methods=POST)
def member_add(request: HttpRequest, project: Project) -> HttpResponse:
    """Add a member. An administrator of the server also creates the account, and gets its sign-in link."""
    name, role = request.POST.get("name", "").strip(), _role(request)
    may_create = person(request).is_superuser
    try:
        if may_create and not User.objects.filter(username__iexact=name).exists():
            user = people.invite(name, request.POST.get("email", "").strip(), project, role)
            link = create_sign_in_link(user, server_address(request))
            record(actor_of(request), project, Action.MEMBER_ADDED, f"{user.username}, as {role.value}")
            return _page(request, project, invited=user, invitation=link)
        membership = members.add_member(project, name, role)
    except people.PeopleError as error:
        messages.error(request, str(error))
    else:
        name = membership.user.username
        record(actor_of(request), project, Action.MEMBER_ADDED, f"{name}, as {membership.role}")
        messages.success(request, f"{name} is now a member ({membership.role}).")
    return _settings(project, "members")


@in_project(permissions.CHANGE_MEMBERS, methods=POST)
def member_change(request: HttpRequest, project: Project, member_id: int) -> HttpResponse:
    """Change the role of a member, or remove them."""
    membership = (
        Membership.objects.select_related("user", "project").filter(project=project, pk=member_id).first()
    )
    if membership is None:
        raise Http404("No such member.")
    name, actor = membership.user.username, actor_of(request)
    try:
        if "remove" in request.POST:
            # Only a form that asked may keep them.
            keeps = "asked" in request.POST and "revoke" not in request.POST
            entry = member_changes.remove_member(actor, membership, person(request) if keeps else None)
            messages.success(request, f"{name} is no longer a member. {_ended(entry)}Their runs stay.")
            again = reverse("change_undo", args=[project.slug, entry.pk])
            offer_undo(request, f"Make {name} a member again?", again, next=f"{_address(project)}#members")
        else:
            role = _role(request)
            entry = member_changes.change_role(actor, membership, role)
            messages.success(request, f"{name} has the role {role.value} now. {_ended(entry)}".strip())
    except people.PeopleError as error:
        messages.error(request, str(error))
    if may(request, project, permissions.READ):
        return _settings(project, "members")
    return redirect("home")


def _ended(entry: Entry) -> str:
    """Return what ended or was taken over with a change of a member: the second part of the entry's text."""
    ended = entry.text.partition("; ")[2]
    return f"Of theirs: {ended}. " if ended else ""


def _role(request: HttpRequest) -> Role:
    text = request.POST.get("role", "")
    return Role(text) if text in Role.values else Role.VIEWER


def _problems(error: ValidationError) -> str:
    return " ".join(f"{field}: {' '.join(texts)}" for field, texts in error.message_dict.items())


@in_project(permissions.CREATE_TOKENS, methods=POST)
def token_create(request: HttpRequest, project: Project) -> HttpResponse:
    """Create a token. Only this response contains it."""
    return _with_secret(request, project, tokens.create(request, project))


@in_project(permissions.ROTATE_TOKENS, methods=POST)
def token_rotate(request: HttpRequest, project: Project, token_id: int) -> HttpResponse:
    """Give a token a new secret. Only this response contains it."""
    return _with_secret(request, project, tokens.rotate(request, project, token_id))


def _with_secret(request: HttpRequest, project: Project, context: dict[str, Any]) -> HttpResponse:
    if "HX-Request" in request.headers:
        return tokens.secret_part(request, project, context)
    # The browser has not loaded the page's scripts, or does not run scripts.
    return _page(request, project, **context)


@in_project(permissions.CHANGE_PROJECT, methods=POST)
def margins(request: HttpRequest, project: Project) -> HttpResponse:
    """Change the project's margin, entered in per cent, and alpha."""
    try:
        project.margin = float(request.POST.get("margin", "")) / 100.0
        project.alpha = float(request.POST.get("alpha", ""))
        # Validators accept NaN, because comparisons with it are false.
        if not math.isfinite(project.margin + project.alpha):
            raise ValueError
        project.full_clean()
    except ValidationError as error:
        messages.error(request, _problems(error))
    except ValueError:
        messages.error(request, "Margin and alpha must be numbers, such as 0.25 and 0.05.")
    else:
        project.save(update_fields=["margin", "alpha"])
        text = f"margin {project.margin:g}, alpha {project.alpha:g}"
        record(actor_of(request), project, Action.PROJECT, text)
        messages.success(request, "Saved. Verdicts are computed again within a minute.")
    return _settings(project, "margins")


def _settings(project: Project, anchor: str) -> HttpResponse:
    return redirect(f"{_address(project)}#{anchor}")


def _address(project: Project) -> str:
    return reverse("settings", args=[project.slug])
