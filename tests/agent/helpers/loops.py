"""Training loops that know nothing of fp8scope, for tests of what is found out about them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

VOCABULARY = 96


class TinyLm(nn.Module):
    """Token ids [batch, time] to logits [batch, time, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embed(input_ids)))
        return logits


def regression() -> tuple[nn.Module, Optimizer]:
    """A model of 32 features to 32, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def language_model() -> tuple[TinyLm, Optimizer]:
    torch.manual_seed(0)
    model = TinyLm()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(number: int, rows: int = 8) -> Tensor:
    """Features, float32 [rows, 32], the same for the same number."""
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(number))


def update(optimizer: Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def squares(model: Callable[[Tensor], Tensor], number: int) -> Tensor:
    """A loss to be differentiated."""
    x = batch(number)
    return (model(x) - x).square().mean()


def lm_loss(model: Callable[[Tensor], Tensor], number: int, rows: int = 4, time: int = 9) -> Tensor:
    ids = torch.randint(0, VOCABULARY, (rows, time), generator=torch.Generator().manual_seed(number))
    logits = model(ids[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def train(
    model: Any, optimizer: Optimizer, steps: int, loss_of: Callable[..., Tensor] = squares
) -> list[float]:
    """The plainest of loops; returns the losses."""
    losses = []
    for number in range(steps):
        loss = loss_of(model, number)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
