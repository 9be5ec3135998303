"""The figures of the pages: for plotly, as tables or as pictures; and the numbers beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal
from uuid import UUID

from django.http import HttpRequest, HttpResponse, QueryDict
from ninja import Path, Query, Router, Schema
from pydantic import Field

from fp8scope_dashboard.api.auth import READER, RUN_READER, project_of, run_of
from fp8scope_dashboard.api.reading.schemas import EfficiencyOut, FigureNames
from fp8scope_dashboard.api.responses import ERRORS
from fp8scope_dashboard.pages import glossary
from fp8scope_dashboard.pages.alerts import views as alerts
from fp8scope_dashboard.pages.charts.addresses import draw_of
from fp8scope_dashboard.pages.charts.answers import AnyChart, EmptyChart, answer
from fp8scope_dashboard.pages.compare.figures import compare_figure
from fp8scope_dashboard.pages.fleet.content import fleet_of
from fp8scope_dashboard.pages.hours.wording import price_of
from fp8scope_dashboard.pages.panels.views import panel_figure_view
from fp8scope_dashboard.pages.readiness.views import readiness_figure
from fp8scope_dashboard.pages.run.controls.views import report_figure
from fp8scope_dashboard.pages.run.efficiency import hours_figures, read_split, recent_figures
from fp8scope_dashboard.pages.run.figures.build import COLUMNS
from fp8scope_dashboard.pages.run.figures.views import FIGURES, run_figure
from fp8scope_dashboard.pages.runs import overlay, result_views
from fp8scope_dashboard.pages.scores import figures as scores
from fp8scope_dashboard.wire import limits, schemas
from fp8scope_dashboard.wire.errors import InvalidError, UnknownNameError

Draw = Callable[..., AnyChart]
# Of a run, beside those that its page names.
MORE: Final[Mapping[str, Draw]] = {
    "panel": draw_of(panel_figure_view),
    "readiness": draw_of(readiness_figure),
}
REPORTS: Final = ("reference", "bisect")
COMPARED: Final = ("loss", "delta", "tensors")
OF_PROJECT: Final[Mapping[str, Draw]] = {
    "curves": draw_of(overlay.runs_figure),
    "scatter": draw_of(result_views.run_scatter),
    "parallel": draw_of(result_views.run_parallel),
    "scores": draw_of(scores.scores),
    "differences": draw_of(scores.differences),
}
FORMS: Final = ("plotly", "json", "csv", "svg")
FIGURE_ANSWER: Final[dict[str, Any]] = {
    "responses": {
        200: {
            "content": {
                "application/json": {"schema": {"type": "object"}},
                "text/csv": {"schema": {"type": "string"}},
                "image/svg+xml": {"schema": {"type": "string"}},
            }
        }
    }
}

router = Router(tags=["figures"], auth=RUN_READER)
Text = Annotated[str, Field(max_length=512)]


# One id, or several with commas between them.
RunIds = Annotated[str, Field(max_length=4096, pattern="^[0-9a-fA-F,-]*$")]


class FigureQuery(Schema):
    """The parameters that figures share. docs/api.md lists those of each figure; others are left out."""

    format: Literal["plotly", "json", "csv", "svg"] = Field(
        "plotly", description="plotly: {figure, summary}; json and csv: the data as a table; svg: a picture."
    )
    first: Text = Field("", description="First step, inclusive.")
    last: Text = Field("", description="Last step, inclusive.")
    x: Text = Field("", description="step, tokens, time or wall.")
    log: Text = Field("", description="1: a logarithmic axis.")
    smooth: Text = Field("", description="0: without the smoothed line.")
    theme: Text = Field("", description="light or dark.")
    name: Text = Field("", description="A scalar, or a task.")
    metric: Text = Field("", description="The metric of a task, or of curves.")
    tensor: Text = Field("", description="The name of a tensor.")
    statistic: Text = Field("", description="Of tensors.")
    step: Text = Field("", description="A sampled step.")
    runs: list[RunIds] = Field([], description="Ids of compared runs.", max_length=200)
    q: Text = Field("", description="A search for runs.")


@router.get("/runs/{run}/figures", response={200: FigureNames, ERRORS: schemas.ErrorOut})
def list_figures(request: HttpRequest, run: UUID) -> dict[str, Any]:
    """The names of the figures of a run."""
    run_of(request, run)
    return {"figures": sorted([*FIGURES, *MORE, *REPORTS])}


@router.get("/runs/{run}/figures/{name}", response={ERRORS: schemas.ErrorOut}, openapi_extra=FIGURE_ANSWER)
def get_run_figure(
    request: HttpRequest, run: UUID, name: str, query: Query[FigureQuery]
) -> HttpResponse | dict[str, Any]:
    """A figure of a run, as its pages draw it. Without data `{"empty": …}` says why."""
    stored = run_of(request, run)
    project, asked = stored.project, _asked(request)
    if name in FIGURES:
        drawn = run_figure(project, asked, run, name)
    elif name in MORE:
        drawn = MORE[name](project, asked, run)
    elif name in REPORTS:
        drawn = draw_of(report_figure)(project, asked, run, name)
    else:
        raise _unknown(name, sorted([*FIGURES, *MORE, *REPORTS]))
    return _answer(request, drawn, query)


@router.get("/figures/{name}", response={ERRORS: schemas.ErrorOut}, openapi_extra=FIGURE_ANSWER, auth=READER)
def get_figure(request: HttpRequest, name: str, query: Query[FigureQuery]) -> HttpResponse | dict[str, Any]:
    """A figure of several runs: loss, delta or tensors of compared runs, curves, scores and others."""
    project, asked = project_of(request), _asked(request)
    if name in COMPARED:
        drawn = compare_figure(project, asked, name)
    elif name in OF_PROJECT:
        drawn = OF_PROJECT[name](project, asked)
    else:
        raise _unknown(name, sorted([*COMPARED, *OF_PROJECT]))
    return _answer(request, drawn, query)


@router.get(
    "/alerts/{alert}/figure", response={ERRORS: schemas.ErrorOut}, openapi_extra=FIGURE_ANSWER, auth=READER
)
def get_alert_figure(
    request: HttpRequest,
    alert: Annotated[int, Path(ge=0, le=limits.MAX_INT)],
    query: Query[FigureQuery],
) -> HttpResponse | dict[str, Any]:
    """The evidence of an alert, as its page draws it."""
    return _answer(request, draw_of(alerts.evidence)(project_of(request), _asked(request), alert), query)


def _asked(request: HttpRequest) -> QueryDict:
    """The query of the address, as the pages read it. Raises InvalidError for a NUL character."""
    if any("\0" in text for name, texts in request.GET.lists() for text in (name, *map(str, texts))):
        raise InvalidError("A parameter contains a NUL character.", "Leave it out.")
    return request.GET


def _unknown(name: str, names: list[str]) -> UnknownNameError:
    return UnknownNameError(f"There is no figure {name[:64]!r}.", f"There are: {', '.join(names)}.")


def _answer(request: HttpRequest, drawn: AnyChart, query: FigureQuery) -> HttpResponse | dict[str, Any]:
    if isinstance(drawn, EmptyChart) and query.format == "json":
        return HttpResponse(drawn.json(), content_type="application/json")
    if isinstance(drawn, EmptyChart) and query.format == "csv":
        raise InvalidError(drawn.reason, "There is no data, and so no table.")
    return answer(request, drawn)


@router.get("/runs/{run}/efficiency", response={200: EfficiencyOut, ERRORS: schemas.ErrorOut})
def get_efficiency(request: HttpRequest, run: UUID) -> dict[str, Any]:
    """The shares of the phases in the time of a step, and the figures beside their chart."""
    stored = run_of(request, run)
    split = read_split(run, first=None, last=None, points=COLUMNS)
    return {
        "phases": split.shares if len(split.x) else {},
        "figures": [
            {
                "name": figure.term,
                "title": glossary.title(figure.term),
                "value": figure.value,
                "amount": figure.amount,
            }
            for figure in (*recent_figures(stored), *hours_figures(stored))
        ],
    }


@router.get("/fleet", response={200: dict[str, Any], ERRORS: schemas.ErrorOut}, auth=READER)
def get_fleet(
    request: HttpRequest,
    price: Annotated[str, Query(max_length=20, description="Of a GPU hour; without it the project's.")] = "",
) -> dict[str, Any]:
    """The hours of all runs of the project, what was lost of them, and what FP8 saved."""
    return fleet_of(project_of(request), price_of(price)).as_dict()
