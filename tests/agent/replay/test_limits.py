"""What a replay cannot do is said, not guessed from a wrong result."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from agent.helpers.incidents import incident_of, script

from fp8scope.cli.main import main
from fp8scope.replay import limits


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_it_works(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = script(tmp_path)
    incident = incident_of(path, "--fault", "grad")
    monkeypatch.setenv(name, "4")
    capsys.readouterr()
    assert main(["replay", str(incident), path]) == 2
    assert f"one of several ({name} is 4)" in capsys.readouterr().err
    monkeypatch.setenv(name, "1")
    assert main(["replay", "--json", str(incident), path]) == 0


@pytest.mark.parametrize("value", ["", "1", "0", "many"])
def test_one_process_is_not_refused(value: str) -> None:
    assert limits.refusal({"WORLD_SIZE": value, "SLURM_NTASKS": "8"}) == ""


def test_an_incident_of_several_ranks_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path)
    incident = incident_of(path, "--fault", "grad")
    document = json.loads((incident / "incident.json").read_text())
    document["rank"] = 2
    document["environment"]["world_size"] = "8"
    (incident / "incident.json").write_text(json.dumps(document))
    capsys.readouterr()
    assert main(["replay", "--json", str(incident), path]) == 0
    printed = capsys.readouterr()
    # Before the script is run, and with the result.
    assert 0 < printed.err.index("of rank 2 of 8") < printed.err.index("Replaying step")
    sentences = json.loads(printed.out.splitlines()[-1])["sentences"]
    assert any("of rank 2 of 8" in sentence for sentence in sentences)


@pytest.mark.parametrize(
    ("recorded", "here", "expected"),
    [
        ("", "NVIDIA H100", None),
        ("NVIDIA H100", "", "no NVIDIA GPU"),
        ("NVIDIA H100", "NVIDIA A100", "this machine has NVIDIA A100"),
        ("NVIDIA H100", "NVIDIA H100", "use_deterministic_algorithms"),
    ],
)
def test_other_devices(
    recorded: str, here: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "gpu_names", lambda: [here] if here else [])
    document: dict[str, Any] = {"environment": {"gpu": recorded}}
    notes = limits.notes(document)
    assert len(notes) == (expected is not None)
    assert expected is None or expected in notes[0]


def test_a_deterministic_gpu_needs_no_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "gpu_names", lambda: ["NVIDIA H100"])
    torch.use_deterministic_algorithms(True)
    try:
        assert limits.notes({"environment": {"gpu": "NVIDIA H100"}}) == ()
    finally:
        torch.use_deterministic_algorithms(False)
