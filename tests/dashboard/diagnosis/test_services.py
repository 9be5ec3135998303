"""Diagnoses of stored runs, the sweep, the page and the API."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.reporting import BISECT, send_report
from dashboard.helpers.token_clients import client_with_token
from dashboard.helpers.visitors import Visitor, visitor_of
from django.test import Client
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project, Role
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.diagnosis import services
from fp8scope_dashboard.diagnosis.conclusion import NO_CAUSE
from fp8scope_dashboard.diagnosis.findings import METHOD_VERSION
from fp8scope_dashboard.diagnosis.models import Diagnosis
from fp8scope_dashboard.runs.models import Run, Tensor

pytestmark = pytest.mark.django_db

STEPS = np.arange(1, 161)
NAMES = [f"blocks.{i}.up.{role}" for i in range(4) for role in ("input", "weight", "grad_output")]
RECIPE = {"recipe": "CurrentScaling", "margin": 0, "power_of_two": False}


@pytest.fixture
def admin(db: None) -> Visitor:
    return visitor_of(create_project("research", "Research"), "ada", Role.ADMIN)


def losses(seed: int) -> np.ndarray[Any, Any]:
    noise = np.random.default_rng(seed).normal(0.0, 0.02, len(STEPS))
    return 2.0 + 3.0 / np.sqrt(1.0 + STEPS / 8.0) + noise


def amaxes() -> np.ndarray[Any, Any]:
    return np.exp(np.random.default_rng(7).normal(0.0, 0.3, (len(STEPS), len(NAMES))))


def bf16(project: Project, rise: float = 0.0) -> Run:
    run = make_run(project, "bf16", group="bf16", precision="bf16", seed=1)
    recorder = Recorder(run=run, tensors=NAMES)
    recorder.rows(STEPS, {"loss": losses(1) + rise * np.maximum(0, STEPS - 80)}, {"amax": amaxes()})
    recorder.finish()
    return run


def fp8(project: Project, *, frozen: bool = False, rise: float = 0.0) -> Recorder:
    run = make_run(project, "fp8", baseline="bf16", precision="fp8", seed=1, recipe=RECIPE)
    recorder = Recorder(run=run, tensors=NAMES)
    Tensor.objects.filter(run=run).update(format="E4M3")
    amax = amaxes()
    scale = 448.0 / amax
    if frozen:
        scale[80:] = scale[80]
    statistics = {"amax": amax, "scale": scale, "numel": np.full(amax.shape, 1000.0)}
    statistics |= {name: np.zeros(amax.shape) for name in ("saturated", "underflow", "nonfinite")}
    recorder.rows(STEPS, {"loss": losses(2) + rise * np.maximum(0, STEPS - 80)}, statistics)
    return recorder


def test_a_healthy_run_has_no_cause(admin: Visitor) -> None:
    bf16(admin.project)
    recorder = fp8(admin.project)
    recorder.finish()
    diagnosis = services.diagnose(recorder.run.id)
    assert diagnosis is not None
    assert (diagnosis.sentence, diagnosis.cause, diagnosis.outcome) == (NO_CAUSE, "", "clear")
    assert [finding["outcome"] for finding in diagnosis.result["findings"]] == [
        "clear", "clear", "unknown", "clear", "clear", "unknown", "unknown"
    ]  # fmt: skip
    assert diagnosis.result["method_version"] == METHOD_VERSION


def test_names_frozen_scales_and_since_when(admin: Visitor) -> None:
    bf16(admin.project)
    recorder = fp8(admin.project, frozen=True)
    diagnosis = services.diagnose(recorder.run.id)
    assert diagnosis is not None and diagnosis.cause == "frozen_scale"
    assert diagnosis.result["onset"] == 81 and "12 tensors of 12" in diagnosis.sentence
    assert "constant from step 81" in diagnosis.sentence


def test_never_blames_fp8_where_bf16_shows_the_same(admin: Visitor) -> None:
    bf16(admin.project, rise=0.05)
    recorder = fp8(admin.project, frozen=True, rise=0.06)
    diagnosis = services.diagnose(recorder.run.id)
    assert diagnosis is not None and diagnosis.outcome == "not_fp8"
    assert diagnosis.cause == "learning_rate" and diagnosis.sentence.startswith("Not FP8")


def test_is_made_again_only_for_new_data(admin: Visitor) -> None:
    recorder = fp8(admin.project)
    first = services.diagnose(recorder.run.id)
    again = services.diagnose(recorder.run.id)
    assert first is not None and again is not None and first.diagnosed_at == again.diagnosed_at
    bf16(admin.project)
    third = services.diagnose(recorder.run.id)
    assert third is not None and third.diagnosed_at > first.diagnosed_at
    assert services.diagnose(admin.project.runs.model().pk) is None


def test_reads_the_latest_bisection(admin: Visitor) -> None:
    recorder = fp8(admin.project)
    product = {"layer": "blocks.1.up", "product": "dgrad", "relative_error": 0.6, "cosine": 0.8}
    rest = [{**product, "layer": f"blocks.{i}.up", "relative_error": 0.01} for i in (0, 2, 3)]
    send_report(recorder, **{**BISECT, "products": [product, *rest]})
    diagnosis = services.diagnose(recorder.run.id)
    assert diagnosis is not None and diagnosis.cause == "bad_layer" and "blocks.1.up" in diagnosis.sentence


def test_the_sweep_takes_failed_runs_once(admin: Visitor) -> None:
    recorder = fp8(admin.project)
    recorder.finish("Traceback")
    healthy = fp8(admin.project)
    healthy.finish()
    assert services.undiagnosed_runs() == [recorder.run.id]
    services.diagnose(recorder.run.id)
    assert services.undiagnosed_runs() == []


def test_a_run_without_rows_is_diagnosed(admin: Visitor) -> None:
    run = make_run(admin.project, precision="fp8", baseline="nothing")
    diagnosis = services.diagnose(run.id)
    assert diagnosis is not None and (diagnosis.outcome, diagnosis.sentence) == ("unknown", NO_CAUSE)


def test_the_page_shows_the_cause_and_each_step(admin: Visitor) -> None:
    recorder = fp8(admin.project, frozen=True)
    address = admin.address(f"runs/{recorder.run.id}/diagnosis/")
    assert "Being diagnosed" in admin.client.get(address).content.decode()
    services.diagnose(recorder.run.id)
    shown = admin.client.get(address).content.decode()
    assert "are frozen" in shown and "Is it FP8?" in shown and "One product" in shown
    assert "tensor=blocks.0.up" in shown
    part = admin.client.get(address, headers={"HX-Request": "true", "HX-Target": "diagnosis"})
    assert "are frozen" in part.content.decode() and "<html" not in part.content.decode()
    head = admin.client.get(admin.address(f"runs/{recorder.run.id}/")).content.decode()
    assert "are frozen" in head and address in head


def test_the_page_is_for_members_of_the_project(admin: Visitor) -> None:
    recorder = fp8(admin.project)
    stranger = visitor_of(create_project("elsewhere", "Elsewhere"), "sam", Role.ADMIN)
    address = admin.address(f"runs/{recorder.run.id}/diagnosis/")
    assert stranger.client.get(address).status_code == 404
    assert Client().get(address).status_code == 302


def test_the_api_has_the_diagnosis(admin: Visitor) -> None:
    recorder = fp8(admin.project, frozen=True)
    client = client_with_token(admin.project)
    address = f"/api/v1/runs/{recorder.run.id}/diagnosis"
    before = client.get(address).json()
    assert before["current"] is False and before["sentence"] is None and before["findings"] == []
    services.diagnose(recorder.run.id)
    answer = json.loads(client.get(address).content)
    assert answer["current"] and answer["cause"] == "frozen_scale" and answer["decided_by"] == "scaling"
    assert [finding["step"] for finding in answer["findings"]] == [
        "baseline", "reference", "software", "optimizer", "scaling", "product", "evaluation"
    ]  # fmt: skip
    stranger = create_token(create_project("elsewhere", "Elsewhere"), "tests", scopes=("write", "read"))[1]
    other = Client(headers={"authorization": f"Bearer {stranger}"})
    assert other.get(address).status_code == 404
    assert Diagnosis.objects.count() == 1


@pytest.mark.parametrize(("onset", "named"), [(163, False), (60, True), (20, True), (10, False)])
def test_an_alert_has_a_suspected_cause_only_if_that_is_new(admin: Visitor, onset: int, named: bool) -> None:
    """The margin clips from step 20 on, in a healthy run too."""
    run = make_run(admin.project, "fp8", precision="fp8")
    finding = {"step": "scaling", "onset": 20, "earliest": None}
    Diagnosis.objects.create(
        run=run, outcome="cause", cause="margin", sentence="The margin is too small.",
        result={"findings": [finding], "decided_by": "scaling", "onset": 20}, diagnosed_at=timezone.now(),
    )  # fmt: skip
    assert (services.suspected_cause(run.id, onset) is not None) is named


def test_a_baseline_that_diverged_is_told(admin: Visitor) -> None:
    bf16(admin.project, rise=0.05)
    recorder = fp8(admin.project)
    recorder.finish()
    diagnosis = services.diagnose(recorder.run.id)
    assert diagnosis is not None and (diagnosis.cause, diagnosis.outcome) == ("baseline", "not_fp8")
    assert "Baseline in trouble" in diagnosis.result["cause_name"]
