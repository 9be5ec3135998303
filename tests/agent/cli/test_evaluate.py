"""`fp8scope evaluate --matrix SCRIPT:FUNCTION CHECKPOINT`, without a server."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from fp8scope.cli.main import main

SCRIPT = """
import torch
from torch import nn
import neighbour

def load_model(path):
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    model.load_state_dict(torch.load(path))
    return model

def load_with_step(path):
    return load_model(path), 12

def load_weights(path):
    return torch.load(path)

x = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))

def evaluate(model):
    return {f"text {i}": score for i, score in enumerate(model(x).square().mean(1))}

def broken(model):
    raise RuntimeError("no data")

calls = []

def late(model):
    calls.append(1)
    return evaluate(model) if len(calls) != 2 else None
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FP8SCOPE_DIR", str(tmp_path / "spool"))
    monkeypatch.setenv("FP8SCOPE_MODE", "offline")
    (tmp_path / "neighbour.py").touch()
    (tmp_path / "my_evaluation.py").write_text(SCRIPT)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    for step in (100, 200):
        torch.save(model.state_dict(), tmp_path / f"checkpoint-{step}.pt")
    return tmp_path


def evaluate(*arguments: str, function: str = "evaluate") -> int:
    return main(["evaluate", "--matrix", f"my_evaluation.py:{function}", *arguments])


def test_it_works(capsys: pytest.CaptureFixture[str]) -> None:
    several = ("checkpoint-100.pt", "checkpoint-200.pt", "--include", "*")
    assert evaluate("--json", "--precisions", "int8,fp6", "--metric", "loss", *several) == 0
    shown = capsys.readouterr()
    cells = [json.loads(line) for line in shown.out.splitlines()]
    assert [(cell["step"], cell["precision"]) for cell in cells] == [
        (step, precision) for step in (100, 200) for precision in ("bf16", "int8", "fp6")
    ]
    assert cells[1]["items"] == 20 and cells[1]["metric"] == "loss" and cells[1]["difference"] != 0
    assert cells[1]["weight_bytes"] == 32 * 48 + 48 * 16 + 4 * (48 + 16) and cells[1]["verdict"] is None
    assert "fp8scope sync" in shown.err


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate("--load", "load_with_step", "checkpoint-100.pt", "--include", "*") == 0
    table = capsys.readouterr().out
    assert "checkpoint-100.pt, step 12" in table and "nvfp4" in table and "2 layers quantised" in table


@pytest.mark.parametrize(
    ("arguments", "function", "status", "message"),
    [
        (["missing.pt"], "evaluate", 2, "there is no checkpoint missing.pt"),
        (["checkpoint-100.pt"], "evaluation", 2, "has no function evaluation. It needs one"),
        (["--load", "load", "checkpoint-100.pt"], "evaluate", 2, "has no function load. It needs one"),
        (["--step", "1", "checkpoint-100.pt", "checkpoint-200.pt"], "evaluate", 2, "--step is for a single"),
        (["my_evaluation.py"], "evaluate", 1, "my_evaluation.py: it cannot be loaded"),
        (["--load", "load_weights", "checkpoint-100.pt"], "evaluate", 1, "the loader returned OrderedDict"),
        (["--precisions", "fp7", "checkpoint-100.pt"], "evaluate", 1, "precisions must be among"),
        (["checkpoint-100.pt", "--include", "*"], "broken", 1, "RuntimeError: no data"),
        (["--precisions", "fp6,int8", "checkpoint-100.pt", "--include", "*"], "late", 1, ""),
    ],
)
def test_what_goes_wrong_is_told(
    arguments: list[str], function: str, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(*arguments, function=function) == status
    shown = capsys.readouterr()
    assert message in shown.err
    if function == "late":
        assert "fp6 failed: The evaluation function returned None" in shown.out and "int8 " in shown.out


def test_a_script_that_cannot_be_imported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "my_evaluation.py").write_text("1 / 0")
    assert evaluate("checkpoint-100.pt") == 2
    assert "cannot be imported: ZeroDivisionError" in capsys.readouterr().err
    for target in ("my_evaluation.py", "nothing.py:evaluate", "my_evaluation.py:a-b"):
        assert main(["evaluate", "--matrix", target, "checkpoint-100.pt"]) == 2
