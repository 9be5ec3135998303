"""Training processes of the demo: messages, logs, crashes and stopping."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from helpers.waiting import wait_until

from fp8scope_dashboard.demo.plan import RunPlan
from fp8scope_dashboard.demo.running import DemoError, _check
from fp8scope_dashboard.demo.trainer import NICENESS, TrainerReport, TrainingProcess

PLAN = RunPlan(name="a run", group="bf16", precision="bf16", seed=1, steps=100)
MESSAGES = """
import json, sys, time
for message in (
    {"event": "started", "run": "abc", "steps": 100},
    {"event": "progress", "step": 40, "loss": 2.5, "tokens_per_second": 1000.0},
):
    print(json.dumps(message), flush=True)
print("a warning from a library", file=sys.stderr, flush=True)
"""
FINISHED = (
    'print(json.dumps({"event": "finished", "points_sent": 7, "step_times": [1.0, 2.0]}), flush=True)\n'
)


@pytest.fixture
def trainers() -> Iterator[list[TrainingProcess]]:
    started: list[TrainingProcess] = []
    yield started
    for trainer in started:
        trainer.stop()


def begin(folder: Path, script: str, trainers: list[TrainingProcess]) -> TrainingProcess:
    """Start a trainer that runs `script` instead of the training module."""
    (folder / "script.py").write_text(script)
    trainer = TrainingProcess(PLAN, {**os.environ, "PYTHONPATH": str(folder)}, folder)
    trainers.append(trainer)
    trainer.start(module="script")
    return trainer


def wait(trainer: TrainingProcess) -> int:
    wait_until(lambda: trainer.exit_status() is not None, "the end of the trainer")
    status = trainer.exit_status()
    assert status is not None
    return status


def test_it_works(tmp_path: Path, trainers: list[TrainingProcess]) -> None:
    trainer = begin(tmp_path, MESSAGES + FINISHED, trainers)
    assert wait(trainer) == 0
    report = trainer.report
    assert (report.run, report.step, report.loss, report.tokens_per_second) == ("abc", 40, 2.5, 1000.0)
    assert report.finished is not None
    assert report.step_times == [1.0, 2.0]
    _check(trainer)


def test_a_training_gives_way_to_the_servers(tmp_path: Path, trainers: list[TrainingProcess]) -> None:
    script = 'import json, os; print(json.dumps({"event": "finished", "nice": os.nice(0)}))\n'
    trainer = begin(tmp_path, "import time; time.sleep(1.0)\n" + script, trainers)
    assert wait(trainer) == 0
    assert trainer.report.finished is not None and trainer.report.finished["nice"] == NICENESS


def test_writes_other_output_to_the_log(tmp_path: Path, trainers: list[TrainingProcess]) -> None:
    trainer = begin(tmp_path, MESSAGES + FINISHED + 'print("[1, 2]"); print("{}")\n', trainers)
    wait(trainer)
    assert (tmp_path / "a-run.log").read_text() == "a warning from a library\n[1, 2]\n{}\n"


def test_reports_a_crash_with_the_end_of_the_log(tmp_path: Path, trainers: list[TrainingProcess]) -> None:
    trainer = begin(tmp_path, MESSAGES + 'raise RuntimeError("out of memory")\n', trainers)
    assert wait(trainer) == 1
    with pytest.raises(DemoError) as failed:
        _check(trainer)
    for words in ("'a run'", "status 1", "a-run.log", "RuntimeError: out of memory"):
        assert words in str(failed.value)


def test_exiting_without_a_report_is_a_failure(tmp_path: Path, trainers: list[TrainingProcess]) -> None:
    trainer = begin(tmp_path, MESSAGES, trainers)
    assert wait(trainer) == 0
    with pytest.raises(DemoError):
        _check(trainer)


def test_reports_a_kill(tmp_path: Path, trainers: list[TrainingProcess]) -> None:
    trainer = begin(tmp_path, MESSAGES + "time.sleep(600)\n", trainers)
    pid = _pid(trainer)
    os.kill(pid, signal.SIGKILL)
    wait(trainer)
    with pytest.raises(DemoError, match="killed by signal 9"):
        _check(trainer)


def test_stops_the_process(tmp_path: Path, trainers: list[TrainingProcess]) -> None:
    trainer = begin(tmp_path, MESSAGES + "time.sleep(600)\n", trainers)
    pid = _pid(trainer)
    trainer.stop()
    assert not psutil.pid_exists(pid)
    trainer.stop()


def test_passes_the_plan_on_the_command_line(tmp_path: Path, trainers: list[TrainingProcess]) -> None:
    trainer = begin(tmp_path, "import sys; print(sys.argv[1:])", trainers)
    wait(trainer)
    assert trainer.tail() == str(PLAN.arguments())


def test_a_trainer_that_was_not_started_has_not_ended(tmp_path: Path) -> None:
    trainer = TrainingProcess(PLAN, dict(os.environ), tmp_path)
    assert not trainer.started
    assert trainer.exit_status() is None
    _check(trainer)
    trainer.stop()


def test_a_report_does_not_change_later(tmp_path: Path, trainers: list[TrainingProcess]) -> None:
    trainer = begin(tmp_path, MESSAGES + FINISHED, trainers)
    wait(trainer)
    report = trainer.report
    trainer._report.update({"event": "alert", "kind": "loss_spike"})
    assert report.alerts == []
    assert trainer.report.alerts == [{"event": "alert", "kind": "loss_spike"}]


def test_ignores_unknown_messages() -> None:
    report = TrainerReport()
    report.update({"event": "something new", "step": 3})
    assert report == TrainerReport()


def _pid(trainer: TrainingProcess) -> int:
    """The pid of the process, once it has reported a step."""
    wait_until(lambda: trainer.report.step, "the first step")
    child = trainer._child
    assert child is not None
    assert psutil.pid_exists(child.pid)
    return child.pid
