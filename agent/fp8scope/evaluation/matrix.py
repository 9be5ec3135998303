"""`evaluate_matrix`: one checkpoint, evaluated in one precision after another by the user's own function.

Every column begins with the same random state and takes the same layers. The reference, BF16, is evaluated
first and once more at the end: if its scores differ then, the function is not deterministic, and the
differences contain its noise. What a column has measured is sent as soon as it is there.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8scope.control.suspended_hooks import without_hooks
from fp8scope.evaluation.columns import REFERENCE, build_column, checked_precisions, model_bytes
from fp8scope.evaluation.layers import LayerPlan, ModelGuard, plan_layers, replaced_forwards
from fp8scope.evaluation.scores import EvaluationError, ItemScores, TaskResult, as_kind_of, read_results
from fp8scope.process.open_runs import current_run
from fp8scope_kernels import devices
from fp8scope_kernels.convert import Selection
from fp8scope_kernels.experts.products import experts_in_bf16

if TYPE_CHECKING:
    from fp8scope.run import Run

logger = logging.getLogger("fp8scope")

Evaluate = Callable[[Any], Any]
MIN_FOR_ERROR = 2


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The mean difference of a score to BF16 over common items, with its standard error, and their number."""

    mean: float
    error: float
    items: int


@dataclass(kw_only=True)
class ColumnResult:
    """The result of one precision. `error` is empty, or says why there are no `scores`.

    `weight_bytes`: of the quantised layers' weights, packed, with their scales. `model_bytes`: of all
    parameters and buffers in this precision. `seconds`: of the evaluation function, on this machine.
    """

    precision: str
    weight_bytes: int = 0
    model_bytes: int = 0
    seconds: float = 0.0
    scores: dict[str, TaskResult] = field(default_factory=dict)
    error: str = ""


@dataclass(kw_only=True)
class EvaluationMatrix:
    """The columns of a matrix, the reference first. `str(matrix)` is a table.

    `repeatable`: whether the reference had the same scores twice.
    """

    columns: list[ColumnResult]
    plan: LayerPlan
    step: int
    repeatable: bool = True

    @property
    def reference(self) -> ColumnResult:
        return self.columns[0]

    @property
    def errors(self) -> dict[str, str]:
        """The reasons of columns without scores, by precision."""
        return {column.precision: column.error for column in self.columns if column.error}

    def difference(self, task: str, precision: str) -> Difference:
        """The paired difference of a task's score to BF16. Raises KeyError if the column has no such
        score."""
        scores = {column.precision: column.scores for column in self.columns}
        return paired_difference(scores[precision][task], self.reference.scores[task])

    def __str__(self) -> str:
        return "\n".join(_table(self))


