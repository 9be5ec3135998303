"""The alert rules of a project: listing, changing, and trying them on past runs."""

from __future__ import annotations

import json
import logging
from datetime import datetime
from typing import Any, Final

from django.contrib import messages
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone

from fp8scope_dashboard.accounts import permissions
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts import rules as rule_kinds
from fp8scope_dashboard.alerts.custom_rules import documents as rule_documents
from fp8scope_dashboard.alerts.custom_rules import store as rule_store
from fp8scope_dashboard.alerts.custom_rules import trials
from fp8scope_dashboard.alerts.custom_rules.audit import record_rules
from fp8scope_dashboard.alerts.custom_rules.documents import RuleDocumentError
from fp8scope_dashboard.alerts.models import (
    Channel,
    Condition,
    Rule,
    RuleAction,
    RuleKind,
    RuleTrial,
    Severity,
    TrialState,
)
from fp8scope_dashboard.alerts.tasks import try_rule
from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.audit.log import actor_of
from fp8scope_dashboard.pages.access import POST, in_project, page, person
from fp8scope_dashboard.pages.address_values import uuids_in
from fp8scope_dashboard.pages.alerts import rule_groups, rule_words
from fp8scope_dashboard.pages.undo_offer import offer_undo
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.rank_merge import DERIVED

logger = logging.getLogger(__name__)

RUNS_OFFERED: Final = 30
# Runs whose scalars and statistics the form suggests.
RUNS_ASKED: Final = 5


@in_project()
def rules(request: HttpRequest, project: Project) -> HttpResponse:
    """The rules in words, in groups by what they watch; those that the search `q` finds."""
    search = request.GET.get("q", "").strip()[: rule_groups.MAX_SEARCH]
    groups = rule_groups.groups_of(rule_store.rules_in(project), search)
    context = {
        "groups": groups,
        "search": search,
        "max_search": rule_groups.MAX_SEARCH,
        "invites": not search and all(group.name != rule_groups.OWN for group in groups),
    }
    is_part = request.headers.get("HX-Target") == "rule-groups"
    template = "pages/alerts/_rule_groups.html" if is_part else "pages/alerts/rules.html"
    return page(request, project, "alerts", template, context)


@in_project()
def rule(request: HttpRequest, project: Project, rule_id: int | None = None) -> HttpResponse:
    """The form of a rule, filled with the stored one, or empty."""
    stored = None if rule_id is None else _stored(project, rule_id)
    document = rule_documents.document_of(stored) if stored is not None else {}
    if stored is None and (kind := request.GET.get("kind", "")):
        document = {"kind": kind} if kind in rule_kinds.KINDS else {}
    if stored is None and (run := request.GET.get("run", "")):
        document["run"] = run
    return _form(request, project, stored, document)


@in_project(permissions.CHANGE_RULES, methods=POST)
def rule_save(request: HttpRequest, project: Project, rule_id: int | None = None) -> HttpResponse:
    """Save the posted rule, or show the form again with what is wrong."""
    stored = None if rule_id is None else _stored(project, rule_id)
    document = posted_document(request)
    before = None if stored is None else rule_documents.document_of(stored)
    try:
        with transaction.atomic():
            saved = rule_store.save(rule_documents.parse(project, document), stored)
            record_rules(actor_of(request), project, [rule_store.change_of(saved, before)])
    except RuleDocumentError as error:
        return _form(request, project, stored, document, error)
    messages.success(request, f"Saved the rule “{saved.title}”. It judges new data from now on.")
    return redirect("rules", project.slug)


@in_project(permissions.CHANGE_RULES, methods=POST)
def rule_remove(request: HttpRequest, project: Project, rule_id: int) -> HttpResponse:
    """Remove a rule. Its alerts are kept."""
    stored = _stored(project, rule_id)
    change = rule_store.RuleChange("removed", stored.title, {}, before=rule_documents.document_of(stored))
    try:
        with transaction.atomic():
            rule_store.remove(stored)
            entry = record_rules(actor_of(request), project, [change])
    except RuleDocumentError as error:
        messages.error(request, error.message)
    else:
        messages.success(request, f"Removed the rule “{change.title}”. Its alerts are kept.")
        assert entry is not None
        again = reverse("change_undo", args=[project.slug, entry.pk])
        address = reverse("rules", args=[project.slug])
        offer_undo(request, f"Restore the rule “{change.title}”?", again, next=address)
    return redirect("rules", project.slug)


