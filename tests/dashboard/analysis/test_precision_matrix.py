"""The evaluation matrix on the server: judged, kept apart from the scores of runs, and exported."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis.models import EvaluationComparison
from fp8scope_dashboard.analysis.precision_matrix import last_step, matrices_of, matrix_of
from fp8scope_dashboard.analysis.score_comparisons import compare_evaluations
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.wire.schemas import EvaluationIn

pytestmark = pytest.mark.django_db
SHIFTS = {"bf16": 0.0, "int4": 0.05, "fp6": 0.0005}


def sizes(weight_bytes: int) -> dict[str, Any]:
    return {
        "weight_bytes": weight_bytes,
        "model_bytes": 2 * weight_bytes,
        "seconds": 1.5,
        "layers": 6,
        "left": 2,
    }


def measure(recorder: Recorder, step: int = 100, items: int = 400) -> None:
    generator = np.random.default_rng(0)
    losses = generator.gamma(4.0, 0.5, items)
    for precision, shift in SHIFTS.items():
        changed = losses + shift + generator.normal(0.0, 0.01, items) * (precision != "bf16")
        recorder.evaluation(
            step,
            [float(value) for value in changed],
            name="texts",
            metric="nll",
            kind="mean",
            higher_is_better=False,
            precision=precision,
            margin=0.005,
            matrix=sizes(1000 if precision == "bf16" else 300),
        )


def test_it_works(project: Project) -> None:
    run = make_run(project, "gpt")
    measure(Recorder(run=run))
    assert last_step(run) == 100
    matrix = matrix_of(run, 100)
    assert [column.precision for column in matrix.columns] == ["bf16", "fp6", "int4"]
    assert [column.weight_bytes for column in matrix.columns] == [1000, 300, 300]
    (task,) = matrix.tasks
    verdicts = {precision: cell.get("verdict") for precision, cell in task.cells.items()}
    assert verdicts == {"bf16": None, "fp6": "equivalent", "int4": "worse"}
    assert task.cells["int4"]["tasks"] == 2 and task.cells["int4"]["seed_spread"]["source"] == "none"
    # Judged once, and read again from where it was kept.
    assert matrix_of(run, 100) == matrix
    assert [(name.name, name.step) for name in matrices_of(project)] == [("gpt", 100)]


def test_of_a_repeated_cell_the_last_one_counts(project: Project) -> None:
    recorder = Recorder(run=make_run(project, "gpt"))
    measure(recorder)
    before = matrix_of(recorder.run, 100)
    measure(recorder, items=200)
    after = matrix_of(recorder.run, 100)
    assert before.tasks[0].cells["int4"]["n"] == 400 and after.tasks[0].cells["int4"]["n"] == 200


def test_cells_are_no_scores_of_the_run(project: Project) -> None:
    """Neither against the baseline, which has a score of the same task, nor as the baseline's."""
    for name, fields in (("bf16", {"group": "bf16"}), ("fp8", {"baseline": "bf16"})):
        recorder = Recorder(run=make_run(project, name, **fields))
        measure(recorder)
        if name == "fp8":
            assert compare_evaluations(recorder.run.id) == []
        recorder.evaluation(100, [1.0, 2.0, 4.0], name="texts", metric="nll", kind="mean")
    (compared,) = compare_evaluations(recorder.run.id)
    assert compared.result["n"] == 3 and EvaluationComparison.objects.count() == 1


def test_a_run_without_a_matrix(project: Project) -> None:
    recorder = Recorder(run=make_run(project, "gpt"))
    recorder.evaluation(10, [1.0, 0.0, 1.0])
    matrix = matrix_of(recorder.run, 10)
    assert (last_step(recorder.run), list(matrix.columns), list(matrix.tasks)) == (None, [], [])
    assert matrices_of(project) == [] and Evaluation.scores.count() == 1


def test_a_column_without_its_reference_has_no_verdict(project: Project) -> None:
    recorder = Recorder(run=make_run(project, "gpt"))
    recorder.evaluation(10, [1.0, 0.0, 1.0], precision="fp6", matrix=sizes(10))
    matrix = matrix_of(recorder.run, 10)
    assert [column.precision for column in matrix.columns] == ["fp6"] and matrix.tasks[0].cells == {}


def test_a_precision_of_the_matrix_is_none_of_a_score() -> None:
    document = {"writer": UUID(int=1), "seq": 0, "step": 1, "name": "a", "metric": "nll", "kind": "mean"}
    for precision, matrix, allowed in (
        ("fp6", sizes(10), True),
        ("fp6", None, False),
        ("fp8", sizes(10), False),
        (None, sizes(10), False),
        (None, None, True),
    ):
        body = {**document, "items": [1.0], "precision": precision, "matrix": matrix}
        if allowed:
            EvaluationIn.model_validate(body)
        else:
            with pytest.raises(ValueError, match="precision must be among bf16"):
                EvaluationIn.model_validate(body)
