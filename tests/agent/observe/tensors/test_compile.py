"""Watching a compiled model breaks nothing and records the same statistics."""

from typing import Any

import pytest
import torch
from agent.helpers.watching import NUMEL, Watched
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8scope_kernels import CurrentScaling, DelayedScaling, convert


def make(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    if kind == "fp8":
        convert(model, DelayedScaling())
    elif kind == "torchao":
        config = Float8LinearConfig.from_recipe_name("rowwise")
        object.__setattr__(config, "emulate", True)
        convert_to_float8_training(model, config=config)
    return model, {"shadow": CurrentScaling()} if kind == "shadow" else {}


@pytest.mark.parametrize("kind", ["fp8", "torchao", "shadow"])
def test_it_works(kind: str) -> None:
    x = torch.randn(8, 32)
    rows, losses = [], []
    for compiled in (False, True):
        torch._dynamo.reset()
        model, how = make(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        runs = torch.compile(model, backend="aot_eager") if compiled else model
        watched = Watched(runs, optimizer, every=2, **how)  # type: ignore[arg-type]
        seen = []

        def work() -> None:
            loss = runs(x).square().mean()  # noqa: B023
            loss.backward()
            optimizer.step()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023
            losses.append(float(loss.detach()))

        for _ in range(3):
            step = watched.step(work)
            seen.append({name: step.row(name) for name in watched.names})
        rows.append(seen)
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-5)
    for plain, other in zip(*rows, strict=True):
        assert plain.keys() == other.keys()
        for name, row in plain.items():
            assert row[NUMEL] == other[name][NUMEL], name
            assert torch.allclose(
                torch.tensor(row[:3]), torch.tensor(other[name][:3]), rtol=1e-4, equal_nan=True
            ), name
