"""The progress bars and the final tables of the demo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from fp8scope_dashboard.demo.outcome import AlertOutcome, RunOutcome, ScoreOutcome
from fp8scope_dashboard.demo.plan import RunPlan
from fp8scope_dashboard.demo.screen import Bars, tables
from fp8scope_dashboard.demo.trainer import TrainerReport, TrainingProcess

OUTCOME = RunOutcome(
    name="fp8 delayed scaling",
    group="fp8",
    fault_at=240,
    final_loss=1.5859,
    seconds=40.0,
    verdict="equivalent",
    delta=0.0132,
    tolerance=0.0304,
    scores=(
        ScoreOutcome(
            metric="nll",
            verdict="equivalent",
            score=1.755,
            interval=(1.637, 1.873),
            baseline=1.74,
            baseline_interval=(1.61, 1.87),
        ),
    ),
    alerts=(
        AlertOutcome(
            kind="saturation_rate",
            severity="warning",
            onset_step=240,
            step=249,
            steps=9,
            seconds=2.81,
            lag=0.84,
        ),
    ),
    points_sent=154_800,
    points_stored=154_799,
    page="http://localhost/p/demo/",
)


def shown(*outcomes: RunOutcome) -> str:
    console = Console(width=120, record=True, force_terminal=False)
    with console.capture() as capture:
        for table in tables(outcomes):
            console.print(table)
    return capture.get()


def test_it_works() -> None:
    text = shown(OUTCOME)
    for words in (
        "1.586",
        "+1.32%",
        "3.04%",
        "equivalent",
        "154,800",
        "154,799",
        "1.637 to 1.873",
        "equivalent",
    ):
        assert words in text
    for words in ("saturation rate", "249", "9 steps, 2.8 s", "0.8 s"):
        assert words in text


def test_a_baseline_has_no_verdict() -> None:
    text = shown(replace(OUTCOME, verdict="", delta=None, tolerance=None, scores=(), alerts=()))
    assert "baseline" in text
    assert "none" in text


def test_a_run_without_a_fault_has_no_delay_since() -> None:
    text = shown(
        replace(
            OUTCOME,
            alerts=(
                AlertOutcome(
                    kind="loss_spike",
                    severity="warning",
                    onset_step=5,
                    step=9,
                    steps=None,
                    seconds=None,
                    lag=None,
                ),
            ),
        )
    )
    assert "steps," not in text


def test_the_bars_show_the_reported_progress(tmp_path: Path) -> None:
    console = Console(width=120, force_terminal=False)
    waiting, running = (
        TrainingProcess(RunPlan(name=name, group="bf16", precision="bf16", seed=1, steps=100), {}, tmp_path)
        for name in ("one", "other")
    )
    bars = Bars([waiting, running], console)
    running._child = object()  # type: ignore[assignment]
    bars.refresh()
    assert [task.fields["note"] for task in bars.progress.tasks] == ["waiting", "starting"]
    for message in (
        {"event": "progress", "step": 30, "loss": 2.5, "tokens_per_second": 12345.6},
        {"event": "alert", "kind": "loss_spike"},
    ):
        running._report.update(message)
    bars.refresh()
    task = bars.progress.tasks[1]
    assert task.completed == 30
    assert task.fields["note"] == "loss 2.500, 12,346 tokens/s, loss spike"


def test_shows_a_loss_that_is_nan(tmp_path: Path) -> None:
    trainer = TrainingProcess(
        RunPlan(name="one", group="bf16", precision="bf16", seed=1, steps=100), {}, tmp_path
    )
    trainer._child = object()  # type: ignore[assignment]
    trainer._report = TrainerReport(step=3, loss=None)
    bars = Bars([trainer], Console(force_terminal=False))
    bars.refresh()
    assert "nan" in bars.progress.tasks[0].fields["note"]
