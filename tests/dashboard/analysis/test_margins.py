"""The margin of one comparison: what it decides, and for which runs."""

from __future__ import annotations

import uuid

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis.loss_comparisons import compare
from fp8scope_dashboard.analysis.margins import MarginError, choose_margin
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.runs.services import register

STEPS = 200


@pytest.fixture
def arm(project: Project) -> list[Run]:
    """Two FP8 seeds that are 1 % above two BF16 seeds, all equally noisy."""
    runs = []
    for number in range(4):
        kind = "fp8" if number < 2 else "bf16"
        run = make_run(
            project, f"{kind} {number}", precision=kind, group=kind, seed=number % 2,
            baseline="bf16" if kind == "fp8" else "", total_steps=STEPS, state="finished",
        )  # fmt: skip
        noise = np.random.default_rng(number).normal(0.0, 0.002, STEPS)
        level = 2.0 * (1.01 if kind == "fp8" else 1.0)
        Recorder(run=run).rows(np.arange(STEPS), {"loss": level + noise}, rows_per_batch=STEPS)
        runs.append(run)
    return runs[:2]


def test_it_works(arm: list[Run]) -> None:
    before = compare(arm[0].pk)
    assert before is not None and before.result["margin"] == 0.0025 and before.verdict == "worse"
    assert choose_margin(arm[0], 0.05) == 2
    after = compare(arm[0].pk)
    assert after is not None and after.result["margin"] == 0.05 and after.verdict == "equivalent"
    choose_margin(arm[0], None)
    again = compare(arm[0].pk)
    assert again is not None and again.verdict == "worse"


def test_it_holds_for_the_seeds_and_nobody_else(project: Project, arm: list[Run]) -> None:
    other = make_run(project, "other", group="fp8", baseline="another")
    choose_margin(arm[0], 0.01)
    margins = dict(Run.objects.values_list("name", "margin"))
    assert margins == {"fp8 0": 0.01, "fp8 1": 0.01, "bf16 2": None, "bf16 3": None, "other": None}
    assert other.equivalence_margin == project.margin


def test_a_new_seed_has_the_margin_of_the_others(project: Project, arm: list[Run]) -> None:
    choose_margin(arm[0], 0.01)
    fields = {"name": "fp8 new", "group": "fp8", "baseline": "bf16", "precision": "fp8"}
    run, created = register(uuid.uuid4(), project, fields)
    assert created and run.margin == 0.01
    run, _ = register(uuid.uuid4(), project, {**fields, "group": "alone"})
    assert run.margin is None


def test_a_run_alone_changes_alone(project: Project) -> None:
    first, second = (make_run(project, name, baseline="bf16") for name in "ab")
    assert choose_margin(first, 0.02) == 1
    second.refresh_from_db()
    assert second.margin is None


@pytest.mark.parametrize("margin", [0.0, -0.1, 1.5, float("nan"), float("inf")])
def test_refuses_other_numbers(project: Project, margin: float) -> None:
    run = make_run(project, "a", baseline="bf16")
    with pytest.raises(MarginError, match="between"):
        choose_margin(run, margin)
    with pytest.raises(MarginError, match="no baseline"):
        choose_margin(make_run(project, "b"), 0.01)


def test_a_margin_in_nats_is_that_of_the_loss(arm: list[Run]) -> None:
    """FP8 is .02 nats above a baseline of 2."""
    assert choose_margin(arm[0], 0.05, in_nats=True) == 2
    after = compare(arm[0].pk)
    assert after is not None and after.verdict == "equivalent" and after.result["margin_nats"] == 0.05
    assert after.result["margin"] == pytest.approx(0.05 / after.result["baseline_loss"])
    choose_margin(arm[0], 0.005, in_nats=True)
    again = compare(arm[0].pk)
    assert again is not None and again.verdict == "worse" and "±0.005 nats" in again.result["explanation"]


def test_other_judgements_have_it_at_the_loss_of_the_baseline(project: Project, arm: list[Run]) -> None:
    choose_margin(arm[0], 0.01, in_nats=True)
    assert Run.objects.get(pk=arm[0].pk).equivalence_margin == project.margin
    compare(arm[0].pk)
    assert Run.objects.get(pk=arm[0].pk).equivalence_margin == pytest.approx(0.005, rel=0.01)
    # A choice in per cent takes its place, and the other way round.
    choose_margin(arm[0], 0.02)
    assert Run.objects.filter(margin=0.02, margin_nats=None).count() == 2
    choose_margin(arm[0], 0.01, in_nats=True)
    fields = {"name": "fp8 new", "group": "fp8", "baseline": "bf16", "precision": "fp8"}
    run, _ = register(uuid.uuid4(), project, fields)
    assert (run.margin, run.margin_nats) == (None, 0.01)


@pytest.mark.parametrize("margin", [0.0, -0.01, 101.0, float("nan"), float("inf")])
def test_a_margin_in_nats_is_bounded(arm: list[Run], margin: float) -> None:
    with pytest.raises(MarginError, match="nats"):
        choose_margin(arm[0], margin, in_nats=True)
