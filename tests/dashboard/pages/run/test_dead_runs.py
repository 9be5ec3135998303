"""No page shows a good verdict for a run that failed, went silent, stopped early or is still running."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.reporting import REFERENCE
from dashboard.helpers.visitors import Visitor
from django.test import Client

from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.analysis.services import refresh
from fp8scope_dashboard.control.models import Report
from fp8scope_dashboard.runs.models import Run

PLANNED = 600
SCORES = [1.0, 0.0] * 250
GREEN = re.compile(r"badge--good[^>]*>.{0,200}?</svg>\s*([^<]+)", re.DOTALL)
Ending = Callable[[Recorder], None]


def failed(recorder: Recorder) -> None:
    recorder.finish("RuntimeError: out of memory")


def silent(recorder: Recorder) -> None:
    Run.objects.filter(pk=recorder.run.pk).update(state="silent")


def finished(recorder: Recorder) -> None:
    recorder.finish()


def running(recorder: Recorder) -> None:
    """Leave the run running."""


def record(visitor: Visitor, name: str, steps: int, ending: Ending, **fields: object) -> Run:
    run = make_run(visitor.project, name, total_steps=PLANNED, **fields)
    recorder = Recorder(run=run, tensors=["mlp.up.input"])
    step_numbers = np.arange(1, steps + 1)
    counts = {"numel": 1000.0, "saturated": 0.0, "nonfinite": 0.0}
    statistics = {key: np.full((steps, 1), value) for key, value in counts.items()}
    recorder.rows(
        step_numbers, {"loss": 2.0 + 3.0 * np.exp(-step_numbers / 40.0)}, statistics, rows_per_batch=200
    )
    for step in sorted({72, steps}):
        recorder.evaluation(step, SCORES)
    document = {**REFERENCE, "fp8": [2.0, 1.9], "delta": 0.0, "verdict": "within", "action": "", "step": 20}
    Report.objects.create(
        run=run, writer=recorder.uuid, seq=9000, step=20, kind="reference", document=document
    )
    ending(recorder)
    return run


def judged_run(visitor: Visitor, steps: int, ending: Ending) -> Run:
    for seed in range(2):
        record(visitor, f"bf16 {seed}", PLANNED, finished, group="bf16", precision="bf16", seed=seed)
    run = record(visitor, "the fp8 run", steps, ending, baseline="bf16", precision="fp8")
    refresh(run.id)
    return run


def page(visitor: Visitor, rest: str) -> str:
    answer = visitor.client.get(visitor.address(rest))
    assert answer.status_code == 200
    return str(answer.content.decode().replace("\N{NARROW NO-BREAK SPACE}", " "))


def verdict_pages(visitor: Visitor, run: Run) -> dict[str, str]:
    addresses = {
        "run": f"runs/{run.id}/",
        "runs": "",
        "compare": f"compare/?runs={run.id}",
        "evaluations": "evaluations/",
    }
    return {name: page(visitor, rest) for name, rest in addresses.items()}


def answer_of_the_api(visitor: Visitor, run: Run) -> dict[str, object]:
    _, secret = create_token(visitor.project, "tests", scopes=("write", "read"))
    answer = Client().get(f"/api/v1/runs/{run.id}", headers={"Authorization": f"Bearer {secret}"})
    return dict(answer.json())


def test_it_works(admin: Visitor) -> None:
    run = judged_run(admin, PLANNED, finished)
    for name, text in verdict_pages(admin, run).items():
        assert GREEN.findall(text), name
        assert "100 % of the planned run" in text, name
    answer = json.dumps(answer_of_the_api(admin, run))
    assert answer.count('"verdict": "equivalent"') >= 2 and '"share": 1.0' in answer


@pytest.mark.parametrize("ending", [failed, silent, finished])
@pytest.mark.parametrize("steps", [72, 590])
def test_no_page_shows_a_dead_run_as_good(admin: Visitor, ending: Ending, steps: int) -> None:
    run = judged_run(admin, steps, ending)
    share = {72: "12 %", 590: "98 %"}[steps]
    for name, text in verdict_pages(admin, run).items():
        assert GREEN.findall(text) == [], name
        assert f"{share} of the planned run" in text, name
        assert "Incomplete" in text, name
    answer = answer_of_the_api(admin, run)
    text = json.dumps(answer)
    assert not re.findall(r'"verdict": "(equivalent|better)"', text)
    comparison = answer["comparison"]
    assert isinstance(comparison, dict)
    assert comparison["verdict"] == "incomplete" and comparison["measured"] == "equivalent"
    assert comparison["coverage"]["share"] == pytest.approx(steps / PLANNED)
    assert str(steps) in comparison["reason"] and comparison["final"] is False


def test_a_running_run_is_not_shown_as_final(admin: Visitor) -> None:
    run = judged_run(admin, 72, running)
    texts = verdict_pages(admin, run)
    for name in ("runs", "compare", "evaluations"):
        assert GREEN.findall(texts[name]) == [], name
    assert "Equivalent so far" in texts["run"] and "Equivalent so far" in texts["runs"]
    assert "so far: 12 % of the planned run" in texts["runs"]
    assert "Judged up to step 72 of 600 planned: 12 % of the planned run." in texts["run"]
    assert "Equivalent at 12 %" in texts["evaluations"]


def test_each_state_has_a_label(admin: Visitor) -> None:
    labels = {failed: "Failed", silent: "Silent", finished: "Finished early", running: "Running"}
    for ending, label in labels.items():
        run = record(admin, f"a {label} run", 72, ending)
        assert f"</svg>{label}</span>" in page(admin, f"runs/{run.id}/")
    whole = record(admin, "whole", PLANNED, finished)
    assert "</svg>Finished</span>" in page(admin, f"runs/{whole.id}/")
    listed = page(admin, "")
    assert all(f"</svg>{label}</span>" in listed for label in (*labels.values(), "Finished"))


def test_names_the_failed_runs_of_the_baseline(admin: Visitor) -> None:
    for seed in range(2):
        record(admin, f"bf16 {seed}", 300, failed, group="bf16", precision="bf16")
    run = record(admin, "fp8", PLANNED, finished, baseline="bf16", precision="fp8")
    refresh(run.id)
    for name in ("runs", "compare"):
        text = verdict_pages(admin, run)[name]
        assert GREEN.findall(text) == [] and "Incomplete" in text
    assert "No baseline run finished as planned: 2 failed" in page(admin, f"runs/{run.id}/")
