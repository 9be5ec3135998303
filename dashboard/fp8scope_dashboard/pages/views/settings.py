"""The settings of a project: tokens, alert rules and margins."""

from __future__ import annotations

import math
from typing import Any

from django.conf import settings as django_settings
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_POST

from fp8scope_dashboard.accounts.models import ApiToken, Project, Role
from fp8scope_dashboard.accounts.services import create_token, revoke_token
from fp8scope_dashboard.alerts.models import Channel
from fp8scope_dashboard.pages.access import in_project, page, person
from fp8scope_dashboard.pages.views.data import deletions

MOST_TOKENS = 200


@in_project()
def settings(request: HttpRequest, project: Project) -> HttpResponse:
    """The settings page."""
    return page(request, project, "settings", "pages/settings.html", _context(project))


def _context(project: Project) -> dict[str, Any]:
    tokens = ApiToken.objects.filter(project=project).select_related("created_by")
    return {
        "tokens": tokens.order_by("revoked_at", "-created_at")[:MOST_TOKENS],
        "channels": Channel.objects.filter(project=project).order_by("id"),
        "server_url": django_settings.BASE_URL,
        "deletions": deletions(project),
    }


@require_POST
@in_project(Role.MEMBER)
def token_create(request: HttpRequest, project: Project) -> HttpResponse:
    """Create a token. Only this response contains it."""
    name = request.POST.get("name", "").strip() or f"{person(request).username}'s token"
    live = ApiToken.objects.filter(project=project, revoked_at=None).count()
    context: dict[str, Any] = {"project": project, "server_url": django_settings.BASE_URL}
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


@require_POST
@in_project(Role.MEMBER)
def token_revoke(request: HttpRequest, project: Project, token_id: int) -> HttpResponse:
    """Revoke a token."""
    token = ApiToken.objects.filter(project=project, pk=token_id).first()
    if token is None:
        raise Http404("No such token.")
    revoke_token(token)
    messages.success(request, f"Revoked the token “{token.name}”. The server refuses processes that use it.")
    return _settings(project, "tokens")


@require_POST
@in_project(Role.ADMIN)
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
        texts_by_field = (f"{field}: {' '.join(texts)}" for field, texts in error.message_dict.items())
        messages.error(request, " ".join(texts_by_field))
    except ValueError:
        messages.error(request, "Margin and alpha must be numbers, such as 0.25 and 0.05.")
    else:
        project.save(update_fields=["margin", "alpha"])
        messages.success(request, "Saved. Verdicts are computed again within a minute.")
    return _settings(project, "margins")


def _settings(project: Project, anchor: str) -> HttpResponse:
    return redirect(f"{reverse('settings', args=[project.slug])}#{anchor}")