@in_project(permissions.TRY_RULES, methods=POST)
def rule_try(request: HttpRequest, project: Project) -> HttpResponse:
    """Begin a trial of the posted rule on the chosen runs."""
    try:
        run_ids = uuids_in(request.POST.getlist("runs"), trials.MAX_RUNS)
        trial = trials.begin(project, posted_document(request), list(run_ids), person(request))
    except RuleDocumentError as error:
        return render(request, "pages/alerts/_trial.html", {"project": project, "problem": _in_words(error)})
    try:
        try_rule.delay(trial.pk)
    except Exception as error:  # whatever Redis or Celery raises: the page says that there is no trial
        logger.warning("Trial %d of a rule could not be queued: %s.", trial.pk, type(error).__name__)
        trial.state = TrialState.FAILED
        trial.problem = "The server's queue cannot be reached. Try again later."
        trial.save(update_fields=["state", "problem"])
    return render(request, "pages/alerts/_trial.html", {"project": project, "trial": trial})


@in_project()
def trial(request: HttpRequest, project: Project, trial_id: int) -> HttpResponse:
    """The progress or the result of a trial, as a part of the form's page."""
    stored = RuleTrial.objects.filter(project=project, pk=trial_id).first()
    if stored is None:
        raise Http404("No such trial.")
    if stored.state in (TrialState.WAITING, TrialState.RUNNING) and stored.created_at < _lost_before():
        stored.state, stored.problem = TrialState.FAILED, "The worker did not finish the trial. Try again."
    return render(request, "pages/alerts/_trial.html", {"project": project, "trial": stored})


def _lost_before() -> datetime:
    return timezone.now() - trials.LOST_AFTER


def posted_document(request: HttpRequest) -> dict[str, Any]:
    """The document of the posted form, or of its field `document` as JSON; `parse` checks it."""
    post = request.POST
    if text := post.get("document", ""):
        return _document_in(text)
    document: dict[str, Any] = {}
    if kind := post.get("kind", ""):
        document["kind"] = kind
        prefix = "parameter-"
        document["parameters"] = {
            name.removeprefix(prefix): _number(str(text))
            for name, text in post.items()
            if name.startswith(prefix) and str(text).strip()
        }
    else:
        for name in ("name", "statistic", "tensors", "condition"):
            document[name] = post.get(name, "").strip()
        for name in rule_documents.NUMBERS:
            if text := post.get(name, "").strip():
                document[name] = _number(text)
        # The form asks for per cent.
        if isinstance(document.get("share"), float | int):
            document["share"] = document["share"] / 100.0
    if run := post.get("run", "").strip():
        document["run"] = run
    document["severity"] = post.get("severity", "")
    document["enabled"] = post.get("enabled") == "1"
    document["action"] = post.get("action", "") or "none"
    document["channels"] = post.getlist("channels")
    if post.get("quiet") == "1":
        document["quiet"] = {
            "from": post.get("quiet_from", "")[:5],
            "to": post.get("quiet_to", "")[:5],
            "zone": post.get("quiet_zone", "").strip(),
            "critical_breaks_through": post.get("critical_breaks_through") == "1",
        }
    if post.get("escalate") == "1":
        minutes = _number(post.get("after_minutes", ""))
        document["escalate"] = {
            "after_minutes": minutes,
            "channels": post.getlist("escalation_channels"),
        }
    return document


