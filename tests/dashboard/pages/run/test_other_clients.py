"""Runs of clients that send less than the agent does: no count of non-finite elements, no loss."""

from __future__ import annotations

import numpy as np
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.visitors import Visitor, get_json

from fp8scope_dashboard.pages.run.summary import summarise
from fp8scope_dashboard.runs.models import Run, Tensor

STEPS = range(40)


def without_nonfinite(admin: Visitor) -> Run:
    """A run with the statistics that saturation needs, of which the second tensor saturates."""
    run = make_run(admin.project, "another client", precision="fp8")
    recorder = Recorder(run=run, tensors=["a.input", "b.input"])
    saturated = np.tile([0.0, 30.0], (len(STEPS), 1))
    numel = np.full((len(STEPS), 2), 1000.0)
    losses = np.linspace(3, 2, len(STEPS))
    recorder.rows(STEPS, {"loss": losses}, {"saturated": saturated, "numel": numel})
    return run


def test_it_works(admin: Visitor) -> None:
    run = without_nonfinite(admin)
    assert Tensor.objects.filter(run=run).count() == 2
    drawn = get_json(admin, f"runs/{run.id}/figures/heatmap.json")
    assert "saturation" in drawn["summary"].lower()
    shown = admin.client.get(admin.address(f"runs/{run.id}/tensors/map.json")).json()
    assert shown["statistic"] == "saturation_rate"
    page = admin.client.get(admin.address(f"runs/{run.id}/")).content.decode()
    assert "No tensor telemetry" not in page


def test_the_card_and_the_panels_show_the_saturation(admin: Visitor) -> None:
    run = Run.objects.get(pk=without_nonfinite(admin).pk)
    overflow = summarise(run).overflow
    assert overflow is not None
    assert [(worst.name, worst.rate) for worst in overflow.worst] == [("b.input", 0.03)]
    answer = get_json(admin, f"runs/{run.id}/figures/panels.json")
    notes = [note["text"] for note in answer["figure"]["layout"]["annotations"]]
    assert "tensors out of range, of 2" in notes
    lines = get_json(admin, f"runs/{run.id}/figures/tensor.json?tensor=b.input")["figure"]["data"]
    assert any("saturat" in str(line.get("name")) for line in lines)


def test_a_statistic_that_is_missing_is_named(admin: Visitor) -> None:
    run = without_nonfinite(admin)
    answer = get_json(admin, f"runs/{run.id}/figures/heatmap.json?statistic=amax")
    assert "No tensor telemetry" not in str(answer)
    assert "The run has no amax. It has: saturated" in str(answer)


def test_a_run_without_a_loss_shows_its_scalars(admin: Visitor) -> None:
    run = make_run(admin.project, "rewards")
    Recorder(run=run).rows(
        STEPS, {name: np.linspace(0, 1, len(STEPS)) for name in ("time_other", "reward", "kl")}
    )
    answer = get_json(admin, f"runs/{run.id}/figures/panels.json")
    notes = [note["text"] for note in answer["figure"]["layout"]["annotations"]]
    # What the script logs comes before what the agent measures.
    assert notes[:2] == ["kl", "reward"] and len(notes) == 3
