"""Commands to a training process, and figures of its reports."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect
from django.urls import reverse

from fp8scope_dashboard.accounts import permissions
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.audit.log import actor_of, record
from fp8scope_dashboard.audit.models import Action
from fp8scope_dashboard.control.commands import CommandError, give
from fp8scope_dashboard.control.models import CommandKind, Report
from fp8scope_dashboard.pages.access import POST, in_project, page, person, run_of
from fp8scope_dashboard.pages.address_values import whole_number
from fp8scope_dashboard.pages.charts.addresses import figure_view
from fp8scope_dashboard.pages.charts.answers import AnyChart, Chart, EmptyChart
from fp8scope_dashboard.pages.charts.series import Options
from fp8scope_dashboard.pages.formatting import percent
from fp8scope_dashboard.pages.run.controls.content import findings, modules_of, ranking_of, steering
from fp8scope_dashboard.pages.run.controls.figures import ranking_figure, window_figure

BARS, COMPACT_BARS = 20, 12


@in_project()
def commands(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """The card of commands, for a refresh."""
    run = run_of(project, run_id)
    context = {"run": run, "modules": modules_of(run), **steering(run)}
    return page(request, project, "runs", "pages/run/_commands.html", context)


@in_project()
def reports(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """The cards of reference windows and bisections, for a refresh."""
    run = run_of(project, run_id)
    return page(request, project, "runs", "pages/run/_reports.html", {"run": run, **findings(run)})


@in_project(permissions.COMMAND, methods=POST)
def command_new(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """Create a command and redirect to the card of commands."""
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
        kind_name = command.get_kind_display().lower()
        text = f"{kind_name}, to the run “{run.name}”"
        record(actor_of(request), project, Action.COMMAND, text, run=str(run.pk))
        messages.success(
            request, f"Command created: {kind_name}. The training process receives it with its next message."
        )
    return redirect(f"{reverse('run', args=[project.slug, run.id])}#commands")


def _arguments(request: HttpRequest, kind: str) -> dict[str, Any]:
    if kind == CommandKind.FALLBACK:
        patterns = request.POST.get("patterns", "").replace(",", " ").split()
        return {"patterns": patterns, "precision": request.POST.get("precision", "bf16")}
    if kind == CommandKind.PAUSE and (minutes := request.POST.get("minutes", "").strip()):
        try:
            return {"seconds": round(60 * float(minutes))}
        except (ValueError, OverflowError):
            raise CommandError("The duration of a pause must be a number of minutes, such as 10.") from None
    return {}


@figure_view
def report_figure(project: Project, query: QueryDict, run_id: UUID, name: str) -> AnyChart:
    """The chart of the selected reference window or bisection, else of the newest."""
    run, options = run_of(project, run_id), Options.of(query)
    if name not in ("reference", "bisect"):
        raise Http404("No such figure.")
    report_id = whole_number(query.get("report", ""))
    reports = Report.objects.filter(run=run, kind=name)
    if report_id is not None:
        reports = reports.filter(pk=report_id)
    order = ("-step", "-id") if name == "reference" else ("-id",)
    report = reports.order_by(*order).first()
    if report is None:
        return EmptyChart("No report yet.")
    if name == "reference":
        drawn = window_figure(report.document, report.step, options.theme, compact=options.compact)
        delta = percent(float(report.document["delta"]), signed=True)
        return Chart(drawn, f"Losses from step {report.step:,} on in FP8 and BF16. Difference: {delta}.")
    ranking = ranking_of(report, COMPACT_BARS if options.compact else BARS)
    rows = [(product.layer, product.name, product.error, product.cosine) for product in ranking.products]
    drawn = ranking_figure(rows, ranking.total_error, options.theme, compact=options.compact)
    worst = rows[0]
    return Chart(drawn, f"Largest gradient error: {percent(worst[2])}, from {worst[0]} {worst[1]}.")
