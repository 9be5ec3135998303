"""Builds the document of an evaluation from its scores, one per item."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

ScoreKind = Literal["proportion", "mean"]
EvaluationPrecision = Literal["bf16", "fp8", "fp16", "fp32"]
MatrixPrecision = Literal[
    "bf16", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "fp8-delayed", "fp6", "int8", "int4", "nvfp4"
]
"""The columns of the evaluation matrix (`fp8scope.evaluation.columns`)."""
MAX_ITEMS = 100_000


def evaluation_document(
    name: str,
    metric: str,
    items: Any,
    *,
    kind: str,
    step: int,
    higher_is_better: bool,
    item_ids: Sequence[str] | None,
    clusters: Sequence[str] | None,
    precision: str | None = None,
    margin: float | None = None,
    matrix: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the document of one evaluation, without writer and seq. Raises ValueError if it is invalid.

    `matrix` makes it a cell of the evaluation matrix; see `Run.log_eval`.
    """
    if kind not in get_args(ScoreKind):
        raise ValueError(f"kind must be one of {', '.join(get_args(ScoreKind))}, got {kind!r}")
    for what, text, limit in (("name", name, 128), ("metric", metric, 64)):
        if not 1 <= len(str(text)) <= limit:
            raise ValueError(f"{what} must be a string of 1 to {limit} characters")
    if step < 0:
        raise ValueError(f"step must not be negative, got {step}")
    values = [float(value) for value in np.asarray(items, dtype=np.float64).reshape(-1)]
    if not 1 <= len(values) <= MAX_ITEMS:
        raise ValueError(f"an evaluation must have 1 to {MAX_ITEMS} items, got {len(values)}")
    if not all(math.isfinite(value) for value in values):
        raise ValueError("item scores must be finite numbers")
    if kind == "proportion" and not all(value in (0.0, 1.0) for value in values):
        raise ValueError("the items of a proportion must be 0 or 1; use kind='mean' for other scores")
    # Left out if unknown, so that servers without them accept the document.
    optional = {
        "precision": _precision(precision, EvaluationPrecision if matrix is None else MatrixPrecision),
        "margin": _margin(margin),
        "matrix": None if matrix is None else dict(matrix),
    }
    return {
        "step": int(step),
        "name": str(name),
        "metric": str(metric),
        "kind": kind,
        "higher_is_better": bool(higher_is_better),
        "items": values,
        "item_ids": _labels("item_ids", item_ids, len(values)),
        "clusters": _labels("clusters", clusters, len(values)),
        **{key: value for key, value in optional.items() if value is not None},
    }


def _precision(precision: str | None, allowed_names: Any) -> str | None:
    if precision is not None and precision not in get_args(allowed_names):
        allowed = ", ".join(get_args(allowed_names))
        raise ValueError(f"precision must be one of {allowed}, got {precision!r}")
    return precision


def _margin(margin: float | None) -> float | None:
    if margin is None:
        return None
    if not (math.isfinite(margin) and margin > 0):
        raise ValueError(f"margin must be a positive number, got {margin!r}")
    return float(margin)


def _labels(what: str, labels: Sequence[str] | None, count: int) -> list[str] | None:
    if labels is None:
        return None
    if len(labels) != count:
        raise ValueError(f"{what} must have one entry for each of the {count} items, got {len(labels)}")
    texts = [str(label) for label in labels]
    if any(len(text) > 128 for text in texts):
        raise ValueError(f"{what} must be strings of at most 128 characters")
    if what == "item_ids" and len(set(texts)) != count:
        raise ValueError("item_ids must be unique")
    return texts
