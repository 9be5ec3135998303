"""A small training with everything in it that a step may change, and BF16 reference windows over it."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import fp8scope
from fp8scope.config import Settings
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run
from fp8scope_kernels import fp8_layers

STEPS = 24
EVERY, WINDOW = 8, 4


class Model(nn.Module):
    """With everything that a step may change: dropout, running statistics, scales, a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.norm = nn.BatchNorm1d(64)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(64, 32)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        noise = random.random() + float(np.random.rand())
        y: torch.Tensor = self.down(self.dropout(self.norm(self.up(x)))) * (1 + 0.01 * noise)
        return y


class Training:
    """One training as a script would have it, each part of its state included."""

    def __init__(self, optimizer: Callable[[Any], torch.optim.Optimizer] | None = None) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = Model()
        fp8scope.convert(self.model, fp8scope.DelayedScaling(history_length=4))
        make = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
        self.optimizer = make(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)
        self.seen: list[torch.Tensor] = []

    def batches(self, count: int = STEPS) -> Iterator[torch.Tensor]:
        """Drawn while training, from the same random numbers as dropout's; into the same memory again."""
        memory = torch.empty(16, 32)
        for _ in range(count):
            yield memory.normal_()

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = (self.model(batch) - batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        detached: torch.Tensor = loss.detach()
        return detached

    def state(self) -> list[torch.Tensor]:
        """Every number that the next step depends on."""
        scaling = [
            torch.as_tensor(state.calls).double()
            for _, layer in fp8_layers(self.model)
            for state in layer.scaling.values()
        ]
        tensors = [value for values in self.optimizer.state.values() for value in values.values()]
        rate = torch.as_tensor(self.optimizer.param_groups[0]["lr"])
        numbers = [torch.as_tensor(value) for value in tensors]
        return [
            *[one.detach().clone() for one in (*self.model.parameters(), *self.model.buffers())],
            *scaling, *[one.clone() for one in numbers], rate,
            torch.tensor(self.model.calls), torch.get_rng_state(),
            torch.tensor(random.random()), torch.tensor(float(np.random.rand())),
        ]  # fmt: skip


def explicit(training: Training, run: Run, train_step: Any) -> list[torch.Tensor]:
    losses = []
    for batch in training.batches():
        with run.step(tokens=16) as step:
            losses.append(train_step(batch))
            step.log(loss=losses[-1])
    return losses


def begin(settings: Settings) -> Run:
    return Run(settings, blank_registration("reference"))


def plain(settings: Settings) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    training = Training()
    losses = [training.step(batch) for batch in training.batches()]
    return losses, training.state()


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(left, right) for left, right in zip(a, b, strict=True))


def window(run: Run, training: Training, **more: Any) -> Any:
    arguments = {"every": EVERY, "steps": WINDOW, "scheduler": training.scheduler, **more}
    return run.reference_window(training.step, training.model, training.optimizer, **arguments)
