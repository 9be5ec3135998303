"""The settings of a project: its name, members, tokens, channels, rules, margins and storage."""

from __future__ import annotations

import math
from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db.models import F
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse

from fp8scope_dashboard.accounts import members, people
from fp8scope_dashboard.accounts.addresses import server_address
from fp8scope_dashboard.accounts.members import MOST_MEMBERS
from fp8scope_dashboard.accounts.models import ApiToken, Membership, Project, Role, User
from fp8scope_dashboard.accounts.services import create_sign_in_link, create_token, revoke_token
from fp8scope_dashboard.alerts.models import Channel, Rule
from fp8scope_dashboard.pages.access import POST, in_project, may, page, person
from fp8scope_dashboard.pages.undo_offer import offer_undo
from fp8scope_dashboard.pages.views.data import deletions
from fp8scope_dashboard.runs.models import Run

MOST_TOKENS = 200
MOST_GROUPS = 200


@in_project()
def settings(request: HttpRequest, project: Project) -> HttpResponse:
    """The settings page."""
    return page(request, project, "settings", "pages/settings.html", _context(project))


def _context(project: Project) -> dict[str, Any]:
    memberships = Membership.objects.filter(project=project).select_related("user")
    groups = Run.objects.filter(project=project).exclude(group="").order_by("group")
    tokens = ApiToken.objects.filter(project=project).select_related("created_by")
    return {
        "members": memberships.order_by("user__username")[:MOST_MEMBERS],
        "roles": Role.choices,
        "groups": groups.values_list("group", flat=True).distinct()[:MOST_GROUPS],
        "rules_on": Rule.objects.filter(project=project, enabled=True).count(),
        "tokens": tokens.order_by(F("revoked_at").desc(nulls_first=True), "-created_at")[:MOST_TOKENS],
        "channels": Channel.objects.filter(project=project).order_by("id"),
        "deletions": deletions(project),
    }


@in_project(Role.ADMIN, methods=POST)
def general(request: HttpRequest, project: Project) -> HttpResponse:
    """Change the project's name and its default baseline."""
    project.name = request.POST.get("name", "").strip()
    project.default_baseline = request.POST.get("default_baseline", "").strip()
    try:
        project.full_clean()
    except ValidationError as error:
        messages.error(request, _problems(error))
    else:
        project.save(update_fields=["name", "default_baseline"])
        messages.success(request, "Saved.")
    return _settings(project, "general")


@in_project(Role.ADMIN, methods=POST)
def member_add(request: HttpRequest, project: Project) -> HttpResponse:
    """Add a member. An administrator of the server also creates the account, and gets its sign-in link."""
    name, role = request.POST.get("name", "").strip(), _role(request)
    may_create = person(request).is_superuser
    try:
        if may_create and not User.objects.filter(username__iexact=name).exists():
            user = people.invite(name, request.POST.get("email", "").strip(), project, role)
            link = create_sign_in_link(user, server_address(request))
            context = {**_context(project), "invited": user, "invitation": link}
            return page(request, project, "settings", "pages/settings.html", context)
        membership = members.add_member(project, name, role)
    except people.PeopleError as error:
        messages.error(request, str(error))
    else:
        messages.success(request, f"{membership.user.username} is now a member ({membership.role}).")
    return _settings(project, "members")


@in_project(Role.ADMIN, methods=POST)
def member_change(request: HttpRequest, project: Project, member_id: int) -> HttpResponse:
    """Change the role of a member, or remove them."""
    membership = (
        Membership.objects.select_related("user", "project").filter(project=project, pk=member_id).first()
    )
    if membership is None:
        raise Http404("No such member.")
    name = membership.user.username
    try:
        if "remove" in request.POST:
            members.remove_member(membership)
            messages.success(request, f"{name} is no longer a member. What they made stays.")
            again = reverse("member_add", args=[project.slug])
            offer_undo(request, f"Make {name} a member again?", again, name=name, role=membership.role)
        else:
            role = _role(request)
            members.change_role(membership, role)
            messages.success(request, f"{name} has the role {role.value} now.")
    except people.PeopleError as error:
        messages.error(request, str(error))
    if may(request, project, Role.VIEWER):
        return _settings(project, "members")
    return redirect("home")


def _role(request: HttpRequest) -> Role:
    text = request.POST.get("role", "")
    return Role(text) if text in Role.values else Role.VIEWER


def _problems(error: ValidationError) -> str:
    return " ".join(f"{field}: {' '.join(texts)}" for field, texts in error.message_dict.items())


@in_project(Role.MEMBER, methods=POST)
def token_create(request: HttpRequest, project: Project) -> HttpResponse:
    """Create a token. Only this response contains it."""
    name = request.POST.get("name", "").strip() or f"{person(request).username}'s token"
    live = ApiToken.objects.filter(project=project, revoked_at=None).count()
    context: dict[str, Any] = {"project": project, "server_url": server_address(request)}
    if live >= MOST_TOKENS:
        context["problem"] = (
            f"The project has {live} tokens, which is the maximum. Revoke tokens that are no longer used."
        )
    else:
        try:
            context["token"], context["secret"] = create_token(project, name, person(request))
        except ValidationError as error:
            context["problem"] = " ".join(error.messages)
    if "HX-Request" not in request.headers:
        # The browser has not loaded the page's scripts, or does not run scripts.
        return page(request, project, "settings", "pages/settings.html", {**_context(project), **context})
    answer = render(request, "pages/_token.html", context)
    # This event makes the table of tokens reload itself.
    answer["HX-Trigger"] = "fp8:tokens"
    return answer


@in_project()
def token_list(request: HttpRequest, project: Project) -> HttpResponse:
    """The table of tokens, for a refresh."""
    return page(request, project, "settings", "pages/_tokens.html", _context(project))


@in_project(Role.MEMBER, methods=POST)
def token_revoke(request: HttpRequest, project: Project, token_id: int) -> HttpResponse:
    """Revoke a token."""
    token = ApiToken.objects.filter(project=project, pk=token_id).first()
    if token is None:
        raise Http404("No such token.")
    revoke_token(token)
    messages.success(request, f"Revoked the token “{token.name}”. The server refuses processes that use it.")
    return _settings(project, "tokens")


@in_project(Role.ADMIN, methods=POST)
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
        messages.success(request, "Saved. Verdicts are computed again within a minute.")
    return _settings(project, "margins")


def _settings(project: Project, anchor: str) -> HttpResponse:
    return redirect(f"{reverse('settings', args=[project.slug])}#{anchor}")
