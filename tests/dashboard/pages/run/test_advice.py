"""The advice of a run is on its page, and beside it what a later run without a finding has gained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.visitors import Visitor, run_html

from fp8scope_dashboard.analysis.advice_gains import MeasuredGain, gains_of
from fp8scope_dashboard.pages.run.advice import judgement_of, sentence_of
from fp8scope_dashboard.runs.advice import MAX_FINDINGS, MAX_TEXT, advice_of
from fp8scope_dashboard.runs.models import Run, RunState
from fp8scope_dashboard.text.numbers import THIN

STEPS = 80
LOADER: dict[str, Any] = {
    "practice": "loader",
    "title": "The training waits for its data loader",
    "evidence": "38 % of the steps' time is spent in a DataLoader with 0 workers.",
    "gain": {"low": 0.19, "high": 0.38, "formula": "d/2 to d"},
    "change": "DataLoader(..., num_workers=2)",
}
SAVES = LOADER | {
    "practice": "checkpoints",
    "title": "Checkpoints stall",
    "gain": {"low": 0.1, "high": 0.2, "formula": "k q"},
}


def trained(
    visitor: Visitor,
    name: str,
    seconds: float,
    *findings: dict[str, Any],
    command: str = "train.py",
    **fields: Any,
) -> Run:
    """A finished run whose steps take so long, give or take a tenth."""
    environment = {"command": command, "advice": {"steps": 75, "findings": list(findings)}}
    run = make_run(visitor.project, name, environment=environment, state=RunState.FINISHED, **fields)
    noise = 1 + 0.1 * np.random.default_rng(len(name)).standard_normal(STEPS)
    Recorder(run=run).rows(np.arange(STEPS), {"loss": np.ones(STEPS), "step_seconds": seconds * noise})
    run.refresh_from_db()
    return run


def test_it_works(admin: Visitor) -> None:
    before = trained(admin, "before", 0.100, LOADER)
    after = trained(admin, "after", 0.070)
    (gain,) = gains_of(before)
    assert gain.after == after and gains_of(after) == [gain]
    assert gain.gain is not None and gain.interval is not None
    assert gain.interval[0] < 0.3 < gain.interval[1] and gain.gain == pytest.approx(0.3, abs=0.05)
    assert gain.low == 0.19 and gain.high == pytest.approx(0.38) and gain.is_expected is True
    page = run_html(admin, before, "?tab=efficiency")
    for text in (LOADER["title"], "num_workers=2", "19 % to 38 %", "d/2 to d", "which agrees", "after"):
        assert text in page.replace(THIN, " "), text
    page = run_html(admin, after, "?tab=efficiency").replace(THIN, " ")
    assert "No check of the twelve practices" in page and "time was expected" in page


def test_only_runs_of_the_lineage_are_compared(admin: Visitor) -> None:
    before = trained(admin, "before", 0.1, LOADER, SAVES)
    trained(admin, "other script", 0.01, command="other.py")
    trained(admin, "still there", 0.1, LOADER, SAVES)
    running = trained(admin, "running", 0.05)
    Run.objects.filter(pk=running.pk).update(state=RunState.RUNNING)
    assert gains_of(before) == []
    child = trained(admin, "child", 0.1, SAVES, command="", parent=str(before.pk))
    (gain,) = gains_of(before)
    assert gain.after == child and [finding.practice for finding in gain.findings] == ["loader"]
    # Nothing was gained, which is less than was expected.
    assert gain.is_expected is False and "it gained less" in judgement_of(gain)


def test_findings_that_end_together_share_a_gain(admin: Visitor) -> None:
    before = trained(admin, "before", 0.1, LOADER, SAVES)
    trained(admin, "after", 0.055)
    (gain,) = gains_of(before)
    assert gain.low == 0.19 and gain.high == pytest.approx(1 - 0.62 * 0.8) and gain.is_expected
    page = run_html(admin, before, "?tab=efficiency")
    assert "The training waits for its data loader; Checkpoints stall" in page


def test_too_few_steps_tell_nothing() -> None:
    gain = MeasuredGain(before=Run(), after=Run(), findings=(), gain=None, interval=None, low=0.1, high=0.2)
    assert gain.is_expected is None and "cannot be told" in sentence_of(gain)
    assert judgement_of(gain).endswith("was expected.")


@pytest.mark.parametrize(
    "advice",
    [
        None,
        7,
        {"findings": 3},
        {"findings": [None, {}, LOADER | {"gain": 1}, LOADER | {"title": 5}]},
        {"findings": [LOADER | {"gain": {"low": 0.3, "high": 0.1, "formula": ""}}]},
        {"findings": [LOADER | {"gain": {"low": True, "high": float("nan"), "formula": ""}}], "steps": "x"},
    ],
)
def test_what_is_no_finding_is_left_out(advice: Any) -> None:
    stored = advice_of({"advice": advice})
    assert stored is None or (stored.findings == () and stored.steps == 0)


def test_advice_is_bounded() -> None:
    stored = advice_of({"advice": {"findings": [LOADER | {"evidence": "x" * 10_000}] * 100}})
    assert stored is not None and len(stored.findings) == MAX_FINDINGS
    assert len(stored.findings[0].evidence) == MAX_TEXT
