"""The catalogue of a run's tensors, their ranking, and their histograms of exponents."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from django.contrib.postgres.aggregates import ArrayAgg
from django.http import HttpRequest, HttpResponse
from ninja import Query, Router

from fp8scope_dashboard.api.auth import RUN_READER, run_of, tensor_of
from fp8scope_dashboard.api.ingest import router as ingest
from fp8scope_dashboard.api.reading.answers import finite_or_none
from fp8scope_dashboard.api.reading.arrow import ARROW_OR_JSON, Form, arrow_answer
from fp8scope_dashboard.api.reading.schemas import HistogramsOut, RankingOut, TensorsOut
from fp8scope_dashboard.api.responses import ERRORS
from fp8scope_dashboard.pages.tensors.query import FILTER_LENGTH, TensorQuery, chosen_tensors
from fp8scope_dashboard.pages.tensors.range_counts import unjudged_steps
from fp8scope_dashboard.pages.tensors.ranking import SORTS, TensorRanking, rank
from fp8scope_dashboard.runs.models import Run, Tensor
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.histograms import MIN_EXPONENT
from fp8scope_dashboard.wire import limits, schemas
from fp8scope_dashboard.wire.errors import InvalidError, UnknownNameError

MAX_TENSORS, MAX_HISTOGRAMS = 2_000, 256

router = Router(tags=["telemetry"], auth=RUN_READER)
Filter = Annotated[str, Query(max_length=FILTER_LENGTH, description="A part of the name.")]
Role = Annotated[str, Query(max_length=FILTER_LENGTH, description="input, weight, grad_output, ...")]
Limit = Annotated[int, Query(ge=1, le=MAX_TENSORS)]
Offset = Annotated[int, Query(ge=0, le=limits.MAX_INT)]
Step = Annotated[int | None, Query(ge=0, le=2**62, description="Inclusive; default: all that is stored.")]


@router.get("/runs/{run}/tensors", response={200: TensorsOut, ERRORS: schemas.ErrorOut})
def get_tensors(
    request: HttpRequest,
    run: UUID,
    filter: Filter = "",
    role: Role = "",
    limit: Limit = MAX_TENSORS,
    offset: Offset = 0,
) -> dict[str, Any]:
    """The tensors of a run in the order of the model, and the statistics that are recorded of them."""
    stored = run_of(request, run)
    tensors = Tensor.objects.filter(run=stored)
    roles = tensors.order_by().aggregate(roles=ArrayAgg("role", distinct=True, order_by="role", default=[]))
    chosen = chosen_tensors(stored, _question(stored, {"filter": filter, "role": role}))
    part = [tensor.index for tensor in chosen[offset : offset + limit]]
    return {
        "total": len(chosen),
        "statistics": queries.statistic_names(run),
        "roles": roles["roles"],
        "tensors": list(tensors.filter(index__in=part).order_by("index")),
    }


@router.get("/runs/{run}/tensors/ranking", response={200: RankingOut, ERRORS: schemas.ErrorOut})
def get_ranking(
    request: HttpRequest,
    run: UUID,
    statistic: Annotated[str, Query(max_length=64, description="Default: that of the page.")] = "",
    sort: Annotated[str, Query(description=", ".join(SORTS))] = "onset",
    filter: Filter = "",
    role: Role = "",
    everything: Annotated[bool, Query(description="Also tensors whose rate is always 0.")] = False,
    limit: Limit = 100,
    offset: Offset = 0,
) -> dict[str, Any]:
    """The tensors by the first step out of their range, or by their values, as the page ranks them."""
    stored = run_of(request, run)
    if sort not in SORTS:
        raise InvalidError(f"Tensors cannot be sorted by {sort!r}.", f"Sort by {', '.join(SORTS)}.")
    asked = {"filter": filter, "role": role, "statistic": statistic, "sort": sort}
    question = _question(stored, asked | ({"everything": "1"} if everything else {}))
    if statistic and question.statistic != statistic:
        recorded = ", ".join(queries.statistic_names(run)[:12]) or "none"
        raise UnknownNameError(f"The run has no statistic {statistic!r}.", f"It has: {recorded}.")
    tensors = chosen_tensors(stored, question)
    ranked = rank(
        stored,
        question.statistic,
        [tensor.index for tensor in tensors],
        [tensor.name for tensor in tensors],
        question.threshold,
        question.sort,
        left_out=unjudged_steps(stored, question.statistic),
        everything=question.everything,
    )
    return {
        "statistic": ranked.statistic,
        "limit": ranked.limit,
        "total": ranked.total,
        "out_of_range": ranked.out_of_range,
        "still": ranked.still,
        "tensors": [_ranked(ranked, i) for i in ranked.order[offset : offset + limit].tolist()],
    }


def _question(run: Run, fields: dict[str, str]) -> TensorQuery:
    # PostgreSQL stores no NUL, so that no name has one.
    clean = {name: text.replace("\0", "") for name, text in fields.items()}
    return TensorQuery.of(clean, queries.statistic_names(run.pk))


def _ranked(ranked: TensorRanking, i: int) -> dict[str, Any]:
    onset, facts = ranked.onsets.get(i), ranked.facts
    values = {name: getattr(facts, name)[i] for name in ("now", "ever", "before", "after", "change")}
    return {
        "index": ranked.indices[i],
        "name": ranked.names[i],
        "onset": None if onset is None else onset.step,
        "earliest": None if onset is None else onset.earliest,
        **{name: finite_or_none(value) for name, value in values.items()},
    }


# Django takes the first pattern of an address, so that all methods of one address are in one router.
@ingest.get(
    "/runs/{run}/histograms",
    response={200: HistogramsOut, ERRORS: schemas.ErrorOut},
    auth=RUN_READER,
    tags=["telemetry"],
    openapi_extra=ARROW_OR_JSON,
)
def get_histograms(
    request: HttpRequest,
    run: UUID,
    tensor: Annotated[str, Query(max_length=512, description="Its name.")],
    first: Step = None,
    last: Step = None,
    limit: Annotated[int, Query(ge=1, le=MAX_HISTOGRAMS, description="Messages that are read.")] = 64,
    format: Form = "json",
) -> Any:
    """The exponents of a tensor's elements in sampled steps; of many steps some that are evenly spread.

    As Arrow, a row is a step, with the columns step, zeros, nonfinite and counts.
    """
    index = tensor_of(request, run, tensor.replace("\0", ""))
    if index is None:
        raise UnknownNameError("The run has no such tensor.", "GET /runs/{run}/tensors lists its tensors.")
    read = [
        histogram
        for histogram in queries.tensor_histograms(run, index, first, last, limit)
        if histogram.total
    ]
    if format == "arrow":
        return _histograms_as_arrow(tensor, read)
    return {
        "tensor": tensor,
        "min_exponent": MIN_EXPONENT,
        "histograms": [
            {
                "step": histogram.step,
                "zeros": histogram.zeros,
                "nonfinite": histogram.nonfinite,
                "counts": histogram.counts.tolist(),
            }
            for histogram in read
        ],
    }


def _histograms_as_arrow(tensor: str, read: list[queries.MergedHistogram]) -> HttpResponse:
    columns = {
        "step": [histogram.step for histogram in read],
        "zeros": [histogram.zeros for histogram in read],
        "nonfinite": [histogram.nonfinite for histogram in read],
        "counts": [histogram.counts for histogram in read],
    }
    return arrow_answer(columns, {"tensor": tensor, "min_exponent": str(MIN_EXPONENT)})
