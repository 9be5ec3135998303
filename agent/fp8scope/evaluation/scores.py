"""Reads what the user's evaluation function returns: the scores of items, of one task or of several."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fp8scope.recording.evaluation import evaluation_document
from fp8scope.scalars import is_tensor

EXPECTED = (
    "return a score for each item: a sequence, array or tensor of numbers, a mapping from item ids to "
    "numbers, an fp8scope.ItemScores, or a mapping from names of tasks to any of these"
)


class EvaluationError(RuntimeError):
    """A model could not be evaluated; the message says why, and what to change."""


@dataclass(frozen=True, kw_only=True)
class ItemScores:
    """The scores of one task, item by item.

    `items`: a sequence, array or tensor of numbers. `item_ids` pair the items of two precisions; without
    them, the position does. `clusters` name items that belong together. `metric`, `kind`, `higher_is_better`
    and `margin` are as in `Run.log_eval`; None takes those of `evaluate_matrix`.
    """

    items: Any
    item_ids: Sequence[str] | None = None
    clusters: Sequence[str] | None = None
    metric: str | None = None
    kind: str | None = None
    higher_is_better: bool | None = None
    margin: float | None = None


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """The scores of one task in one precision; the arguments of `Run.log_eval`."""

    name: str
    metric: str
    items: tuple[float, ...]
    item_ids: tuple[str, ...] | None
    clusters: tuple[str, ...] | None
    kind: str
    higher_is_better: bool
    margin: float | None

    @property
    def mean(self) -> float:
        return math.fsum(self.items) / len(self.items)

    @property
    def by_item(self) -> dict[str, float]:
        """The scores by item id, or by position."""
        ids = self.item_ids or [str(position) for position in range(len(self.items))]
        return dict(zip(ids, self.items, strict=True))


def read_results(returned: Any, name: str, defaults: ItemScores) -> dict[str, TaskResult]:
    """The results by task; `name` is that of a task without one, and `defaults` fills in what a task leaves
    open.

    Raises EvaluationError if there is no score, or one is not finite.
    """
    if returned is None:
        raise EvaluationError(f"The evaluation function returned None; it must {EXPECTED}.")
    if isinstance(returned, Mapping) and not isinstance(returned, ItemScores):
        if not returned:
            raise EvaluationError(f"The evaluation function returned an empty mapping; it must {EXPECTED}.")
        if not all(_is_number(value) for value in returned.values()):
            return {str(task): _read(str(task), value, defaults) for task, value in returned.items()}
    return {name: _read(name, returned, defaults)}


def _read(name: str, value: Any, defaults: ItemScores) -> TaskResult:
    scores = value if isinstance(value, ItemScores) else _plain(name, value)
    given = {
        field: getattr(scores, field) if getattr(scores, field) is not None else getattr(defaults, field)
        for field in ("item_ids", "clusters", "metric", "kind", "higher_is_better", "margin")
    }
    items = _numbers(name, scores.items)
    broken = sum(not math.isfinite(item) for item in items)
    if broken:
        raise EvaluationError(f"{name}: {broken} of {len(items)} items scored NaN or infinite.")
    kind = given["kind"] or ("proportion" if set(items) <= {0.0, 1.0} else "mean")
    try:
        document = evaluation_document(
            name,
            given["metric"],
            items,
            kind=kind,
            step=0,
            higher_is_better=given["higher_is_better"],
            item_ids=given["item_ids"],
            clusters=given["clusters"],
            margin=given["margin"],
        )
    except ValueError as error:
        raise EvaluationError(f"{name}: {error}.") from error
    ids, clusters = document["item_ids"], document["clusters"]
    return TaskResult(
        name=document["name"],
        metric=document["metric"],
        items=tuple(document["items"]),
        item_ids=None if ids is None else tuple(ids),
        clusters=None if clusters is None else tuple(clusters),
        kind=kind,
        higher_is_better=document["higher_is_better"],
        margin=given["margin"],
    )


def _plain(name: str, value: Any) -> ItemScores:
    if isinstance(value, Mapping):
        if not value or not all(_is_number(score) for score in value.values()):
            raise EvaluationError(f"{name}: the evaluation function must {EXPECTED}.")
        return ItemScores(items=[float(score) for score in value.values()], item_ids=list(map(str, value)))
    return ItemScores(items=value)


def _numbers(name: str, items: Any) -> list[float]:
    if _is_number(items):
        raise EvaluationError(
            f"{name}: the evaluation function returned a single number; it must {EXPECTED}."
        )
    if is_tensor(items):
        items = items.detach().double().cpu().numpy()
    try:
        if isinstance(items, str | bytes):
            raise TypeError(f"got {type(items).__name__}")
        if not isinstance(items, np.ndarray):
            items = [float(item) for item in items]
        values = np.asarray(items, np.float64)
    except (TypeError, ValueError) as error:
        raise EvaluationError(f"{name}: the evaluation function must {EXPECTED} ({error}).") from error
    if values.size == 0:
        raise EvaluationError(f"{name}: the evaluation function returned no items; it must {EXPECTED}.")
    return [float(value) for value in values.reshape(-1)]


def _is_number(value: Any) -> bool:
    if isinstance(value, bool | int | float | np.number):
        return True
    return bool(is_tensor(value) and value.dim() == 0) or (isinstance(value, np.ndarray) and value.ndim == 0)


def as_kind_of(result: TaskResult, reference: TaskResult) -> TaskResult:
    """The result with the kind of the reference's, which was read from its items.

    Raises EvaluationError if the items do not fit it, or the two have no item in common.
    """
    if not set(result.by_item) & set(reference.by_item):
        raise EvaluationError(f"{result.name}: no item of this precision is among those of BF16.")
    if reference.kind == "proportion" and not set(result.items) <= {0.0, 1.0}:
        raise EvaluationError(
            f"{result.name}: the items are 0 or 1 in BF16, and other numbers here; set kind='mean'."
        )
    return replace(result, kind=reference.kind)
