"""`fp8scope bisect SCRIPT`: an unmodified script, its batch, its ranking."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from agent.helpers.wire_server import WireServer

from fp8scope.cli.main import main
from fp8scope.config import Settings

SCRIPT = """
import sys
import torch
from torch import nn
from torch.nn import functional

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x, *, gain=1.0, labels=None):
        logits = self.head(functional.dropout(self.down(self.up(x).relu()), 0.1)) * gain
        if labels is None:
            return logits
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}

torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
BEGIN
for number in range(int(sys.argv[1])):
    x, y = torch.randn(64, 32), torch.randint(0, 10, (64,))
    LOSS
    optimizer.step()
    optimizer.zero_grad()
print("the script ended", sys.argv)
"""
LOSSES = {
    "outside": "functional.cross_entropy(model(x, gain=2.0), y).backward()",
    "inside": "model(x, gain=2.0, labels=y)['loss'].backward()",
    "scaled": "(functional.cross_entropy(model(x, gain=2.0), y) * 65536).backward()",
}


def script(folder: Path, loss: str = "outside", begin: str = "") -> str:
    path = folder / "train.py"
    path.write_text(SCRIPT.replace("LOSS", LOSSES.get(loss, loss)).replace("BEGIN", begin))
    return str(path)


def ranking(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["bisect", "--json", "--convert", "delayed", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_it_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, backward, call = list(sys.argv), torch.autograd.backward, torch.nn.Module.__call__
    assert main(["bisect", "--convert", "delayed", "--step", "3", script(tmp_path), "10"]) == 0
    shown = capsys.readouterr().out
    assert "dgrad" in shown and "wgrad" in shown and "all products" in shown
    assert "the script ended" not in shown, "it is not trained to its end"
    assert sys.argv == before and torch.autograd.backward is backward
    assert torch.nn.Module.__call__ is call


def test_ranks_by_the_scripts_own_gradient(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However the script comes to its loss, and whatever it scales it with."""
    outside, inside, scaled = (
        {
            (one["layer"], one["product"]): one["relative_error"]
            for one in ranking(capsys, script(tmp_path, loss), "5")["products"]
        }
        for loss in LOSSES
    )
    assert len(outside) == 6 and outside == pytest.approx(scaled, rel=1e-3)
    for place in outside:
        # What fprop does to the softmax is in the one and not in the other.
        near = 0.05 if place[1] != "fprop" else 0.5
        assert outside[place] == pytest.approx(inside[place], rel=near, abs=1e-6)


def test_a_bad_product_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin = (
        "import fp8scope, fp8scope_kernels\n"
        "fp8scope.convert(model, fp8scope.DelayedScaling())\n"
        "model.down.register_full_backward_pre_hook(lambda layer, grad: "
        "[None, layer.state_of('grad_output').amax_history.fill_(1e20)][0])"
    )
    assert main(["bisect", "--json", "--step", "3", script(tmp_path, begin=begin), "5"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    worst = found["products"][0]
    assert worst["layer"] == "down" and worst["product"] in ("dgrad", "wgrad")
    assert worst["relative_error"] > 3 * found["products"][2]["relative_error"]


def test_records_the_ranking_in_the_scripts_own_run(
    tmp_path: Path,
    server: WireServer,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in (("URL", server.url), ("TOKEN", server.token), ("DIR", str(tmp_path / "spool"))):
        monkeypatch.setenv(f"FP8SCOPE_{name}", value)
    begin = "import fp8scope\nrun = fp8scope.init(name='bisected')"
    found = ranking(capsys, script(tmp_path, begin=begin), "5")
    from fp8scope.process.open_runs import live_runs

    for run in list(live_runs):
        assert run.finish().complete
    (report,) = server.run.reports_of("bisect")
    assert report["products"] == found["products"] and "script" in report["note"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["nothing.py"], 2, "there is no script nothing.py"),
        (["--convert", "delayed", "--step", "9", "SCRIPT", "4"], 1, "before pass 9: it made 4"),
        (["SCRIPT", "2"], 1, "--convert makes them"),
    ],
    ids=str,
)
def test_says_what_is_missing(
    arguments: list[str], status: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path)
    assert main(["bisect", *[path if one == "SCRIPT" else one for one in arguments]]) == status
    assert message in capsys.readouterr().err


def test_reports_an_unrelated_backward_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, "model(x); (model.up.weight.sum()).backward()")
    assert main(["bisect", "--convert", "delayed", path, "2"]) == 1
    assert "does not depend on what the model returned" in capsys.readouterr().err


def test_errors_of_the_script_are_shown_unchanged(tmp_path: Path) -> None:
    path, call = script(tmp_path, "raise ZeroDivisionError"), torch.nn.Module.__call__
    with pytest.raises(ZeroDivisionError):
        main(["bisect", path, "2"])
    assert torch.nn.Module.__call__ is call
