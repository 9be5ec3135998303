"""The page of one run."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis import lineage
from fp8scope_dashboard.analysis.judging import standing_now
from fp8scope_dashboard.pages import onset_facts, run_tabs
from fp8scope_dashboard.pages.access import FRAMED, in_project, page, run_of
from fp8scope_dashboard.pages.comparison_groups import Arms
from fp8scope_dashboard.pages.early_head import with_early_head
from fp8scope_dashboard.pages.onsets import strip_of
from fp8scope_dashboard.pages.ranks import ranks_of
from fp8scope_dashboard.pages.related_runs import links_of, related_runs_of
from fp8scope_dashboard.pages.summary import progress_of, summarise
from fp8scope_dashboard.pages.verdicts import state_badge
from fp8scope_dashboard.pages.views.progress import progress_context
from fp8scope_dashboard.runs.models import Run

SEEDS_COMPARED: Final = 8
# Of the template run.html.
FILES: Final = {
    "page_styles": ["pages/css/run.css"],
    "page_scripts": ["pages/js/run.js", "pages/js/console.js"],
}
# The parts that refresh themselves, by the id that htmx sends.
HEAD, SUMMARY, CARDS, TENSORS, TAB = "run-head", "run-summary", "run-cards", "tensors-card", "run-tab"


@in_project()
def run(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponseBase:
    """The page of a run, or the part that htmx asks for: its head, summary, cards, tensors or tab."""
    shown = run_of(project, run_id)
    part = request.headers.get("HX-Target", "")
    if part == HEAD:
        return page(request, project, "runs", "pages/_run_head.html", head_context(shown))
    if part == SUMMARY:
        context = {
            "run": shown,
            "summary": summarise(shown),
            "related": related_runs_of(shown),
            **_strip(shown),
        }
        return page(request, project, "runs", "pages/_run_summary.html", context)
    if part == CARDS:
        context = {"run": shown, "summary": summarise(shown)}
        return page(request, project, "runs", "pages/_run_cards.html", context)
    if part == TENSORS:
        context = {"run": shown, **run_tabs.TABS["tensors"].context(shown, request.GET)}
        return page(request, project, "runs", "pages/_tensors.html", context)
    if "first" in request.GET or "last" in request.GET:
        return redirect(run_tabs.typed_range(shown, request.GET))
    name = run_tabs.tab_named(request.GET.get("tab", ""))
    if part == TAB:
        return page(request, project, "runs", "pages/_run_tab.html", _tab_context(request, shown, name))
    beginning = {**FRAMED, **FILES, "has_chart": name == "overview"}

    def make() -> HttpResponse:
        context = {**_tab_context(request, shown, name), **head_context(shown), **beginning}
        return page(request, project, "runs", "pages/run.html", context)

    return with_early_head(request, beginning, make)


def _tab_context(request: HttpRequest, shown: Run, name: str) -> dict[str, Any]:
    context = {
        "run": shown,
        "tab": name,
        "tabs": run_tabs.links_of(shown, name, request.GET),
        "template": run_tabs.TABS[name].template,
        **run_tabs.TABS[name].context(shown, request.GET),
    }
    if name == "overview":
        context |= {**_strip(shown), **progress_context([shown.id])}
    return context


def head_context(shown: Run) -> dict[str, Any]:
    """What the title of a run's pages needs."""
    baselines = lineage.baseline_runs(shown)
    return {
        **FILES,
        "run": shown,
        "state": state_badge(standing_now(shown)),
        "arm": Arms(shown.project).of(shown),
        "progress": progress_of(shown),
        "links": links_of(shown),
        "error_line": onset_facts.failure_line(shown) if shown.state == "failed" else "",
        "compare_ids": [shown.id, *(baseline.id for baseline in baselines[-SEEDS_COMPARED:])],
    }


def _strip(shown: Run) -> dict[str, Any]:
    return {"strip": strip_of(onset_facts.facts_of(shown, standing_now(shown)))}


@in_project()
def ranks(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """The card of ranks and attempts, or the notice of the overview, for a refresh."""
    shown = run_of(project, run_id)
    context = {"run": shown, "ranks": ranks_of(shown)}
    is_notice = request.headers.get("HX-Target") == "rank-notice"
    template = "pages/_rank_notice.html" if is_notice else "pages/_ranks.html"
    return page(request, project, "runs", template, context)
