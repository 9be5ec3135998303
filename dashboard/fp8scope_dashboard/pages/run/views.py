"""The page of one run."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlencode
from uuid import UUID

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.analysis.verdict_coverage import standing_now
from fp8scope_dashboard.pages.access import FRAMED, in_project, page, person, run_of, while_runs_exist
from fp8scope_dashboard.pages.badges import state_badge
from fp8scope_dashboard.pages.charts.arms import arms_of
from fp8scope_dashboard.pages.early_head import with_early_head
from fp8scope_dashboard.pages.progress import progress_context
from fp8scope_dashboard.pages.run import onset_facts, tabs
from fp8scope_dashboard.pages.run.onset_strip import strip_of
from fp8scope_dashboard.pages.run.ranks import ranks_of
from fp8scope_dashboard.pages.run.related import RelatedLink, links_of, related_runs_of
from fp8scope_dashboard.pages.run.summary import progress_of, summarise
from fp8scope_dashboard.runs.models import Run

SEEDS_COMPARED: Final = 8
# Of the template run.html.
FILES: Final = {
    "page_styles": ["pages/css/run.css"],
    "page_scripts": ["pages/js/run.js", "pages/js/console.js", "pages/js/panels.js", "pages/js/marks.js"],
}
# The parts that refresh themselves, by the id that htmx sends.
HEAD, SUMMARY, CARDS, TENSORS, TAB = "run-head", "run-summary", "run-cards", "tensors-card", "run-tab"
STEP_NOTES = "step-notes"


@in_project()
def run(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponseBase:
    """The page of a run, or the part that htmx asks for: its head, summary, cards, tensors, notes or tab."""
    shown = run_of(project, run_id)
    part = request.headers.get("HX-Target", "")
    if part == HEAD:
        return page(request, project, "runs", "pages/run/_head.html", head_context(shown))
    if part == SUMMARY:
        context = {
            "run": shown,
            "summary": summarise(shown),
            "related": related_runs_of(shown),
            **_strip(shown),
        }
        return page(request, project, "runs", "pages/run/_summary.html", context)
    if part == CARDS:
        context = {"run": shown, "summary": summarise(shown)}
        return page(request, project, "runs", "pages/run/_cards.html", context)
    if part == STEP_NOTES:
        context = {"run": shown, **tabs.step_notes_context(shown)}
        return page(request, project, "runs", "pages/run/_step_notes.html", context)
    if part == TENSORS:
        name = tabs.tab_named(request.GET.get("tab", ""))
        context = {"run": shown, "tab": name}
        context |= tabs.TABS["tensors"].context(shown, request.GET, person(request))
        return page(request, project, "runs", "pages/tensors/_tensors.html", context)
    if "first" in request.GET or "last" in request.GET:
        return redirect(tabs.typed_range(shown, request.GET))
    name = tabs.tab_named(request.GET.get("tab", ""))
    if part == TAB:
        return page(request, project, "runs", "pages/run/_tab.html", _tab_context(request, shown, name))
    beginning = {**FRAMED, **FILES, "has_chart": name == "overview"}

    @while_runs_exist(project)
    def make() -> HttpResponse:
        context = {**_tab_context(request, shown, name), **beginning}
        related = context.get("related")
        context |= head_context(shown, None if related is None else related.links)
        return page(request, project, "runs", "pages/run/run.html", context)

    return with_early_head(request, beginning, make)


def _tab_context(request: HttpRequest, shown: Run, name: str) -> dict[str, Any]:
    context = {
        "run": shown,
        "tab": name,
        "tabs": tabs.links_of(shown, name, request.GET),
        "template": tabs.TABS[name].template,
        **tabs.TABS[name].context(shown, request.GET, person(request)),
    }
    if name == "overview":
        context |= {**_strip(shown), **progress_context([shown.id])}
    return context


def head_context(shown: Run, links: list[RelatedLink] | None = None) -> dict[str, Any]:
    """Return what the title of a run's pages needs. `links`: those of the run, if they have been read."""
    baselines = comparison_runs.baseline_runs(shown)
    return {
        **FILES,
        "run": shown,
        "state": state_badge(standing_now(shown)),
        "arm": arms_of(shown.project).of(shown),
        "progress": progress_of(shown),
        "links": links_of(shown) if links is None else links,
        "error_line": onset_facts.failure_line(shown) if shown.state == "failed" else "",
        "compared_runs": urlencode([("runs", run.id) for run in (shown, *baselines[-SEEDS_COMPARED:])]),
    }


def _strip(shown: Run) -> dict[str, Any]:
    return {"strip": strip_of(onset_facts.facts_of(shown, standing_now(shown)))}


@in_project()
def ranks(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """The card of ranks and attempts, or the notice of the overview, for a refresh."""
    shown = run_of(project, run_id)
    context = {"run": shown, "ranks": ranks_of(shown)}
    is_notice = request.headers.get("HX-Target") == "rank-notice"
    template = "pages/run/_rank_notice.html" if is_notice else "pages/run/_ranks.html"
    return page(request, project, "runs", template, context)
