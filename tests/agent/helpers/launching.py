"""`fp8scope run` in the test's own process, which spares it the imports."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from agent.helpers.wire_server import WireServer
from torch.optim import Optimizer

from fp8scope.cli import main as cli
from fp8scope.process.open_runs import live_runs

SCRIPTS = Path(__file__).parents[1] / "programs"
Launch = Callable[..., int]


def own_settings(server: WireServer) -> dict[str, str]:
    """What a process needs to record to `server`."""
    return {"FP8SCOPE_URL": server.url, "FP8SCOPE_TOKEN": server.token, "FP8SCOPE_INTERVAL": "0.05"}


@pytest.fixture
def here(server: WireServer, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Runs `fp8scope run ARGUMENTS` and finishes the run; afterwards all is as it was before."""
    for name, value in own_settings(server).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    # What is set to what it is will be set back.
    monkeypatch.setattr(Optimizer, "__init__", Optimizer.__init__)
    monkeypatch.setattr(torch, "compile", torch.compile)

    def run_here(*arguments: str | Path) -> int:
        status = cli.main(["run", *map(str, arguments)])
        for run in list(live_runs):
            run.finish()
        return status

    return run_here
