"""Chosen steps are traced by torch's profiler, into files that Perfetto opens."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from agent.helpers.wire_server import WireServer
from torch import nn

from fp8scope.config import ConfigurationError, Settings, settings_from
from fp8scope.guard import Guard
from fp8scope.observe.traces import MAX_TRACES, StepTraces
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run


def test_it_works(server: WireServer, settings: Settings) -> None:
    """A whole trace of one step, linked at the step, and no other step is traced."""
    model = nn.Linear(4, 4)
    run = Run(settings, blank_registration("traced"))
    run.watch(model)
    run.trace_steps(2)
    for number in range(3):
        with run.step():
            model(torch.ones(1, 4)).sum().backward()
            if number == 1:
                torch.sin(torch.ones(2))
    path = run.directory.parent / "traces" / "step-2-rank-0.json.gz"
    assert run.finish().errors == 0 and sorted(path.parent.iterdir()) == [path]
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [event.get("name") for event in events]
    assert "aten::sin" in names and names.count("aten::linear") == 1
    (link,) = [report for report in server.run.reports if report.get("artefact")]
    assert link["artefact"] == {"name": "Trace of step 2, rank 0", "address": path.as_uri()}
    assert link["step"] == 2


def traced(steps: list[int], path: Path) -> tuple[StepTraces, list[int]]:
    written: list[int] = []
    traces = StepTraces(
        steps, Guard(), lambda step: path / f"{step}.json", lambda step, path: written.append(step)
    )
    return traces, written


def test_the_next_measured_step_stands_for_one_that_is_not(tmp_path: Path) -> None:
    traces, written = traced([3, 4, 10], tmp_path)
    for number in (1, 5, 6, 12):
        traces.begins(number)
        traces.ends(number)
    assert written == [5, 12]


def test_a_step_that_is_not_completed_has_no_trace(tmp_path: Path) -> None:
    traces, written = traced([1, 2], tmp_path)
    traces.begins(1)
    traces.abandon()
    assert not torch._C._autograd._profiler_enabled()
    traces.begins(2)
    traces.ends(2)
    assert written == [2]


def test_a_profile_of_the_script_is_left_alone(tmp_path: Path) -> None:
    traces, written = traced([1, 2], tmp_path)
    with torch.profiler.profile() as profile:
        traces.begins(1)
        torch.ones(2).sin()
        traces.ends(1)
    assert written == [] and "aten::sin" in {event.name for event in profile.events()}


def test_a_large_trace_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8scope.observe.traces.step_traces.MAX_TRACE_BYTES", 10)
    traces, written = traced(list(range(1, 100)), tmp_path)
    assert len(traces._waiting) == MAX_TRACES
    traces.begins(1)
    traces.ends(1)
    assert written == [] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["x", "0", "-3", "1;2", "1.5", "9" * 40])
def test_steps_in_the_environment_are_checked(text: str) -> None:
    assert settings_from(environment={"FP8SCOPE_TRACE_STEPS": "100, 2000,"}).trace_steps == (100, 2000)
    with pytest.raises(ConfigurationError, match="FP8SCOPE_TRACE_STEPS"):
        settings_from(environment={"FP8SCOPE_TRACE_STEPS": text})