def _document_in(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _number(text: str) -> float | str:
    """The number, or the text itself, which `parse` refuses with the name of its field."""
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def _form(
    request: HttpRequest,
    project: Project,
    stored: Rule | None,
    document: dict[str, Any],
    error: RuleDocumentError | None = None,
) -> HttpResponse:
    kind = rule_kinds.KINDS.get(str(document.get("kind", "")))
    channels = list(Channel.objects.filter(project=project).order_by("name", "id"))
    escalate = document.get("escalate") or {}
    context: dict[str, Any] = {
        "stored": stored,
        "save_address": _save_address(project, stored),
        "document": document,
        "kind": kind,
        "title": stored.title if stored is not None else (kind and RuleKind(kind.name).label) or "New rule",
        "parameters": _parameters(document, kind),
        "share_percent": _shown(_percent(document.get("share", 1.0))),
        "severity": document.get("severity") or (kind.severity if kind is not None else Severity.WARNING),
        "is_enabled": document.get("enabled", True),
        "conditions": Condition.choices,
        "severities": Severity.choices,
        "actions": [(value or "none", label) for value, label in RuleAction.choices],
        "names_tensors": kind is None or kind.names_tensors,
        "channels": [(channel, channel.name in document.get("channels", ())) for channel in channels],
        "escalate": escalate,
        "escalation_channels": [(option, option.name in escalate.get("channels", ())) for option in channels],
        "zones": rule_documents.time_zones(),
        "runs": _runs(project, str(document.get("run", ""))),
        "run_is_fixed": stored is not None and stored.kind != RuleKind.THRESHOLD,
        # Why it cannot be tried on past runs; empty if it can.
        "not_tried": trials.NOT_STORED.get(kind.name, "") if kind is not None else "",
        "problem": None if error is None else _in_words(error),
        **_suggestions(project),
    }
    status = 200 if error is None else 422
    return page(request, project, "alerts", "pages/alerts/rule.html", context, status)


def _save_address(project: Project, stored: Rule | None) -> str:
    if stored is None:
        return reverse("rule_create", args=[project.slug])
    return reverse("rule_save", args=[project.slug, stored.pk])


def _runs(project: Project, chosen: str) -> list[Run]:
    """The latest runs, and the chosen one, however old it is."""
    runs = list(Run.objects.filter(project=project).order_by("-created_at")[:RUNS_OFFERED])
    run_id = comparison_runs.as_run_id(chosen)
    if run_id is not None and run_id not in {run.pk for run in runs}:
        runs += Run.objects.filter(project=project, pk=run_id)
    return runs


def _parameters(document: dict[str, Any], kind: rule_kinds.KindDefinition | None) -> list[dict[str, Any]]:
    """The fields of a built-in kind's parameters, or of an own rule's numbers."""
    given = document.get("parameters", {}) if kind is not None else document
    if not isinstance(given, dict):
        given = {}
    shown = rule_kinds.kind_of(RuleKind.THRESHOLD) if kind is None else kind
    return [
        {
            "name": name,
            "label": rule_words.label_of(name, shown.name),
            # A value has no default that would be right for any statistic.
            "value": _shown(given.get(name, "" if name == "value" else parameter.default)),
            "parameter": parameter,
        }
        for name, parameter in shown.parameters.items()
    ]


def _suggestions(project: Project) -> dict[str, list[str]]:
    """The names of scalars and statistics that the project's latest runs have."""
    scalars, statistics = {"loss"}, set[str]()
    for run in Run.objects.filter(project=project).order_by("-heartbeat_at")[:RUNS_ASKED]:
        scalars.update(run.last_scalars)
        statistics.update(queries.statistic_names(run.id))
    return {"scalars": sorted(scalars), "statistics": sorted(statistics or {"amax", *DERIVED})}


def _shown(value: Any) -> Any:
    """A number in the format of an input field; what is no number as it was entered."""
    return f"{value:.12g}" if isinstance(value, float | int) else value


def _percent(share: Any) -> Any:
    return 100.0 * share if isinstance(share, float | int) else share


def _in_words(error: RuleDocumentError) -> str:
    """The error with the label of its field, as the form has it."""
    if not error.key:
        return error.message
    name = str(error.key[-1])
    words = {"to": "End of the quiet hours", "from": "Beginning of the quiet hours", "zone": "Time zone"}
    words |= {"after_minutes": "Minutes until escalation", "tensors": "Tensors"}
    return f"{words.get(name) or rule_words.label_of(name)}: {error.message}"


def _stored(project: Project, rule_id: int) -> Rule:
    stored = Rule.objects.filter(project=project, pk=rule_id).select_related("run").first()
    if stored is None:
        raise Http404("No such rule.")
    return stored
