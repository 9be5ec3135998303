"""Charts of any scalars on the page of a run: their figures, their form, and changes of a view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final
from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect

from fp8scope_dashboard.accounts import permissions
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.audit.log import actor_of, record
from fp8scope_dashboard.audit.models import Action
from fp8scope_dashboard.pages.access import POST, in_project, page, person, run_of
from fp8scope_dashboard.pages.address_values import whole_number
from fp8scope_dashboard.pages.charts.addresses import figure_view
from fp8scope_dashboard.pages.charts.answers import AnyChart, Chart, EmptyChart
from fp8scope_dashboard.pages.charts.curves import Curve
from fp8scope_dashboard.pages.charts.run_marks import marks_of
from fp8scope_dashboard.pages.charts.series import Options
from fp8scope_dashboard.pages.charts.step_places import StepPlaces
from fp8scope_dashboard.pages.panels import arrangement, saved
from fp8scope_dashboard.pages.panels.content import charts_context, tab_address
from fp8scope_dashboard.pages.panels.figure import description, panel_figure
from fp8scope_dashboard.pages.panels.form import form_context
from fp8scope_dashboard.pages.panels.panel import Panel, PanelError, panels_of, read_panel, typed_panel
from fp8scope_dashboard.pages.panels.reading import read_content
from fp8scope_dashboard.pages.saved_views import ViewError, asks_to_share, said_of, seen_view
from fp8scope_dashboard.pages.saved_views import delete as delete_view
from fp8scope_dashboard.runs.models import Run, SavedView

PART: Final = "pages/panels/_charts.html"
FORM: Final = "pages/panels/_form.html"


@figure_view
def panel_figure_view(project: Project, query: QueryDict, run_id: UUID) -> AnyChart:
    """The figure of the panel that the query describes."""
    run = run_of(project, run_id)
    options = Options.of(query)
    try:
        panel = read_panel(query)
        content = read_content(run, panel, options)
    except PanelError as error:
        return EmptyChart(str(error))
    if not content.curves:
        return EmptyChart(" ".join(content.notes) or "No values yet.")
    marks = marks_of(run, options, _widest(content.curves))
    figure = panel_figure(panel, content.curves, options, marks)
    return Chart(figure, description(panel, content.curves, content.notes))


def _widest(curves: Sequence[Curve]) -> StepPlaces | None:
    """The places of the curve with the most steps. A metric may have begun late, or be logged seldom."""
    measured = [curve.places for curve in curves if curve.places is not None]
    return max(measured, key=lambda places: len(places.x), default=None)


@in_project()
def panel_form(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """The form of a panel of the view, of a new one with the scalar `metric`, or of an empty one."""
    run = run_of(project, run_id)
    view = _view(project, request, request.GET)
    wanted = request.GET.get("panel", "")
    stored = panels_of(view.panels) if view is not None else []
    panel = next((panel for panel in stored if panel.id == wanted), None)
    if panel is None:
        panel = Panel(metrics=tuple(filter(None, [request.GET.get("metric", "")[:512]])))
    whole = "HX-Request" not in request.headers
    template = "pages/panels/form.html" if whole else FORM
    return page(request, project, "runs", template, form_context(run, panel, view))


@in_project(methods=POST)
def panel_save(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """Add a panel to the view, or change one; the form again, if something in it is wrong."""
    run = run_of(project, run_id)
    try:
        panel = read_panel(request.POST)
        view = _changed(project, request, lambda panels: arrangement.put(panels, panel))
    except (PanelError, ViewError) as error:
        shown = _view(project, request, request.POST)
        context = form_context(run, typed_panel(request.POST), shown, str(error), request.POST)
        template = FORM if "HX-Request" in request.headers else "pages/panels/form.html"
        return page(request, project, "runs", template, context)
    return _answer(request, project, run, view)


@in_project(methods=POST)
def panels_change(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """Pin, move, size or remove a panel, or pin a scalar that is none yet."""
    run = run_of(project, run_id)
    action = request.POST.get("action", "")
    try:
        if request.POST.get("metric") and action == "pin":
            panel = replace(read_panel(request.POST), id="", is_pinned=True)
            view = _changed(project, request, lambda panels: arrangement.put(panels, panel))
        else:
            fields = request.POST
            view = _changed(project, request, lambda panels: arrangement.arranged(panels, action, fields))
    except (PanelError, ViewError) as error:
        messages.error(request, str(error))
        return _answer(request, project, run, _view(project, request, request.POST), is_whole=True)
    return _answer(request, project, run, view)


@in_project(methods=POST)
def panel_view_save(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """Save the view under a name. Only members can share it."""
    run = run_of(project, run_id)
    shared = asks_to_share(request, project)
    shown = _view(project, request, request.POST)
    renames = request.POST.get("how") == "rename"
    name = request.POST.get("name", "")
    view = shown
    try:
        view = saved.save_as(project, person(request), name, shown, shared=shared, renames=renames)
    except ViewError as error:
        messages.error(request, str(error))
    else:
        messages.success(request, said_of(view))
    return redirect(tab_address(run, view=str(view.pk) if view is not None else ""))


@in_project(methods=POST)
def panel_view_delete(request: HttpRequest, project: Project, run_id: UUID, view_id: int) -> HttpResponse:
    """Delete an own view. Administrators also delete shared ones."""
    run = run_of(project, run_id)
    view = delete_view(request, project, SavedView.Page.CHARTS, view_id)
    if view.shared:
        record(actor_of(request), project, Action.PROJECT, f"deleted the shared view of charts “{view.name}”")
    messages.success(request, f"Deleted the view “{view.name}”.")
    return redirect(tab_address(run))


@in_project(permissions.CHANGE_PROJECT, methods=POST)
def panel_view_default(request: HttpRequest, project: Project, run_id: UUID, view_id: int) -> HttpResponse:
    """Make a view the project's default, or no longer."""
    run = run_of(project, run_id)
    view = seen_view(request, project, SavedView.Page.CHARTS, view_id)
    is_default = request.POST.get("default") == "1"
    saved.set_default(project, view, is_default=is_default)
    said = f"“{view.name}” is {'now' if is_default else 'no longer'} the project’s default view of charts"
    record(actor_of(request), project, Action.PROJECT, said)
    messages.success(request, f"{said}.")
    return redirect(tab_address(run, view=str(view.pk)))


