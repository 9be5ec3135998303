"""The evaluation matrix as a table: tasks as rows, precisions as columns, every figure as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis.precision_matrix import (
    REFERENCE,
    MatrixColumn,
    MatrixName,
    MatrixTask,
    PrecisionMatrix,
    matrices_of,
    matrix_of,
)
from fp8scope_dashboard.analysis.scores.precision import NAMES
from fp8scope_dashboard.pages.address_values import uuid_in, whole_number
from fp8scope_dashboard.pages.badges import UNKNOWN, Badge
from fp8scope_dashboard.pages.formatting import NOTHING, number, percent, points, size
from fp8scope_dashboard.pages.scores.forest import signed, wider_limit
from fp8scope_dashboard.runs.models import Run

# Shorter than those of the forest plot: the heading says that all are against BF16.
BADGES: Final[Mapping[str, Badge]] = {
    "equivalent": Badge("Equivalent", "good", "check"),
    "worse": Badge("Worse", "danger", "cross"),
    "better": Badge("Better", "good", "check"),
    "cannot_tell": Badge("Cannot tell", "neutral", "question"),
}


@dataclass(frozen=True, kw_only=True)
class MatrixHead:
    """The head of a column: bytes and seconds, and what they are of BF16's; as text."""

    name: str
    weights: str
    of_reference: str
    model: str
    seconds: str
    speed: str


@dataclass(frozen=True, kw_only=True)
class MatrixCell:
    """One precision of one task; `badge` is None in BF16, and without a result."""

    precision: str
    score: str
    difference: str
    interval: str
    badge: Badge | None
    explanation: str


@dataclass(frozen=True, kw_only=True)
class MatrixRow:
    """One task; a cell for each column."""

    name: str
    metric: str
    higher_is_better: bool
    margin: str
    cells: list[MatrixCell]


@dataclass(frozen=True, kw_only=True)
class MatrixChoice:
    """A matrix that can be shown."""

    value: str
    name: str
    step: int
    is_shown: bool


@dataclass(frozen=True, kw_only=True)
class ShownMatrix:
    """The chosen matrix, and the others that there are."""

    run: MatrixName
    choices: list[MatrixChoice]
    heads: list[MatrixHead]
    rows: list[MatrixRow]
    layers: int
    left: int


def shown_matrix(project: Project, chosen: str) -> ShownMatrix | None:
    """The matrix `RUN:STEP`, else the one that was measured last; None if there is none."""
    names = matrices_of(project)
    if not names:
        return None
    run_id, _, step = chosen.partition(":")
    wanted = uuid_in(run_id), whole_number(step)
    shown = next((name for name in names if (name.run, name.step) == wanted), names[0])
    run = Run.objects.select_related("project").get(pk=shown.run)
    matrix = matrix_of(run, shown.step)
    by_name = {column.precision: column for column in matrix.columns}
    return ShownMatrix(
        run=shown,
        choices=[
            MatrixChoice(
                value=f"{name.run}:{name.step}", name=name.name, step=name.step, is_shown=name == shown
            )
            for name in names
        ],
        heads=[_head(column, by_name.get(REFERENCE)) for column in matrix.columns],
        rows=[_row(task, matrix) for task in matrix.tasks],
        layers=max(column.layers for column in matrix.columns),
        left=max(column.left for column in matrix.columns),
    )


def _head(column: MatrixColumn, reference: MatrixColumn | None) -> MatrixHead:
    is_reference = reference is None or column is reference
    of_reference = speed = ""
    if reference is not None and not is_reference:
        if reference.weight_bytes:
            of_reference = f"{percent(column.weight_bytes / reference.weight_bytes)} of BF16"
        if reference.seconds:
            speed = f"{number(column.seconds / reference.seconds, 3)}× the time"
    return MatrixHead(
        name=NAMES.get(column.precision, column.precision),
        weights=size(column.weight_bytes),
        of_reference=of_reference,
        model=size(column.model_bytes),
        seconds=f"{number(column.seconds, 3)} s",
        speed=speed,
    )


def _row(task: MatrixTask, matrix: PrecisionMatrix) -> MatrixRow:
    in_percent = task.kind == "proportion"
    margins = [cell["margin"] for cell in task.cells.values() if cell.get("margin")]
    return MatrixRow(
        name=task.name,
        metric=task.metric,
        higher_is_better=task.higher_is_better,
        margin=f"±{(points if in_percent else number)(margins[0])}" if margins else "",
        cells=[_cell(column.precision, task, in_percent=in_percent) for column in matrix.columns],
    )


def _cell(precision: str, task: MatrixTask, *, in_percent: bool) -> MatrixCell:
    result: Mapping[str, Any] = task.cells.get(precision) or {}
    interval = result.get("difference_interval")
    badge = BADGES.get(str(result.get("verdict")), UNKNOWN) if "verdict" in result else None
    within = wider_limit(result, points if in_percent else number)
    if badge is not None and within and result["verdict"] == "equivalent":
        badge = Badge(f"Equivalent within {within}", "good", "check")
    score = result.get("score")
    return MatrixCell(
        precision=NAMES.get(precision, precision),
        score=NOTHING if score is None else (percent if in_percent else number)(score),
        difference=signed(result["difference"], in_percent=in_percent) if result.get("verdict") else "",
        interval=" to ".join(signed(end, in_percent=in_percent) for end in interval or ()),
        badge=badge,
        explanation=str(result.get("explanation", "")),
    )
