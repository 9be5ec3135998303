"""What `attach` costs steps of about a millisecond: a perceptron of three layers, Adam and clipping.

Two processes take blocks of steps in turns, one of them attached: within one process the unwatched model
would also pass through what the agent wraps. A block's time is CPU time, so that other work on the machine
disturbs little. A child is this file with `attached` or `alone` as its argument.
"""

import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import nn

BLOCK = 50
SETTLING = 300
"""Steps before the measured ones: the budget has settled then."""


class Learner:
    """A policy of the size that scripts of reinforcement learning train."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = (nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.inputs, self.targets = torch.randn(32, 8), torch.randn(32, 2)

    def train(self) -> torch.Tensor:
        """One step; returns its loss."""
        loss: torch.Tensor = (self.model(self.inputs) - self.targets).square().mean()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return loss


def child(attached: bool, url: str, directory: str) -> None:
    """Train a block for each line of standard input; print its CPU seconds: thread, process, and the loss."""
    torch.set_num_threads(1)
    learner = Learner()
    if attached:
        import fp8scope

        fp8scope.attach(
            learner.model, learner.optimizer, name="tiny", url=url, token="x", directory=directory
        )
    for _ in range(SETTLING):
        learner.train()
    print("ready", flush=True)
    for _ in sys.stdin:
        thread, process = time.thread_time(), time.process_time()
        for _ in range(BLOCK):
            loss = learner.train()
        print(time.thread_time() - thread, time.process_time() - process, loss.item(), flush=True)


def tiny_ratios(blocks: int, url: str, directory: str) -> dict[str, Any]:
    """`tiny_ratio` and `tiny_us`: of the training thread; `tiny_process_...`: with the agent's threads."""
    children = [
        subprocess.Popen(
            [sys.executable, __file__, kind, url, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for kind in ("alone", "attached")
    ]
    answers = [[_ask(process, None) for process in children]]
    answers = [[_ask(process, "go\n") for process in children] for _ in range(blocks)]
    for process in children:
        process.communicate()
    seconds = np.array(answers)
    assert (seconds[:, 0, 2] == seconds[:, 1, 2]).all(), "the losses differ"
    figures: dict[str, Any] = {}
    for column, name in enumerate(("tiny", "tiny_process")):
        alone, attached = seconds[:, 0, column], seconds[:, 1, column]
        figures[f"{name}_ratio"] = round(float(np.median(attached / alone)), 3)
        figures[f"{name}_us"] = round(float(np.median(attached - alone)) / BLOCK * 1e6, 1)
    figures["tiny_step_us"] = round(statistics.median(seconds[:, 0, 0]) / BLOCK * 1e6, 1)
    return figures


def _ask(process: "subprocess.Popen[str]", line: str | None) -> list[float]:
    assert process.stdin is not None and process.stdout is not None
    if line is not None:
        process.stdin.write(line)
        process.stdin.flush()
    answer = process.stdout.readline()
    return [] if line is None else [float(value) for value in answer.split()]


if __name__ == "__main__":
    child(sys.argv[1] == "attached", *sys.argv[2:])
