"""A recorded training is read as it was: its steps, its ranks, and what it is made of."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fp8scope.advice.record import NothingRecordedError, RunRecord, SeveralRunsError, read_spools
from fp8scope.cli.main import main
from fp8scope.config import settings_from
from fp8scope.observe.facts import break_reason
from fp8scope.recording.records import RecordKind, load_json
from fp8scope.recording.registration import blank_registration
from fp8scope.recording.spool import Spool, find_spools
from fp8scope.run import Run

STEPS = 16


class Attention(nn.Module):
    """Attention that writes its matrix to memory."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        weights = nn.functional.dropout((query @ query.transpose(-2, -1)).softmax(-1), 0.1)
        mixed: Tensor = weights @ self.value(x)
        return mixed


def record(directory: Path, rank: int = 0) -> RunRecord:
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    description = blank_registration("advice")
    description["environment"] = {"rank": str(rank), "world_size": "2"}
    run = Run(settings_from(mode="offline", directory=directory), description)
    run.watch(model, optimizer)
    batches = iter(DataLoader(TensorDataset(torch.ones(STEPS, 64, 16))))
    for _ in range(STEPS):
        with run.step():
            model(*next(batches)).sum().backward()
            optimizer.step()
    assert run.finish().errors == 0
    return read_spools(directory)


def environments(directory: Path) -> dict[str, dict[str, Any]]:
    """The environment in the latest registration of each rank."""
    latest: dict[str, dict[str, Any]] = {}
    for folder in find_spools(directory):
        spool, position = Spool(folder), 0
        while (entry := spool.read(position)) is not None:
            position = entry.end
            if entry.kind is RecordKind.REGISTRATION:
                environment = load_json(entry.payload)["environment"]
                latest[environment["rank"]] = environment
        spool.close()
    return latest


def test_it_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Torch counts the graphs of the process, and other tests compile some.
    torch._dynamo.utils.counters.clear()
    recorded = record(tmp_path)
    facts = recorded.first.facts
    assert facts["loader"] == {"workers": 0, "pinned": False, "persistent": False}
    assert facts["attention"]["written_out"] == 1 and facts["attention"]["bytes"] == 64 * 64 * 4
    (product,) = facts["products"]
    assert product == {"precision": "fp32", "in": 16, "out": 16, "layer": "query", "share": 1.0}
    assert facts["steps"] == STEPS and not facts["compiled"] and "copies" not in facts
    assert len(recorded.first.seconds) == STEPS - 5 and recorded.first.share("forward") > 0
    advice = environments(tmp_path)["0"]["advice"]
    assert advice["steps"] == STEPS - 5 and advice["step_seconds"] > 0
    assert all(set(entry) >= {"practice", "evidence", "gain"} for entry in advice["findings"])
    assert main(["advise", str(tmp_path)]) == 0
    assert "steps of" in capsys.readouterr().out
    assert main(["advise", str(tmp_path), "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), list)
    second = record(tmp_path, rank=1)
    # The run's page has the advice of its first rank.
    assert "advice" not in environments(tmp_path)["1"]
    assert [one.rank for one in second.ranks] == [0, 1] and second.world_size == 2
    with pytest.raises(SeveralRunsError):
        record(tmp_path)


def test_a_folder_without_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NothingRecordedError):
        read_spools(tmp_path)
    assert main(["advise", str(tmp_path)]) == 1
    assert "no step of a run is recorded" in capsys.readouterr().err


def test_the_reason_of_a_graph_break_is_one_line() -> None:
    item = (
        "Failed to handle graph break gracefully. Graph break\n\nUnsupported Tensor.item() call\n"
        "  Explanation: Dynamo does not\n  Developer debug context: item ()\n\nUser code traceback:\n"
        "  File fp8scope.cli.main"
    )
    ours = "Skipped\n  Explanation: x\n  Developer debug context: module: fp8scope_kernels.observers"
    assert break_reason(item) == "Unsupported Tensor.item() call"
    assert break_reason("Data-dependent branching") == "Data-dependent branching"
    assert break_reason(ours) == ""