def evaluate_matrix(
    model: nn.Module,
    evaluate: Evaluate,
    *,
    precisions: Sequence[str] | None = None,
    name: str = "evaluation",
    metric: str = "score",
    kind: str | None = None,
    higher_is_better: bool = True,
    item_ids: Sequence[str] | None = None,
    clusters: Sequence[str] | None = None,
    margin: float | None = None,
    include: Selection | None = None,
    exclude: Selection | None = None,
    step: int | None = None,
    run: "Run | None" = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> EvaluationMatrix:
    """Evaluate `model` with `evaluate(model)` in several precisions; see docs/evaluations.md.

    `evaluate` returns the score of every item: a sequence or tensor, a mapping from item ids to scores, an
    `ItemScores`, or a mapping from names of tasks to these. It is called without gradients and in evaluation
    mode. `precisions` are names of `fp8scope.evaluation.columns.PRECISIONS`; `bf16` is always the first.
    `name` to `margin` describe scores as in `Run.log_eval`; `kind` is by default `proportion` if all items in
    BF16 are 0 or 1, else `mean`. `include` and `exclude` choose layers as in `convert`. `step` is that of the
    checkpoint, by default the run's last one. `run` takes the results, by default the run that was begun
    last; without one they are only returned.

    The model is as before afterwards, bit for bit. If `evaluate` fails in a precision, its column has an
    `error` and the others are measured.

    Raises EvaluationError if no layer can be quantised, if the reference cannot be evaluated, or if
    `evaluate` changes parameters; ValueError for invalid arguments.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if not callable(evaluate):
        raise ValueError(f"evaluate must be a function of the model, got {type(evaluate).__name__}.")
    plan = plan_layers(model, include, exclude)
    names = checked_precisions(precisions, plan)
    run = run if run is not None else _latest_run()
    at = (run.session.step if run is not None else 0) if step is None else step
    defaults = ItemScores(
        items=(),
        item_ids=item_ids,
        clusters=clusters,
        metric=metric,
        kind=kind,
        higher_is_better=higher_is_better,
        margin=margin,
    )
    matrix = EvaluationMatrix(columns=[], plan=plan, step=at)
    passes = _ColumnPasses(model, evaluate, plan, name, defaults)
    total = len(names) + 1
    with without_hooks([model]):
        try:
            for count, precision in enumerate(names):
                if on_progress is not None:
                    on_progress(count, total)
                column = passes.column(precision)
                _finish_column(matrix, column, run)
            if on_progress is not None:
                on_progress(len(names), total)
            _repeat_reference(matrix, passes)
        finally:
            passes.guard.restore()
    if on_progress is not None:
        on_progress(total, total)
    return matrix


class _ColumnPasses:
    """Evaluates the model in one precision at a time."""

    def __init__(
        self, model: nn.Module, evaluate: Evaluate, plan: LayerPlan, name: str, defaults: ItemScores
    ) -> None:
        self.guard = ModelGuard(model)
        self._model = model
        self._evaluate = evaluate
        self._plan = plan
        self._name = name
        self._defaults = defaults

    def column(self, precision: str) -> ColumnResult:
        """The result of a precision, with the error if its evaluation failed.

        Raises EvaluationError if the parameters were changed, or the reference has no result.
        """
        result = ColumnResult(precision=precision)
        try:
            built = build_column(precision, self._plan)
            result.weight_bytes = built.weight_bytes
            result.model_bytes = model_bytes(self._model, self._plan, built.weight_bytes)
            self.guard.begin()
            # Experts have one precision in all columns: BF16, not that of the training.
            with replaced_forwards(built.forwards), experts_in_bf16(self._model), torch.no_grad():
                began = self._now()
                returned = self._evaluate(self._model)
                result.seconds = self._now() - began
            result.scores = read_results(returned, self._name, self._defaults)
        except Exception as error:
            told = isinstance(error, EvaluationError)
            result.error = str(error) if told else f"{type(error).__name__}: {error}"
            if precision == REFERENCE:
                raise EvaluationError(f"The evaluation in BF16 failed. {result.error}") from error
            logger.warning("The evaluation in %s failed: %s", precision, result.error, exc_info=not told)
        finally:
            self.guard.restore()
        changed = self.guard.changed()
        if changed:
            raise EvaluationError(
                f"The evaluation function changed the model's parameters ({', '.join(changed[:3])}). It must "
                "leave them as they are: evaluate a copy instead."
            )
        return result

    def _now(self) -> float:
        """The time, once the model's accelerators have finished their work."""
        for device in {parameter.device for parameter in self._model.parameters()}:
            module = devices.module_of(device) if devices.is_accelerator(device) else None
            if module is not None and hasattr(module, "synchronize"):
                module.synchronize(device)
        return time.perf_counter()


def _finish_column(matrix: EvaluationMatrix, column: ColumnResult, run: "Run | None") -> None:
    """Add a column to the matrix, and send its scores."""
    if matrix.columns and not column.error:
        try:
            column.scores = _like_reference(column.scores, matrix.reference.scores)
        except EvaluationError as error:
            column.scores, column.error = {}, str(error)
            logger.warning("The evaluation in %s failed: %s", column.precision, error)
    matrix.columns.append(column)
    if run is not None:
        _send(run, matrix, column)


def _like_reference(
    scores: Mapping[str, TaskResult], reference: Mapping[str, TaskResult]
) -> dict[str, TaskResult]:
    if set(scores) != set(reference):
        raise EvaluationError(
            f"The evaluation function returned the tasks {', '.join(sorted(scores))} here, and "
            f"{', '.join(sorted(reference))} in BF16."
        )
    return {task: as_kind_of(result, reference[task]) for task, result in scores.items()}


def _repeat_reference(matrix: EvaluationMatrix, passes: _ColumnPasses) -> None:
    """Evaluate the reference again. The first pass has paid for warming up, so the shorter time counts."""
    again = passes.column(REFERENCE)
    first = matrix.reference
    first.seconds = min(first.seconds, again.seconds)
    matrix.repeatable = {task: result.by_item for task, result in again.scores.items()} == {
        task: result.by_item for task, result in first.scores.items()
    }
    if not matrix.repeatable:
        logger.warning(
            "The evaluation function gave other scores for the same model when it was repeated: the "
            "differences between precisions contain its noise. Seed it, or fix what it samples."
        )


def _send(run: "Run", matrix: EvaluationMatrix, column: ColumnResult) -> None:
    cell = {
        "weight_bytes": column.weight_bytes,
        "model_bytes": column.model_bytes,
        "seconds": column.seconds,
        "layers": len(matrix.plan.layers),
        "left": sum(group.modules for group in matrix.plan.left),
    }
    for result in column.scores.values():
        run.log_eval(
            result.name,
            result.metric,
            result.items,
            kind=result.kind,
            step=matrix.step,
            higher_is_better=result.higher_is_better,
            item_ids=result.item_ids,
            clusters=result.clusters,
            precision=column.precision,
            margin=result.margin,
            matrix=cell,
        )


def _latest_run() -> "Run | None":
    from fp8scope.run import Run

    run = current_run()
    return run if isinstance(run, Run) else None


def paired_difference(result: TaskResult, reference: TaskResult) -> Difference:
    """The mean of the differences of the common items, and its standard error (NaN for a single item)."""
    mine, other = result.by_item, reference.by_item
    differences = [mine[item] - other[item] for item in mine if item in other]
    mean = math.fsum(differences) / len(differences)
    if len(differences) < MIN_FOR_ERROR:
        return Difference(mean=mean, error=math.nan, items=len(differences))
    variance = math.fsum((value - mean) ** 2 for value in differences) / (len(differences) - 1)
    return Difference(mean=mean, error=math.sqrt(variance / len(differences)), items=len(differences))


def _table(matrix: EvaluationMatrix) -> list[str]:
    """The table: one line a column and task, then what stays in its precision."""
    reference = matrix.reference
    rows = [("precision", "task", "score", "difference", "std. error", "weights", "of bf16", "seconds")]
    for column in matrix.columns:
        size = (
            f"{column.weight_bytes / 2**20:,.2f} MiB",
            f"{column.weight_bytes / reference.weight_bytes:.3f}",
        )
        if column.error:
            rows.append((column.precision, "failed", "", "", "", *size, ""))
        for task, result in column.scores.items():
            difference = matrix.difference(task, column.precision)
            apart = (
                (f"{difference.mean:+.5g}", f"{difference.error:.2g}")
                if column is not reference
                else ("", "")
            )
            score = f"{result.mean:.5g}"
            rows.append(
                (column.precision, f"{task} {result.metric}", score, *apart, *size, f"{column.seconds:.2f}")
            )
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    count = len(matrix.plan.layers)
    lines.append(f"{count} layer{'' if count == 1 else 's'} quantised, {matrix.plan.elements:,} weights.")
    lines += [
        f"Left: {group.modules} module{'' if group.modules == 1 else 's'}, {group.elements:,} elements: "
        f"{group.reason} ({', '.join(path or 'the model' for path in group.paths)}"
        f"{', ...' if group.modules > len(group.paths) else ''})."
        for group in matrix.plan.left
    ]
    lines += [f"{precision} failed: {error}" for precision, error in matrix.errors.items()]
    if not matrix.repeatable:
        lines.append("The evaluation is not repeatable: BF16 had other scores the second time.")
    return lines
