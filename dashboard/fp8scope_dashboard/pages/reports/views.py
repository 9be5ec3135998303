"""Frozen reports: make one, list them, share them by link, and show one without an account."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db.models import Count, Q
from django.http import Http404, HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.cache import add_never_cache_headers
from django.views.decorators.http import require_safe

from fp8scope_dashboard.accounts import permissions
from fp8scope_dashboard.accounts.addresses import server_address
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.audit.log import actor_of, record
from fp8scope_dashboard.audit.models import Action
from fp8scope_dashboard.pages.access import POST, SAFE, in_project, may, page, person, require_own, rights_of
from fp8scope_dashboard.pages.address_values import whole_number
from fp8scope_dashboard.pages.compare.runs import MAX_CHOSEN, chosen_runs
from fp8scope_dashboard.pages.reports.document import sections_to_show
from fp8scope_dashboard.pages.reports.sections import PARTS, ReportChoice, sections_of, subject_of
from fp8scope_dashboard.pages.run.facts import own_version, run_facts
from fp8scope_dashboard.runs.models import Run, Tensor
from fp8scope_dashboard.shared_reports.models import SharedReport, ShareLink
from fp8scope_dashboard.shared_reports.services import (
    LIFETIMES,
    TITLE_LENGTH,
    ReportError,
    create_link,
    create_report,
    open_link,
    revoke_link,
    working_links,
)
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.text import markdown
from fp8scope_dashboard.text.run_summary import paragraph

MAX_OFFERED: Final = 50
MAX_SUGGESTED: Final = 2_000
# Runs whose paragraph is shown beside the form.
MAX_PARAGRAPHS: Final = 6
REPORTS_A_PAGE: Final = 50
MAX_LINKS_SHOWN: Final = 200
CONTENT_VERSION: Final = 1
# Nothing else of the server, and no script at all.
SHARED_POLICY: Final = (
    "default-src 'none'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class Paragraphs:
    """The one paragraph about a run, in the forms that can be copied."""

    run: Run
    text: str
    markdown: str
    latex: str


@in_project()
def reports(request: HttpRequest, project: Project) -> HttpResponse:
    """The reports of a project, newest first."""
    listed = SharedReport.objects.filter(project=project).select_related("created_by").defer("content")
    working = Count("links", filter=Q(links__in=working_links()))
    shown = Paginator(
        listed.annotate(working=working).order_by("-created_at", "id"), REPORTS_A_PAGE
    ).get_page(request.GET.get("page"))
    return page(request, project, "reports", "pages/reports/reports.html", {"reports": shown})


@in_project(methods=SAFE + POST)
def report_new(request: HttpRequest, project: Project) -> HttpResponse:
    """Choose what a report has; POST makes it. The address contains the runs."""
    query = request.POST if request.method == "POST" else request.GET
    chosen = chosen_runs(project, query)
    runs = chosen.runs
    problem = ""
    if request.method == "POST":
        if not may(request, project, permissions.MAKE_REPORTS):
            raise PermissionDenied("This requires the role member.")
        try:
            return redirect("shared_report", project.slug, _make(request, project, runs).pk)
        except ReportError as error:
            problem = str(error)
    status = 422 if problem else 200
    context = {**_form(project, runs, query), "problem": problem, "is_cut": chosen.total > len(runs)}
    return page(request, project, "reports", "pages/reports/new.html", context, status)


def _make(request: HttpRequest, project: Project, runs: list[Run]) -> SharedReport:
    if not runs:
        raise ReportError("Choose at least one run.")
    query = request.POST
    text = query.get("text", "")
    if len(text) > markdown.MAX_CHARACTERS:
        raise ReportError(f"The text is longer than {markdown.MAX_CHARACTERS:,} characters.")
    parts = [name for name in query.getlist("parts") if name in PARTS]
    if not parts and not text.strip():
        raise ReportError("Choose at least one part, or write a text.")
    choice = ReportChoice(
        runs=runs,
        parts=parts,
        statistic=query.get("statistic", "")[:64],
        tensor=query.get("tensor", "").strip()[:512],
        first=_step(query.get("first", ""), "first"),
        last=_step(query.get("last", ""), "last"),
        text=text,
    )
    if "tensor" in parts and not Tensor.objects.filter(run=choice.subject, name=choice.tensor).exists():
        raise ReportError(
            f"The run {choice.subject.name} has no tensor of that name: choose one of the list."
            if choice.tensor
            else "Choose the tensor, or leave out “One tensor”."
        )
    content = {
        "version": CONTENT_VERSION,
        "made_with": own_version(),
        "runs": [run.name for run in runs],
        "steps": [choice.first, choice.last],
        "sections": sections_of(project, choice),
    }
    return create_report(project, query.get("title", ""), content, person(request))


def _step(text: str, name: str) -> str:
    text = text.strip()
    if text and whole_number(text) is None:
        raise ReportError(f"The {name} step must be a whole number, such as 240, or empty.")
    return text


def _form(project: Project, runs: list[Run], query: QueryDict) -> dict[str, Any]:
    offered = list(Run.objects.filter(project=project).order_by("-created_at", "id")[:MAX_OFFERED])
    chosen = {run.pk for run in runs}
    subject = subject_of(runs) if runs else None
    parts = set(query.getlist("parts")) & PARTS.keys() or {
        name for name, part in PARTS.items() if part.by_default
    }
    judged = [run for run in runs if run.baseline or len(runs) == 1]
    statistics = queries.statistic_names(subject.pk) if subject else []
    return {
        "runs": runs,
        "offered": [*runs, *(run for run in offered if run.pk not in chosen)],
        "chosen_ids": chosen,
        "parts": [(name, part.label, name in parts) for name, part in PARTS.items()],
        "statistics": sorted(statistics),
        "statistic": query.get("statistic") or queries.overflow_name(statistics) or "",
        "tensors": Tensor.objects.filter(run=subject).order_by("index")[:MAX_SUGGESTED] if subject else [],
        "tensor": query.get("tensor", "")[:512],
        "title": query.get("title", "") or _title(runs),
        "text": query.get("text", "")[: markdown.MAX_CHARACTERS],
        "first": query.get("first", "")[:19],
        "last": query.get("last", "")[:19],
        "title_length": TITLE_LENGTH,
        "text_length": markdown.MAX_CHARACTERS,
        "most_runs": MAX_CHOSEN,
        "paragraphs": [_paragraphs(run) for run in judged[:MAX_PARAGRAPHS]],
        "more_paragraphs": max(0, len(judged) - MAX_PARAGRAPHS),
    }


def _paragraphs(run: Run) -> Paragraphs:
    facts = run_facts(run)
    return Paragraphs(run, paragraph(facts, "text"), paragraph(facts, "markdown"), paragraph(facts, "latex"))


def _title(runs: list[Run]) -> str:
    if not runs:
        return ""
    names = [run.name for run in runs if run.precision != "bf16"] or [run.name for run in runs]
    return (
        " and ".join(names[:2])[:TITLE_LENGTH] if len(names) <= 2 else f"{names[0]} and others"[:TITLE_LENGTH]
    )


@in_project()
def report(request: HttpRequest, project: Project, report_id: UUID) -> HttpResponse:
    """One report with its links."""
    return _report_page(request, project, _report_of(project, report_id))


def _report_page(request: HttpRequest, project: Project, shown: SharedReport, **more: Any) -> HttpResponse:
    links = shown.links.select_related("created_by")[:MAX_LINKS_SHOWN]
    may_end = partial(rights_of(request, project), permissions.END_REPORTS)
    context = {
        "report": shown,
        "sections": sections_to_show(shown.content),
        "links": [(link, may_end(link.created_by_id)) for link in links],
        "may_delete": may_end(shown.created_by_id),
        "lifetimes": list(LIFETIMES),
        **more,
    }
    return page(request, project, "reports", "pages/reports/report.html", context)


@in_project(permissions.MAKE_REPORTS, methods=POST)
def link_new(request: HttpRequest, project: Project, report_id: UUID) -> HttpResponse:
    """Make a link. Only this response contains it."""
    shown = _report_of(project, report_id)
    lifetime = request.POST.get("lifetime", "")
    if lifetime not in LIFETIMES:
        messages.error(request, f"Choose how long the link works: {', '.join(LIFETIMES)}.")
        return redirect("shared_report", project.slug, shown.pk)
    try:
        _, secret = create_link(shown, person(request), LIFETIMES[lifetime])
    except ReportError as error:
        messages.error(request, str(error))
        return redirect("shared_report", project.slug, shown.pk)
    record(actor_of(request), project, Action.LINK_CREATED, f"“{shown.title}”, {lifetime}")
    address = server_address(request) + reverse("shared", args=[secret])
    return _report_page(request, project, shown, new_link=address)


@in_project(permissions.END_REPORTS, methods=POST)
def link_revoke(request: HttpRequest, project: Project, report_id: UUID, link_id: int) -> HttpResponse:
    """End a link."""
    shown = _report_of(project, report_id)
    link = ShareLink.objects.filter(report=shown, pk=link_id).first()
    if link is None:
        raise Http404("No such link.")
    require_own(request, project, permissions.END_REPORTS, link.created_by_id)
    revoke_link(link)
    record(actor_of(request), project, Action.LINK_REVOKED, f"“{shown.title}”")
    messages.success(request, "The link no longer works.")
    return redirect("shared_report", project.slug, shown.pk)


@in_project(permissions.END_REPORTS, methods=POST)
def report_delete(request: HttpRequest, project: Project, report_id: UUID) -> HttpResponse:
    """Delete a report with its links."""
    shown = _report_of(project, report_id)
    require_own(request, project, permissions.END_REPORTS, shown.created_by_id)
    title = shown.title
    shown.delete()
    record(actor_of(request), project, Action.REPORT_DELETED, f"“{title}”")
    messages.success(request, f"Deleted the report “{title}”. Its links no longer work.")
    return redirect("shared_reports", project.slug)


@require_safe
def shared(request: HttpRequest, secret: str) -> HttpResponse:
    """A report for everybody who has its link. An unknown, revoked and expired link look the same."""
    shown = open_link(secret)
    if shown is None:
        answer = render(request, "pages/reports/gone.html", status=410)
    else:
        context = {"report": shown, "sections": sections_to_show(shown.content)}
        answer = render(request, "pages/reports/shared.html", context)
    answer["X-Robots-Tag"] = "noindex, nofollow, noarchive"
    # The address is the secret: it must not reach another site.
    answer["Referrer-Policy"] = "no-referrer"
    answer["Content-Security-Policy"] = SHARED_POLICY
    add_never_cache_headers(answer)
    return answer


def _report_of(project: Project, report_id: UUID) -> SharedReport:
    shown = SharedReport.objects.filter(project=project, pk=report_id).select_related("created_by").first()
    if shown is None:
        raise Http404("No such report.")
    return shown
