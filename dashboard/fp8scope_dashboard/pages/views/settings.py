"""The settings of a project: tokens, webhooks, alert rules and margins."""

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
from fp8scope_dashboard.alerts import rules as rule_kinds
from fp8scope_dashboard.alerts.channels import DeliveryError
from fp8scope_dashboard.alerts.channels.webhook import check_config
from fp8scope_dashboard.alerts.models import Channel, Rule, RuleAction, Severity
from fp8scope_dashboard.pages.access import in_project, page, person
from fp8scope_dashboard.pages.views.data import deletions

MOST_TOKENS, MOST_CHANNELS = 200, 20
SECRET_LENGTH = 200


@in_project()
def settings(request: HttpRequest, project: Project) -> HttpResponse:
    """The settings page."""
    return page(request, project, "settings", "pages/settings.html", _context(project))


def _context(project: Project) -> dict[str, Any]:
    tokens = ApiToken.objects.filter(project=project).select_related("created_by")
    return {
        "tokens": tokens.order_by("revoked_at", "-created_at")[:MOST_TOKENS],
        "channels": Channel.objects.filter(project=project).order_by("id"),
        "rules": [_rule(rule) for rule in Rule.objects.filter(project=project).order_by("id")],
        "severities": Severity.choices,
        "actions": RuleAction.choices,
        "server_url": django_settings.BASE_URL,
        "deletions": deletions(project),
    }


def _rule(rule: Rule) -> dict[str, Any]:
    kind = rule_kinds.kind_of(rule.kind)
    fields = [
        {"name": name, "value": rule.parameters.get(name, parameter.default), "parameter": parameter}
        for name, parameter in kind.parameters.items()
    ]
    return {"rule": rule, "kind": kind, "fields": fields}


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
def channel_create(request: HttpRequest, project: Project) -> HttpResponse:
    """Add a webhook."""
    name = request.POST.get("name", "").strip()[:128] or "Webhook"
    if Channel.objects.filter(project=project).count() >= MOST_CHANNELS:
        messages.error(request, f"A project can have at most {MOST_CHANNELS} webhooks. Remove one first.")
        return _settings(project, "webhooks")
    if (config := _channel_config(request)) is None:
        return _settings(project, "webhooks")
    Channel.objects.create(project=project, kind="webhook", name=name, config=config)
    messages.success(request, f"Added the webhook “{name}”.")
    return _settings(project, "webhooks")


def _channel_config(request: HttpRequest) -> dict[str, str] | None:
    """The posted address and secret. If they are invalid: None, and a message on the next page."""
    config = {"url": request.POST.get("url", "").strip()}
    if secret := request.POST.get("secret", "").strip():
        config["secret"] = secret[:SECRET_LENGTH]
    try:
        check_config(config)
    except DeliveryError as error:
        messages.error(request, str(error))
        return None
    return config


@require_POST
@in_project(Role.ADMIN)
def channel_change(request: HttpRequest, project: Project, channel_id: int) -> HttpResponse:
    """Enable or disable a webhook, replace its address and secret, or remove it."""
    channel = Channel.objects.filter(project=project, pk=channel_id).first()
    if channel is None:
        raise Http404("No such webhook.")
    action = request.POST.get("action")
    if action == "remove":
        channel.delete()
        messages.success(request, f"Removed the webhook “{channel.name}”.")
    elif action == "replace":
        if (config := _channel_config(request)) is not None:
            channel.config = config
            channel.save(update_fields=["config"])
            signed = "signed" if "secret" in config else "not signed"
            messages.success(request, f"Replaced the address of “{channel.name}”. Its messages are {signed}.")
    elif action in ("enable", "disable"):
        channel.enabled = action == "enable"
        channel.save(update_fields=["enabled"])
        messages.success(request, f"The webhook “{channel.name}” is {'on' if channel.enabled else 'off'}.")
    return _settings(project, "webhooks")


@require_POST
@in_project(Role.MEMBER)
def rule_change(request: HttpRequest, project: Project, rule_id: int) -> HttpResponse:
    """Change a rule's parameters, severity and action, and whether it is enabled."""
    rule = Rule.objects.filter(project=project, pk=rule_id).first()
    if rule is None:
        raise Http404("No such rule.")
    try:
        rule.parameters = rule_kinds.validate(rule.kind, _numbers(request, rule))
    except ValueError as error:
        messages.error(request, f"{rule.get_kind_display()}: {error}")
        return _settings(project, "rules")
    severity = request.POST.get("severity", "")
    if severity in Severity.values:
        rule.severity = severity
    rule.enabled = request.POST.get("enabled") == "1"
    action = request.POST.get("action", RuleAction.NOTHING)
    if action in RuleAction.values and rule_kinds.kind_of(rule.kind).names_tensors:
        rule.action = action
    rule.save(update_fields=["parameters", "severity", "enabled", "action"])
    messages.success(request, f"Saved the rule “{rule.get_kind_display()}”.")
    return _settings(project, "rules")


def _numbers(request: HttpRequest, rule: Rule) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name in rule_kinds.kind_of(rule.kind).parameters:
        text = request.POST.get(name, "").strip()
        if text:
            try:
                numbers[name] = float(text)
            except ValueError:
                raise rule_kinds.RuleError(f"{name} must be a number, not {text[:40]!r}.") from None
    return numbers


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
