"""The card of gradients that are averaged in FP8, and of what the optimizer stores."""

from __future__ import annotations

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.visitors import Visitor, get_json, trace_values

from fp8scope_dashboard.pages.run.training_state import training_state_of
from fp8scope_dashboard.runs.models import Tensor
from fp8scope_dashboard.text.numbers import THIN

PARAMETERS = 1_000_000
FP8_LM = {
    "fp8_gradients/mu_min": 0.25,
    "fp8_gradients/mu_median": 0.5,
    "fp8_gradients/mu_max": 2.0,
    "fp8_gradients/saturated_max": 2e-6,
    "fp8_gradients/bytes": 1_000_400.0,
    "fp8_gradients/bytes_bf16": 2e6,
    "fp8_gradients/bytes_float32": 4e6,
    "optimizer_state/exp_avg_bytes": 1e6,
    "optimizer_state/exp_avg_sq_bytes": 2e6,
    "optimizer_state/master_bytes": 2e6,
    "optimizer_state/scales_bytes": 1200.0,
    "optimizer_state/parameters": float(PARAMETERS),
    "optimizer_state/level": 2.0,
}


def test_it_works(admin: Visitor) -> None:
    run = make_run(admin.project, "FP8-LM")
    recorder = Recorder(run=run, tensors=["0.weight.exp_avg", "0.weight.master"])
    Tensor.objects.filter(run=run, role="master").update(format="fp16")
    recorder.rows(np.arange(30), {name: np.full(30, value) for name, value in FP8_LM.items()})
    run.refresh_from_db()
    page = admin.client.get(admin.address(f"runs/{run.id}/?tab=efficiency")).content.decode()
    text = page.replace(THIN, " ")
    assert "A rank sends 977 KiB for its gradients in a step: 50.0 % less than an all-reduce in BF16" in text
    assert "75.0 % less than one in float32." in text
    assert "The optimizer stores 5 bytes a parameter on a rank at level O2." in text
    state = training_state_of(run)
    assert state is not None and [(row.name, row.format, row.per_parameter) for row in state.rows] == [
        ("First moment", "E4M3", "1"),
        ("Second moment", "", "2"),
        ("Master weights", "FP16", "2"),
        ("Scales", "", "0.0012"),
    ]
    traces = get_json(admin, f"runs/{run.id}/figures/gradient_scaling.json")["figure"]["data"]
    drawn = {
        trace["name"]: trace_values(trace["y"])[0] for trace in traces if trace.get("showlegend") is False
    }
    assert drawn == {
        "Scaling factor, largest": 2.0,
        "Scaling factor, median": 0.5,
        "Scaling factor, smallest": 0.25,
    }
    saturation = get_json(admin, f"runs/{run.id}/figures/gradient_saturation.json")
    assert "Saturated share" in saturation["summary"]
    assert saturation["figure"]["layout"]["yaxis"]["range"] == pytest.approx([0.0, 1.1e-5])


def test_a_plain_optimizer_has_a_table_and_no_gradients(admin: Visitor) -> None:
    scalars = {"optimizer_state/exp_avg_bytes": 4e6, "optimizer_state/parameters": float(PARAMETERS)}
    run = make_run(admin.project, "AdamW", last_scalars=scalars)
    state = training_state_of(run)
    assert state is not None and not state.reduces
    assert state.sentence == "The optimizer stores 4 bytes a parameter on a rank."
    assert "FP8" in get_json(admin, f"runs/{run.id}/figures/gradient_scaling.json")["empty"]


def test_one_process_sends_nothing(admin: Visitor) -> None:
    alone = {name: value if "bytes" not in name else 0.0 for name, value in FP8_LM.items() if "grad" in name}
    assert training_state_of(make_run(admin.project, "alone", last_scalars=alone)) is None
    assert training_state_of(make_run(admin.project, "bare")) is None
