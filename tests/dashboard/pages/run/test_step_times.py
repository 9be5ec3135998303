"""The card of a traced step's time by layer."""

from __future__ import annotations

import math
from typing import Any

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.visitors import Visitor

from fp8scope_dashboard.pages.run.step_times import KINDS, MAX_ROWS, PASSES, step_times_of
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.runs.services import register


def layer(
    path: str, module: str = "Fp8Linear", *, count: int = 1, launches: int = 0, **seconds: float
) -> Any:
    document = dict.fromkeys((*PASSES, *KINDS), 0.0) | seconds
    return {"path": path, "module": module, "count": count, "launches": launches} | document


def document(*layers: Any, **changes: Any) -> dict[str, Any]:
    return {"step": 120, "device": "host", "seconds": 1.0, "layers": list(layers), "held": {}} | changes


QKV = layer("blocks.*.qkv", count=12, forward=0.004, backward=0.008, products=0.003, casts=0.009)
OPTIMIZER = layer("optimizer", "", forward=0.008, other=0.008)


def run_with(visitor: Visitor, step_times: object) -> Run:
    run = make_run(visitor.project, "traced")
    Run.objects.filter(pk=run.pk).update(environment={"step_times": step_times})
    run.refresh_from_db()
    return run


def test_it_works(admin: Visitor) -> None:
    run = run_with(admin, document(OPTIMIZER, QKV, held={"float8_e4m3fn": 3 << 20, "input": 4 << 20}))
    times = step_times_of(run)
    assert times is not None and times.step == 120
    assert times.columns == ["Forward", "Backward", "Products", "Casts and scales", "Other"]
    first, second = times.rows
    assert (first.path, first.count, first.share) == ("blocks.*.qkv", "12", "60.0\u202f%")
    assert (first.passes, first.kinds) == (["4.00", "8.00"], ["3.00", "9.00", "–"])
    assert second.passes == ["–", "–"]
    assert times.sentence == (
        "Operators took 20 ms on the host: 15.0\u202f% in matrix products and 45.0\u202f% in casts and "
        "scales of FP8 layers. Casts take longer than products: FP8 cannot pay at these sizes."
    )
    assert times.held == (
        "Until their backward pass, FP8 layers keep 3.0\u202fMiB (3.0\u202fMiB of float8_e4m3fn). With the "
        "same inputs and no casts they would keep 4.0\u202fMiB."
    )
    page = admin.client.get(admin.address(f"runs/{run.id}/?tab=efficiency")).content.decode()
    assert "Step 120 by layer" in page and "blocks.*.qkv" in page and "Kernels</th>" not in page


def test_kernels_are_counted_on_an_accelerator(admin: Visitor) -> None:
    row = layer("head", "Linear", forward=0.001, products=0.001, launches=1_234)
    run = run_with(admin, document(row, device="accelerator"))
    times = step_times_of(run)
    assert times is not None and times.has_launches and "on the accelerator" in times.sentence
    assert "casts" not in times.sentence and times.columns == ["Forward", "Products"]
    page = admin.client.get(admin.address(f"runs/{run.id}/?tab=efficiency")).content.decode()
    assert "Kernels</th>" in page


def test_a_name_is_shown_as_text(admin: Visitor) -> None:
    run = run_with(admin, document(layer("<script>alert(1)</script>", "<b>", forward=1, other=1)))
    page = admin.client.get(admin.address(f"runs/{run.id}/?tab=efficiency")).content.decode()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "<script>alert(1)" not in page


@pytest.mark.parametrize(
    "unsound",
    [
        "text",
        [],
        {},
        document(),
        {"step": "x", "layers": [QKV]},
        {"step": 1, "layers": "rows"},
        {"step": 1, "layers": [None, 3, "row", []]},
        document(QKV | {"forward": -1}),
        document(QKV | {"casts": "9"}),
        document(QKV | {"products": True}),
        document(QKV | {"count": None}),
        document(layer("idle")),
    ],
)
def test_what_is_not_sound_is_left_out(admin: Visitor, unsound: object) -> None:
    run = run_with(admin, unsound)
    assert step_times_of(run) is None
    page = admin.client.get(admin.address(f"runs/{run.id}/?tab=efficiency"))
    assert page.status_code == 200 and "by layer" not in page.content.decode()


def test_the_number_of_rows_is_bounded(admin: Visitor) -> None:
    rows = [layer(f"layer{index}", forward=1.0, other=1.0) for index in range(2 * MAX_ROWS)]
    times = step_times_of(run_with(admin, document(*rows, held={"a": math.pi, "input": "x"})))
    assert times is not None and len(times.rows) == MAX_ROWS and times.held == ""


def test_the_last_trace_replaces_that_of_an_earlier_one(admin: Visitor) -> None:
    run = run_with(admin, document(QKV))
    register(run.id, admin.project, {"environment": {"step_times": document(QKV, step=300)}})
    run.refresh_from_db()
    times = step_times_of(run)
    assert times is not None and times.step == 300
