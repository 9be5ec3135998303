"""What `attach` records of a script besides its steps, and what it does not say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from agent.helpers.launching import own_settings
from agent.helpers.wire_server import WireServer
from torch import Tensor, nn

import fp8scope

pytestmark = pytest.mark.usefixtures("online")

SCRIPT = """
import argparse, sys, time, torch, fp8scope
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--api-key", default="abcdefgh")
parser.add_argument("--rank", type=int, default=2)
parser.add_argument("--fail", action="store_true")

def main(options):
    options.run_name = f"x__{int(time.time())}"
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    run = fp8scope.attach(model, optimizer, name="script", seed=1)
    for _ in range(3):
        model(torch.ones(2, 4)).square().mean().mul(float("nan") if options.fail else 1.0).backward()
        optimizer.step()
    sys.exit(3)

main(parser.parse_args())
"""


def train(folder: Path, server: WireServer, *arguments: str) -> str:
    """Run SCRIPT, which ends with status 3; returns its standard error."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    env = {**os.environ, **own_settings(server), "FP8SCOPE_DIR": str(folder / "spool")}
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    return done.stderr


def test_it_works(server: WireServer, tmp_path: Path) -> None:
    """The parsed command line is the configuration; `sys.exit` after sound steps is no incident."""
    shown = train(tmp_path, server, "--lr", "0.5")
    config = server.run.registration["config"]
    assert config.pop("job").keys() == {"rank", "run_name"}
    assert config == {"lr": 0.5, "api_key": "[redacted]", "fail": False}
    assert server.run.finish["state"] == "failed"
    assert "incident" not in shown and "no FP8 layer" not in shown and "no configuration" not in shown


def test_the_replay_line_has_the_arguments(server: WireServer, tmp_path: Path) -> None:
    """`sys.exit` after losses that are not finite keeps an incident; its line can be run as it is."""
    shown = train(tmp_path, server, "--fail", "--lr", "0.25", "--api-key", "hunter22")
    (line,) = [line for line in shown.splitlines() if "fp8scope replay" in line]
    assert line.endswith(f"{tmp_path / 'train.py'} --fail --lr 0.25 --api-key '[redacted]'")


class Agent(nn.Module):
    """A model in the style of reinforcement learning: its parts are called, and it has no `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def get_action_and_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(x), self.critic(x)


def test_a_model_whose_parts_are_called_has_a_precision(server: WireServer) -> None:
    torch.manual_seed(0)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5)
    run = fp8scope.attach(agent, optimizer, name="ppo", config={"a": 1})
    for _ in range(4):
        action, value = agent.get_action_and_value(torch.randn(8, 4))
        optimizer.zero_grad()
        (action.square().mean() + value.square().mean()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert run.finish().errors == 0
    assert server.run.registration["precision"] == "fp32"
    # The first step shows that the model is not called.
    assert all((value or 0) > 0 for value in server.run.scalars("model_flops_per_second")[1:])
    assert not agent.actor._forward_hooks and not agent.critic._forward_pre_hooks


def test_says_that_no_configuration_is_recorded(server: WireServer, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4)
    fp8scope.attach(model, torch.optim.SGD(model.parameters())).finish()
    assert [text for text in caplog.messages if "no configuration is recorded" in text]
