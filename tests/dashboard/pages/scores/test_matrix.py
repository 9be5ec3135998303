"""The evaluation matrix on the evaluations page."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import numpy as np
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.visitors import Visitor

SIZES = {"bf16": 2_000_000, "fp6": 750_000, "int4": 500_000}


def measure(visitor: Visitor, name: str, step: int = 100, *, harm: float = 0.1) -> UUID:
    """A matrix of two tasks, in which INT4 does harm; FP6 has no result of the second one."""
    recorder = Recorder(run=make_run(visitor.project, name))
    generator = np.random.default_rng(0)
    losses, right = generator.gamma(4.0, 0.5, 300), (generator.random(300) < 0.7).astype(float)
    for precision, size in SIZES.items():
        cell: dict[str, Any] = {
            "precision": precision,
            "matrix": {
                "weight_bytes": size,
                "model_bytes": 2 * size,
                "seconds": 1.5 if precision == "bf16" else 3.0,
                "layers": 6,
                "left": 1,
            },
        }
        changed = losses + (harm if precision == "int4" else 0.0) + generator.normal(0.0, 1e-4, 300)
        nll = [float(value) for value in (losses if precision == "bf16" else changed)]
        recorder.evaluation(
            step, nll, name="texts", metric="nll", kind="mean", higher_is_better=False, **cell
        )
        if precision != "fp6":
            items = right * (np.arange(300) > 60) if precision == "int4" else right
            recorder.evaluation(step, [float(value) for value in items], name="questions", **cell)
    return recorder.run.id


def html(visitor: Visitor, **query: str) -> str:
    answer = visitor.client.get(visitor.address("evaluations/"), query)
    assert answer.status_code == 200
    return str(answer.content.decode())


def text_of(page: str) -> str:
    section = page.split('id="matrix"')[1].split("</section>")[0]
    return " ".join(section.split())


def test_it_works(admin: Visitor) -> None:
    measure(admin, "gpt")
    page = html(admin)
    assert "No evaluations yet" not in page
    section = text_of(page)
    heads = [section.index(f'"col">{name} ') for name in ("BF16", "FP6", "INT4")]
    assert heads == sorted(heads)
    assert "37.5" in section and "of BF16" in section and "2× the time" in section
    assert "6 layers quantised, 1 module left as it is" in section
    assert section.count("badge--danger") == 2 and section.count("badge--good") == 1
    assert "lower is better, margin ±" in section and "Identical" not in section


def test_another_checkpoint_can_be_chosen(admin: Visitor) -> None:
    first = measure(admin, "first", harm=0.0)
    measure(admin, "second", step=200)
    newest, chosen = text_of(html(admin)), text_of(html(admin, matrix=f"{first}:100"))
    assert "second, step 200. 6 layers" in newest and "first, step 100. 6 layers" in chosen
    assert newest.count("<option") == 2 and f'value="{first}:100"' in newest
    # A live update asks for the chosen one again.
    refreshed = html(admin).split('id="tasks"')[1].split(">")[0]
    assert 'hx-include="#matrix select"' in refreshed
    # Neither a strange address nor one of another project shows another matrix, or an error.
    for address in ("x", f"{first}:", f"{UUID(int=1)}:100", f"{first}:100:2"):
        assert "second, step 200. 6 layers" in text_of(html(admin, matrix=address))


def test_a_project_without_a_matrix(admin: Visitor) -> None:
    Recorder(run=make_run(admin.project, "r")).evaluation(10, [1.0, 0.0, 1.0])
    page = html(admin)
    assert 'id="matrix" hidden' in page and "One checkpoint" not in page
