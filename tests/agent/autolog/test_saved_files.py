"""What a watched script saves is, byte for byte, what the script alone saves."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from agent.helpers.launching import SCRIPTS
from agent.helpers.scripts import environment
from agent.helpers.wire_server import WireServer

import fp8scope

ALONE = (sys.executable,)
UNDER_RUN = (sys.executable, "-m", "fp8scope", "run")


def printed(command: Sequence[str], saved: Path, **environ: str) -> tuple[str, bytes]:
    """What the script prints with exit status 0, and the file that it saves."""
    result = subprocess.run(
        [*command, str(SCRIPTS / "saves.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "SAVED": str(saved), **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert "not serialized" not in result.stderr
    return result.stdout, saved.read_bytes()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    return printed(ALONE, tmp_path_factory.mktemp("alone") / "model.pt", FP8SCOPE_ATTACH="")


@pytest.mark.parametrize("way", ["attach", "run"])
def test_it_works(way: str, alone: tuple[str, bytes], server: WireServer, tmp_path: Path) -> None:
    """Also by a script with hooks of its own, with a scaler and a scheduler, and exported or scripted."""
    environ = environment(server, tmp_path, FP8SCOPE_ATTACH="1" if way == "attach" else "")
    output, file = printed(ALONE if way == "attach" else UNDER_RUN, tmp_path / "model.pt", **environ)
    assert output.splitlines() == alone[0].splitlines()
    assert b"fp8scope" not in file and file == alone[1]
    assert server.run.steps[:4] == [1, 2, 3, 4] and server.run.finish["errors"] == 0


def test_a_copy_has_the_hooks_of_the_script_only(tmp_path: Path) -> None:
    """And what the script does with handles and tables of hooks still works."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    calls: list[str] = []
    before = model.register_forward_hook(lambda *_: calls.append("before"))
    run = fp8scope.attach(
        model, torch.optim.SGD(model.parameters()), mode="offline", directory=tmp_path / "spool"
    )
    model.register_forward_hook(lambda *_: calls.append("after"))
    model(torch.ones(2, 4)).sum().backward()
    assert calls == ["before", "after"]
    before.remove()
    model(torch.ones(2, 4))
    assert calls == ["before", "after", "after"]
    run.finish()
    assert len(model._forward_hooks) == 1 and not model[0]._forward_hooks


def test_a_weights_only_load_reads_it(tmp_path: Path) -> None:
    """The pickle names nothing but torch's own classes."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 1))
    run = fp8scope.attach(
        model, torch.optim.SGD(model.parameters()), mode="offline", directory=tmp_path / "spool"
    )
    torch.save(model, tmp_path / "model.pt")
    with torch.serialization.safe_globals([torch.nn.Sequential, torch.nn.Linear]):
        loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    run.finish()
    assert torch.equal(loaded(torch.ones(1, 4)), model(torch.ones(1, 4)))
