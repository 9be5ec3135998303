"""The load of the experts of a mixture in sampled steps."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from agent.helpers.watching import NUMEL, Watched
from torch import Tensor, nn

from fp8scope.observe.tensors.experts import load_shares


class Mixture(nn.Module):
    """Two of four experts for each token."""

    def __init__(self, name: str = "gate", choices: int = 2) -> None:
        super().__init__()
        self.name, self.top_k = name, choices
        self.add_module(name, nn.Linear(16, 4, bias=False))
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = getattr(self, self.name)(x).softmax(-1).topk(self.top_k)
        dense = torch.stack([expert(x) for expert in self.experts], -2)
        picked = dense.gather(-2, chosen[..., None].expand(*chosen.shape, 16))
        out: Tensor = (picked * weights[..., None]).sum(-2)
        return out


def model_of(name: str = "gate", choices: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Mixture(name, choices))


def train(model: nn.Module, x: Tensor) -> None:
    model(x).float().square().mean().backward()


def expected(model: nn.Sequential, x: Tensor) -> tuple[float, float]:
    """The largest share, and the imbalance."""
    mixture = model[1]
    assert isinstance(mixture, Mixture)
    scores = getattr(mixture, mixture.name)(model[0](x))
    counts = np.bincount(scores.topk(mixture.top_k).indices.numpy().ravel(), minlength=4)
    shares = counts / counts.sum()
    entropy = -sum(share * math.log(share) for share in shares if share)
    return float(shares.max()), 1.0 - entropy / math.log(4)


@pytest.mark.parametrize(("name", "choices"), [("gate", 2), ("router", 1)])
def test_it_works(name: str, choices: int) -> None:
    model = model_of(name, choices)
    watched = Watched(model, every=2)
    x = torch.randn(40, 16)
    steps = [watched.step(partial(train, model, x)) for _ in range(3)]
    share, imbalance = expected(model, x)
    for index, step in enumerate(steps):
        row = step.row("1.load")
        if index % 2:
            assert row[NUMEL] == 0
            continue
        assert row[NUMEL] == 40 * choices and np.isnan(row[NUMEL + 1 :]).all()
        assert step.extra("load_max", "1.load") == pytest.approx(share)
        assert step.extra("load_imbalance", "1.load") == pytest.approx(imbalance)


def test_the_extremes() -> None:
    even = torch.arange(12).reshape(3, 4) % 4
    assert load_shares(even, 4).tolist() == [0.25] * 4
    assert load_shares(torch.full((5,), 2, dtype=torch.int32), 4).tolist() == [0, 0, 1, 0]
    # Dropped tokens are often marked by -1.
    assert load_shares(torch.tensor([-1, 0, 7, 1]), 2).tolist() == [0.5, 0.5]
    assert torch.isnan(load_shares(torch.tensor([-1]), 2)).all()


def test_narrow_types_and_no_training() -> None:
    model = model_of().bfloat16()
    watched = Watched(model)
    x = torch.randn(40, 16).bfloat16()
    assert 0.25 <= watched.step(partial(train, model, x)).extra("load_max", "1.load") <= 0.5
    model.eval()
    assert watched.step(partial(train, model, x)).row("1.load")[NUMEL] == 0


def test_a_gate_without_experts_is_no_router() -> None:
    class Gated(nn.Module):
        """The gate of a SwiGLU."""

        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(16, 4), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = nn.functional.silu(self.gate(x)) * self.up(x)
            return out

    model = nn.Sequential(Gated())
    watched = Watched(model)
    watched.step(partial(train, model, torch.randn(4, 16)))
    assert not any(name.endswith("load") for name in watched.names)


def test_what_a_model_hands_over() -> None:
    watched = Watched(nn.Sequential(nn.Linear(16, 16)))
    chosen = torch.tensor([0, 0, 0, 1])
    step = watched.step(lambda: watched.collector.note_experts("blocks.3.moe", chosen, 8))
    assert step.extra("load_max", "blocks.3.moe.load") == 0.75
    for wrong in (1, 10**9):
        with pytest.raises(ValueError, match="experts, got"):
            watched.collector.begin(2)
            watched.collector.note_experts("blocks.3.moe", chosen, wrong)
    with pytest.raises(ValueError, match="must be integers"):
        watched.collector.note_experts("blocks.3.moe", chosen.float(), 8)
