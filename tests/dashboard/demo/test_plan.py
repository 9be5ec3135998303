"""The five runs of the demo."""

import json
import subprocess
import sys

import pytest

from fp8scope_dashboard.demo.plan import BASELINE, FAULTY, HEALTHY, MAX_STEPS, MIN_STEPS, five_runs


def test_it_works() -> None:
    runs = five_runs()
    assert [run.group for run in runs] == [BASELINE] * 3 + [HEALTHY, FAULTY]
    assert [run.precision for run in runs] == ["bf16"] * 3 + ["fp8"] * 2
    assert len({run.name for run in runs}) == 5


def test_the_baseline_has_three_seeds_and_fp8_uses_the_first() -> None:
    runs = five_runs()
    assert [run.seed for run in runs] == [1, 2, 3, 1, 1]


def test_healthy_and_faulty_runs_are_different_groups() -> None:
    assert HEALTHY != FAULTY


@pytest.mark.parametrize("steps", [MIN_STEPS, 333, 600, MAX_STEPS])
def test_only_the_last_run_has_a_fault(steps: int) -> None:
    runs = five_runs(steps)
    assert [run.fault_at for run in runs[:4]] == [None] * 4
    fault_at = runs[4].fault_at
    assert fault_at is not None
    assert 0.3 * steps < fault_at < 0.5 * steps
    assert {run.steps for run in runs} == {steps}


def test_the_training_process_parses_every_command_line() -> None:
    # In a separate process, as in the demo, because the dashboard never imports torch.
    script = """
import json, sys
from dataclasses import asdict
from fp8scope.demo.train import parse
print(json.dumps([asdict(parse(line)) for line in json.loads(sys.argv[1])]))
"""
    runs = five_runs(200)
    command = [sys.executable, "-c", script, json.dumps([run.arguments() for run in runs])]
    parsed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    for run, plan in zip(runs, parsed, strict=True):
        for name in ("name", "group", "precision", "seed", "steps", "fault_at"):
            assert plan[name] == getattr(run, name)
        assert plan["baseline"] == ("" if run.group == BASELINE else BASELINE)
