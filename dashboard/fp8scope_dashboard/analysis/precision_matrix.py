"""The evaluation matrix of a checkpoint: the same weights in several precisions, each judged against BF16.

The verdicts are those of scores (`analysis.scores`), on paired differences. Two things are not as between
runs. The weights are the same, so that no spread between seeds is added: a verdict is about this checkpoint.
And all cells, tasks times precisions, share the error: they are one family of Holm's procedure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from django.core.cache import cache
from django.db.models import Max
from redis import RedisError

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis.score_comparisons import score_of
from fp8scope_dashboard.analysis.scores.result import METHOD_VERSION, TaskScores
from fp8scope_dashboard.analysis.scores.verdict import judge
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.wire.schemas import MATRIX_PRECISIONS

REFERENCE: Final = "bf16"
# A page shows no more tasks of one matrix, and lists no more matrices.
MAX_TASKS: Final = 200
MAX_MATRICES: Final = 50
SECONDS: Final = 24 * 3_600
# Another number for results of another form.
VERSION: Final = 1


@dataclass(frozen=True)
class MatrixName:
    """One matrix: the run and the step of its checkpoint."""

    run: UUID
    name: str
    step: int


@dataclass(frozen=True, kw_only=True)
class MatrixColumn:
    """One precision: bytes of the packed weights and of the whole model, seconds, and layers."""

    precision: str
    weight_bytes: int
    model_bytes: int
    seconds: float
    layers: int
    left: int


@dataclass(frozen=True, kw_only=True)
class MatrixTask:
    """One task: its score in BF16, and the stored form of the comparison of each other precision with it.

    See `analysis.scores.result.ScoreComparison`. A precision whose evaluation failed is missing.
    """

    name: str
    metric: str
    kind: str
    higher_is_better: bool
    cells: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class PrecisionMatrix:
    """The judged matrix of one checkpoint; the columns in the order of MATRIX_PRECISIONS."""

    run: UUID
    step: int
    alpha: float
    columns: Sequence[MatrixColumn]
    tasks: Sequence[MatrixTask]


def matrices_of(project: Project) -> list[MatrixName]:
    """The project's matrices, those that were measured last first."""
    rows = Evaluation.objects.filter(run__project=project, run__deleted_at=None, matrix__isnull=False)
    newest = rows.values("run_id", "run__name", "step").annotate(last=Max("id")).order_by("-last")
    fields = newest.values_list("run_id", "run__name", "step")[:MAX_MATRICES]
    return [MatrixName(*field) for field in fields]


def last_step(run: Run) -> int | None:
    """The step of the run's matrix that was measured last."""
    rows = Evaluation.objects.filter(run=run, matrix__isnull=False).order_by("-id")
    return rows.values_list("step", flat=True).first()


def matrix_of(run: Run, step: int) -> PrecisionMatrix:
    """The judged matrix of the run's checkpoint; empty without cells. Of a repeated cell the last one
    counts."""
    rows = Evaluation.objects.filter(run=run, step=step, matrix__isnull=False).order_by("id")
    last = {
        (name, metric, str(precision)): (pk, matrix or {})
        for pk, name, metric, precision, matrix in rows.values_list(
            "id", "name", "metric", "precision", "matrix"
        )
    }
    tasks = sorted({(name, metric) for name, metric, _ in last})[:MAX_TASKS]
    ids = {key: pk for key, (pk, _) in last.items() if key[:2] in tasks}
    sizes = {precision: matrix for (_, _, precision), (_, matrix) in last.items()}
    return PrecisionMatrix(
        run=run.id,
        step=step,
        alpha=run.project.alpha,
        columns=[
            MatrixColumn(precision=name, **sizes[name]) for name in sorted(sizes, key=MATRIX_PRECISIONS.index)
        ],
        tasks=[MatrixTask(**task) for task in _judged(run, ids)],
    )


def _judged(run: Run, ids: Mapping[tuple[str, str, str], int]) -> list[dict[str, Any]]:
    """The tasks as JSON. Judging reads all items, so that Redis keeps the result for the same cells."""
    inputs = (VERSION, METHOD_VERSION, run.project.alpha, run.equivalence_margin, sorted(ids.items()))
    key = f"matrix:{run.id}:{hashlib.sha256(repr(inputs).encode()).hexdigest()}"
    try:
        stored = cache.get(key)
    except RedisError:
        stored = None
    if stored is not None:
        return list(stored)
    tasks = _judge(run, ids)
    with suppress(RedisError):
        cache.set(key, tasks, timeout=SECONDS)
    return tasks


def _judge(run: Run, ids: Mapping[tuple[str, str, str], int]) -> list[dict[str, Any]]:
    stored = Evaluation.objects.in_bulk(list(ids.values()))
    cells = {key: stored[pk] for key, pk in ids.items() if pk in stored}
    compared = {
        key: _task(cell, cells[*key[:2], REFERENCE])
        for key, cell in sorted(cells.items())
        if key[2] != REFERENCE and (*key[:2], REFERENCE) in cells
    }
    results = judge(list(compared.values()), alpha=run.project.alpha, loss_margin=run.equivalence_margin)
    judged = dict(zip(compared, (result.as_dict() for result in results), strict=True))
    tasks: dict[tuple[str, str], dict[str, Any]] = {}
    for (name, metric, precision), cell in sorted(cells.items()):
        task = tasks.setdefault(
            (name, metric),
            {
                "name": name,
                "metric": metric,
                "kind": cell.kind,
                "higher_is_better": cell.higher_is_better,
                "cells": {},
            },
        )
        if precision == REFERENCE:
            score = score_of(cell)
            task["cells"][precision] = {"score": float(score.items.mean()), "n": len(score.items)}
        elif (name, metric, precision) in judged:
            task["cells"][precision] = judged[name, metric, precision]
    return list(tasks.values())


def _task(cell: Evaluation, reference: Evaluation) -> TaskScores:
    return TaskScores(
        name=cell.name,
        metric=cell.metric,
        kind=cell.kind,
        higher_is_better=cell.higher_is_better,
        arm=[score_of(cell, str(cell.precision))],
        baselines=[score_of(reference, REFERENCE)],
        margin=cell.margin,
        same_weights=True,
    )
