"""The arguments that rule out fused attention, as torch itself chooses on the CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fp8scope
from fp8scope.advice.checks.arithmetic import OBSTACLES
from fp8scope.observe.timing.flops import FlopCounter
from fp8scope.observe.timing.unfused_attention import CHANGES, obstacles


def inputs(features: int = 16, *, gradient: bool = True) -> list[Tensor]:
    return [torch.randn(2, 4, 64, features, requires_grad=gradient) for _ in range(3)]


def transposed(x: Tensor) -> Tensor:
    """The same values, with adjacent positions instead of features."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"attn_mask": torch.zeros(2, 1, 64, 64)},
        {"attn_mask": torch.ones(64, 64, dtype=torch.bool)},
        {"scale": 0.5},
    ],
)
def test_nothing_rules_out_a_fused_call(options: dict[str, Any]) -> None:
    assert obstacles(inputs(), options) == ()


def test_each_argument_is_named() -> None:
    query, key, value = inputs()
    mask = torch.zeros(2, 1, 64, 64)
    assert obstacles((query, key, value), {"dropout_p": 0.1}) == ("dropout_p",)
    assert obstacles((query, key, value, None, 0.1), {}) == ("dropout_p",)
    assert obstacles((query, key, value), {"attn_mask": mask.clone().requires_grad_()}) == ("trained_mask",)
    assert obstacles((query, key, value), {"attn_mask": mask[:1, 0]}) == ("attn_mask",)
    assert obstacles((query[0], key[0], value[0]), {}) == ("dimensions",)
    assert obstacles([transposed(x) for x in (query, key, value)], {}) == ("layout",)
    assert obstacles((query, key, value[..., :8].contiguous()), {}) == ("value_features",)
    assert obstacles((), {"query": query, "key": key, "value": value, "dropout_p": 0.5}) == ("dropout_p",)


def test_several_that_have_to_change_together() -> None:
    query, key, value = inputs()
    trained = torch.zeros(2, 1, 64, 64, requires_grad=True)
    call = {"dropout_p": 0.1, "attn_mask": trained}
    assert obstacles((query, key, value), call) == ("dropout_p", "trained_mask")
    # A mask that fused kernels take is not among them.
    call["attn_mask"] = trained.detach()
    assert obstacles((query, key, value), call) == ("dropout_p",)


def test_a_kernel_that_the_script_forbids() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert obstacles(inputs(), {}) == ("sdpa_kernel",)
        assert obstacles(inputs(), {"dropout_p": 0.1}) == ("sdpa_kernel",)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((1, 2, 3), {}),
        ((torch.ones(2, 2),), {"key": None}),
        (inputs(), {"unknown": 1}),
        (inputs(), {"attn_mask": "causal"}),
        ([torch.ones(0)] * 3, {}),
        ([torch.empty(2, 4, 64, 16, device="meta")] * 3, {"dropout_p": 0.1}),
    ],
)
def test_calls_that_torch_refuses_have_none(args: Any, kwargs: dict[str, Any]) -> None:
    assert isinstance(obstacles(args, kwargs), tuple)


def test_every_obstacle_has_an_advice() -> None:
    assert OBSTACLES.keys() == {*CHANGES, "sdpa_kernel"}


def test_asking_changes_neither_the_arguments_nor_the_random_state() -> None:
    query, key, value = (transposed(x.detach()).requires_grad_() for x in inputs())
    copies = [x.clone() for x in (query, key, value)]
    state = torch.get_rng_state()
    obstacles((query, key, value), {"dropout_p": 0.1})
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, copy) for x, copy in zip((query, key, value), copies, strict=True))
    assert query.grad is None and query.is_leaf


class Block(nn.Module):
    """Attention with dropout, as many scripts write it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.project = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.project(x).chunk(3, -1)
        )
        return F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout).mean()


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_advice_of_a_run_names_the_argument(dropout: float, tmp_path: Path) -> None:
    model = Block(dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fp8scope.init(name="attention", mode="offline", directory=str(tmp_path), console="off") as run:
        run.watch(model, optimizer)
        for _ in range(3):
            with run.step():
                optimizer.zero_grad()
                model(torch.randn(2, 64, 32)).backward()
                optimizer.step()
        facts = run.session.steps.measures.facts()
    expected = {"dropout_p": 1} if dropout else {}
    assert facts["attention"]["unfused"] == expected
    assert facts["attention"]["fused"] == (not dropout)


def test_a_counter_alone_replaces_nothing() -> None:
    original = F.scaled_dot_product_attention
    with FlopCounter() as counter:
        assert F.scaled_dot_product_attention is original
        query, key, value = inputs()
        F.scaled_dot_product_attention(query, key, value, dropout_p=0.1)
    assert counter.unfused == {} and F.scaled_dot_product_attention is original
    assert re.fullmatch(r"[a-z_]+", "_".join(CHANGES))
