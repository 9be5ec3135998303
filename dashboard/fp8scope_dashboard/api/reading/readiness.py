"""The effect of another number format on the tensors of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any
from uuid import UUID

import numpy as np
from django.http import HttpRequest
from ninja import Query, Router
from pydantic import WithJsonSchema

from fp8scope_dashboard.analysis.run_readiness import missing_roles
from fp8scope_dashboard.analysis.what_if import sentences
from fp8scope_dashboard.analysis.what_if.distribution import Bounds
from fp8scope_dashboard.analysis.what_if.readiness import (
    METHOD_VERSION,
    Readiness,
    TensorReadiness,
    default_budget,
    judge,
    smallest_set,
    worst_first,
)
from fp8scope_dashboard.analysis.what_if.targets import (
    MAX_BLOCK,
    MAX_MARGIN,
    SCALINGS,
    TARGET_FORMATS,
    make_target,
)
from fp8scope_dashboard.api.auth import RUN_READER, check_run
from fp8scope_dashboard.api.responses import ERRORS
from fp8scope_dashboard.diagnosis.healthy_stretch import tensors_to_judge
from fp8scope_dashboard.wire import limits, schemas
from fp8scope_dashboard.wire.errors import InvalidError, NotRecordedError

MAX_TENSORS = 2_000

router = Router(tags=["analysis"], auth=RUN_READER)
Step = Annotated[
    int | None,
    Query(ge=0, le=limits.MAX_INT, description="Default: the last sampled step before the loss broke."),
]
Margin = Annotated[int, Query(ge=-MAX_MARGIN, le=MAX_MARGIN, description="Head room in powers of two.")]
Block = Annotated[int, Query(ge=0, le=MAX_BLOCK, description="Elements that share a scale; 0: the default.")]
Budget = Annotated[float | None, Query(gt=0, le=1, description="Mean error that is allowed.")]


def one_of(names: Iterable[str]) -> WithJsonSchema:
    """The schema of a text that `make_target` checks: its message says more than the schema's."""
    return WithJsonSchema({"type": "string", "enum": list(names)})


@router.get("/runs/{run}/readiness", response={200: dict[str, Any], ERRORS: schemas.ErrorOut})
def get_readiness(
    request: HttpRequest,
    run: UUID,
    format: Annotated[str, Query(max_length=512), one_of(TARGET_FORMATS)] = "hybrid",
    scaling: Annotated[str, Query(max_length=512), one_of(SCALINGS)] = "current",
    scale: Annotated[
        str, Query(max_length=512, description="A positive number in float32's range, or 2^k, such as 2^-5.")
    ] = "1",
    margin: Margin = 0,
    block: Block = 0,
    step: Step = None,
    error: Budget = None,
    search: Annotated[str, Query(max_length=512)] = "",
    limit: Annotated[int, Query(ge=1, le=MAX_TENSORS)] = 100,
    offset: Annotated[int, Query(ge=0, le=limits.MAX_INT)] = 0,
) -> dict[str, Any]:
    """The effect of a format and its scales on the tensors of a sampled step, worst first.

    Shares and errors are [low, estimate, high]: the low and high bounds hold for every tensor with the same
    exponents. docs/readiness.md has the definitions.
    """
    check_run(request, run)
    try:
        target = make_target(format, scaling, scale, margin, block)
    except ValueError as problem:
        raise InvalidError(str(problem), "docs/readiness.md lists formats and scalings.") from None
    judged = tensors_to_judge(run, step)
    if judged is None and (without_roles := missing_roles(run, step)):
        raise NotRecordedError(without_roles, "docs/wire.md has the fields of a tensor.")
    if judged is None:
        raise NotRecordedError(
            "The run has no exponent histograms up to this step.",
            "Record them with run.watch(model, readiness=True), with shadow=… or with FP8 layers.",
        )
    sampled = judged.sampled
    readiness = judge(sampled.tensors, target)
    shown = [tensor for tensor in worst_first(readiness) if search.lower() in tensor.name.lower()]
    return {
        "method_version": METHOD_VERSION,
        "step": sampled.step,
        "note": judged.note,
        "format": target.format.name,
        "scaling": target.title,
        "headline": sentences.headline(readiness),
        "counts": {
            verdict: len(readiness.having(verdict)) for verdict in ("ready", "finer", "bf16", "unknown")
        },
        "error": _errors(readiness, sampled.tensors.names, error),
        "total": len(shown),
        "tensors": [_row(readiness, tensor) for tensor in shown[offset : offset + limit]],
    }


def _errors(readiness: Readiness, names: Sequence[str], allowed: float | None) -> dict[str, Any]:
    """The mean error, the error that is allowed, and the tensors to keep in BF16 for it."""
    effect = readiness.effect
    budget = default_budget(effect) if allowed is None else allowed
    finite = np.isfinite(effect.error.estimate)
    return {
        "mean": float(effect.error.estimate[finite].mean()) if finite.any() else None,
        "budget": budget,
        "keep_in_bf16": [names[i] for i in smallest_set(effect.error.estimate, budget)],
    }


def _row(readiness: Readiness, tensor: TensorReadiness) -> dict[str, Any]:
    effect, i = readiness.effect, tensor.index
    return {
        "name": tensor.name,
        "verdict": tensor.verdict,
        "reason": tensor.reason,
        "finer": tensor.finer,
        "saturated": _bounds(effect.saturated, i),
        "flushed": _bounds(effect.flushed, i),
        "error": _bounds(effect.error, i),
        "scale": float(effect.scale[i]) if np.isfinite(effect.scale[i]) else None,
    }


def _bounds(bounds: Bounds, i: int) -> list[float] | None:
    values = [float(part[i]) for part in (bounds.low, bounds.estimate, bounds.high)]
    return values if np.isfinite(values).all() else None