def _view(project: Project, request: HttpRequest, fields: QueryDict) -> SavedView | None:
    """The view that a request is about."""
    user = person(request)
    return saved.opened(list(saved.views_of(project, user)), user, whole_number(fields.get("view", "")))


def _changed(project: Project, request: HttpRequest, how: saved.Change) -> SavedView:
    view_id = whole_number(request.POST.get("view", ""))
    return saved.change(project, person(request), view_id, how)


def _answer(
    request: HttpRequest, project: Project, run: Run, view: SavedView | None, *, is_whole: bool = False
) -> HttpResponse:
    """The charts after a change, as a part for htmx, which shows their address; else a redirect to them."""
    address = tab_address(run, view=str(view.pk) if view is not None else "")
    if "HX-Request" not in request.headers:
        return redirect(address)
    if is_whole:
        # Messages have their place in the whole page.
        return HttpResponse(status=204, headers={"HX-Redirect": address})
    query = QueryDict(mutable=True)
    query["view"] = str(view.pk) if view is not None else ""
    for name in ("find", "group"):
        query[name] = request.POST.get(name, "")[:512]
    context: dict[str, Any] = {"run": run, **charts_context(run, query, person(request))}
    answer = page(request, project, "runs", PART, context)
    answer["HX-Push-Url"] = address
    answer["HX-Retarget"], answer["HX-Reswap"] = "#charts", "outerHTML"
    return answer
