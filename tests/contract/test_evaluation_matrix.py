"""`fp8scope evaluate --matrix` against a server: cells are stored, judged, read back and shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.live_servers import Server
from torch import nn

from fp8scope.cli.main import main
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.runs.models import Run

SCRIPT = """
import torch
from torch import nn

def load_model(path):
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    model.load_state_dict(torch.load(path))
    return model

x = torch.randn(500, 32, generator=torch.Generator().manual_seed(0))

def evaluate(model):
    errors = (model(x) - 1).square().mean(1)
    return {"errors": errors, "small": errors < errors.median()}
"""


def test_it_works(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("URL", server.url), ("TOKEN", server.token), ("DIR", str(tmp_path / "spool"))):
        monkeypatch.setenv(f"FP8SCOPE_{name}", value)
    (tmp_path / "scores.py").write_text(SCRIPT)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    torch.save(model.state_dict(), tmp_path / "step-300.pt")
    command = [
        "evaluate",
        "--matrix",
        f"{tmp_path}/scores.py:evaluate",
        "--include",
        "*",
        "--lower-is-better",
    ]

    assert main([*command, "--json", str(tmp_path / "step-300.pt")]) == 0

    cells = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    verdicts = {(cell["task"], cell["precision"]): cell.get("verdict") for cell in cells}
    assert len(cells) == 2 * 9 and verdicts["errors", "int8"] == "equivalent"
    assert verdicts["errors", "bf16"] is None
    assert set(verdicts.values()) - {None} <= {"equivalent", "worse", "better", "cannot_tell"}
    run = Run.objects.get()
    assert (run.name, run.state) == ("evaluation of step-300.pt", "finished")
    assert Evaluation.objects.filter(run=run, step=300, matrix__isnull=False).count() == 18

    # Another precision of the same checkpoint joins the matrix of the same run.
    again = [*command, "--run", str(run.id), "--precisions", "int4", str(tmp_path / "step-300.pt")]
    assert main(again) == 0
    shown = capsys.readouterr().out
    assert "Verdicts, each against BF16" in shown and "mxfp8" in shown and str(run.id) in shown
    assert Run.objects.get().state == "finished"
