"""Asking a training process to do something, and what it reports."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import require_POST

from fp8scope_dashboard.accounts.models import Project, Role
from fp8scope_dashboard.control.commands import CommandError, give
from fp8scope_dashboard.control.models import CommandKind, Report
from fp8scope_dashboard.pages.access import in_project, page, person, run_of
from fp8scope_dashboard.pages.figures.findings import ranking_figure, window_figure
from fp8scope_dashboard.pages.formatting import percent
from fp8scope_dashboard.pages.run_controls import findings, modules_of, ranking_of, steering
from fp8scope_dashboard.pages.series_loading import Options
from fp8scope_dashboard.pages.views.figures import empty_answer, figure_answer

BARS, COMPACT_BARS = 20, 12


@in_project()
def commands(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """The card of commands alone, for a refresh."""
    run = run_of(project, run_id)
    context = {"run": run, "modules": modules_of(run), **steering(run)}
    return page(request, project, "runs", "pages/_commands.html", context)


@in_project()
def reports(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """The cards of reference windows and bisections alone, for a refresh."""
    run = run_of(project, run_id)
    return page(request, project, "runs", "pages/_reports.html", {"run": run, **findings(run)})


@require_POST
@in_project(Role.MEMBER)
def command_new(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """Give a command; back to its card."""
    run = run_of(project, run_id)
    kind = request.POST.get("kind", "")
    try:
        command = give(
            run,
            kind,
            _arguments(request, kind),
            user=person(request),
            reason=request.POST.get("reason", "").strip(),
        )
    except CommandError as error:
        messages.error(request, str(error))
    else:
        what = command.get_kind_display().lower()
        messages.success(request, f"Asked for: {what}. The training process gets it with its next message.")
    return redirect(f"{reverse('run', args=[project.slug, run.id])}#commands")


def _arguments(request: HttpRequest, kind: str) -> dict[str, Any]:
    if kind == CommandKind.FALLBACK:
        patterns = request.POST.get("patterns", "").replace(",", " ").split()
        return {"patterns": patterns, "precision": request.POST.get("precision", "bf16")}
    if kind == CommandKind.PAUSE and (minutes := request.POST.get("minutes", "").strip()):
        try:
            return {"seconds": round(60 * float(minutes))}
        except (ValueError, OverflowError):
            raise CommandError("The minutes of a pause are a number, such as 10.") from None
    return {}


@gzip_page
@in_project()
def report_figure(request: HttpRequest, project: Project, run_id: UUID, name: str) -> HttpResponse:
    """A reference window's curves or a bisection's ranking: the chosen one, else the newest."""
    run, options = run_of(project, run_id), Options.of(request.GET)
    if name not in ("reference", "bisect"):
        raise Http404("No such figure.")
    chosen = request.GET.get("report", "")
    found = Report.objects.filter(run=run, kind=name)
    if chosen.isascii() and chosen.isdigit() and len(chosen) < 19:
        found = found.filter(pk=int(chosen))
    report = found.order_by("-step", "-id").first() if name == "reference" else found.order_by("-id").first()
    if report is None:
        return empty_answer("Nothing has been reported here.")
    if name == "reference":
        drawn = window_figure(report.document, report.step, options.theme, compact=options.compact)
        delta = percent(float(report.document["delta"]), signed=True)
        return figure_answer(drawn, f"Losses from step {report.step} in FP8 and in BF16: {delta} apart.")
    ranking = ranking_of(report, COMPACT_BARS if options.compact else BARS)
    rows = [(one.layer, one.product, one.error, one.cosine) for one in ranking.products]
    drawn = ranking_figure(rows, ranking.total_error, options.theme, compact=options.compact)
    worst = rows[0]
    return figure_answer(drawn, f"{worst[0]} {worst[1]} changes the gradient most: {percent(worst[2])}.")
