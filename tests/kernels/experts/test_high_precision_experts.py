"""Experts in high precision: counted at the products of their module, which computes what it did."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernels.helpers.experts import EXPERTS, HIDDEN, MODELS, TOKENS, WIDTH, Block, run, train
from torch import Tensor, nn
from torch import distributed as dist
from torch._C import _len_torch_function_stack
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from fp8scope_kernels import (
    STATISTICS,
    CurrentScaling,
    StatisticsBuffer,
    convert,
    experts_in_high_precision,
    observe,
    unobserve,
)
from fp8scope_kernels.experts.followed_weights import FollowedWeights
from fp8scope_kernels.recipes import ROLES

NUMEL, AMAX, NONFINITE = (STATISTICS.index(name) for name in ("numel", "amax", "nonfinite"))
WAYS = ("grouped_mm", "loop", "bmm")
WEIGHTS = ("w1", "w2", "w3")
EXPERT_ROWS = [f"experts.{weight}.{role}" for weight in WEIGHTS for role in ROLES]


def observed(model: nn.Module) -> StatisticsBuffer:
    buffer = StatisticsBuffer()
    observe(model, buffer)
    return buffer


def rows_of(buffer: StatisticsBuffer) -> dict[str, Tensor]:
    return {info.name: row for info, row in zip(buffer.catalogue, buffer.data, strict=True)}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("implementation", ("grouped_mm", "eager", "batched_mm"))
def test_it_works(make: Callable[[], Any], implementation: str, one_thread: None) -> None:
    torch.manual_seed(0)
    model = make()
    model.set_experts_implementation(implementation)
    plain, fp8 = copy.deepcopy(model), copy.deepcopy(model)
    convert(fp8, CurrentScaling(), include="*.experts")
    rows, converted = observed(model), observed(fp8)
    own, exact = train(model), train(plain)
    train(fp8)
    assert all(torch.equal(own[name], exact[name]) for name in exact)
    assert not _len_torch_function_stack()
    mine, theirs = rows_of(rows), rows_of(converted)
    path = "model.layers.0.mlp.experts"
    names = [f"{path}.{weight}.{role}" for weight in ("gate_up_proj", "down_proj") for role in ROLES]
    assert set(names) <= set(mine) and set(names) <= set(theirs)
    # Without a bias or a gate before them, both runs see the same input.
    first = f"{path}.gate_up_proj.input"
    assert mine[first][NUMEL] == theirs[first][NUMEL] == 2 * TOKENS.numel() * WIDTH
    assert mine[first][AMAX] == theirs[first][AMAX]
    experts = model.get_submodule(path)
    for weight in ("gate_up_proj", "down_proj"):
        assert mine[f"{path}.{weight}.weight"][AMAX] == experts.get_parameter(weight).detach().abs().max()
    for name in names:
        assert mine[name][AMAX] == pytest.approx(float(theirs[name][AMAX]), rel=0.2), name
        assert mine[name][NONFINITE] == 0


@pytest.mark.parametrize("way", WAYS)
def test_experts_by_torchs_own_products(way: str) -> None:
    block, plain = Block(way), Block(way)
    assert [path for path, _ in experts_in_high_precision(block)] == ["experts"]
    buffer = observed(block)
    assert [info.name for info in buffer.catalogue] == EXPERT_ROWS
    own, exact = run(block), run(plain)
    assert all(torch.equal(own[name], exact[name]) for name in exact)
    rows = rows_of(buffer)
    for weight in WEIGHTS:
        parameter = block.experts.get_parameter(weight).detach()
        assert rows[f"experts.{weight}.weight"][NUMEL] == EXPERTS * WIDTH * HIDDEN
        assert rows[f"experts.{weight}.weight"][AMAX] == pytest.approx(
            float(parameter.abs().max()), rel=2**-8
        )
        assert rows[f"experts.{weight}.grad_output"][AMAX] > 0
    tokens = rows["experts.w1.input"][NUMEL] / WIDTH
    assert tokens == rows["experts.w2.input"][NUMEL] / HIDDEN == rows["experts.w2.grad_output"][NUMEL] / WIDTH


def test_values_that_are_not_finite_are_counted() -> None:
    block = Block("loop")
    buffer = observed(block)
    with torch.no_grad():
        block.experts.w2[1, 3, 5] = torch.inf
    run(block)
    assert rows_of(buffer)["experts.w2.weight"][NONFINITE] == 1


def test_nothing_is_followed_in_other_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block("loop")
    buffer = observed(block)
    followed: list[FollowedWeights] = []
    enter: Any = FollowedWeights.__enter__

    def noted(self: FollowedWeights) -> object:
        followed.append(self)
        return enter(self)

    monkeypatch.setattr(FollowedWeights, "__enter__", noted)
    buffer.pace.observing = False
    run(block)
    assert not followed and not buffer.data.any()
    buffer.pace.observing = True
    block.eval()
    run(block)
    assert not followed and not buffer.data.any()
    block.train()
    run(block)
    assert len(followed) == 1 and buffer.data[:, NUMEL].all()
    assert buffer.pace.calls and buffer.pace.seconds > 0.0


def test_an_exception_ends_the_following() -> None:
    block = Block("loop")
    buffer = observed(block)
    with pytest.raises(RuntimeError, match="shape"):
        block(torch.randn(40, WIDTH + 1), torch.tensor((10, 10, 10, 10)))
    assert not _len_torch_function_stack()
    buffer.zero_()
    run(block)
    assert rows_of(buffer)["experts.w1.weight"][NUMEL] == EXPERTS * WIDTH * HIDDEN
    assert not _len_torch_function_stack()


class Checkpointed(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.experts, *args, use_reentrant=False)


@pytest.mark.parametrize("way", WAYS)
def test_recomputed_products_are_counted_once(way: str) -> None:
    block, plain = Block(way), Block(way)
    block.add_module("experts", Checkpointed(block.experts))
    rows, alone = observed(block), observed(plain)
    own, exact = run(block), run(plain)
    assert torch.equal(own["x"], exact["x"])
    mine = rows_of(rows)
    for name, row in rows_of(alone).items():
        assert torch.equal(mine[name.replace("experts.", "experts.experts.")], row), name


def test_unobserve_removes_the_hooks() -> None:
    block = Block("loop")
    buffer = observed(block)
    observe(block, buffer)
    assert len(buffer) == len(EXPERT_ROWS)
    unobserve(block)
    assert not block.experts._forward_pre_hooks and not block.experts._forward_hooks
    assert not block.experts._forward_hooks_always_called
    run(block)
    assert not buffer.data.any()


def test_copies_are_not_counted() -> None:
    block = Block("loop")
    buffer = observed(block)
    run(copy.deepcopy(block))
    assert not buffer.data.any()


def test_a_compiled_model_is_not_counted() -> None:
    block = Block("bmm")
    buffer = observed(block)
    exact = run(Block("bmm"))
    block.compile(backend="eager")
    own = run(block)
    torch.testing.assert_close(own["output"], exact["output"])
    assert not buffer.data.any()
    assert not _len_torch_function_stack()


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("first", ("shard", "observe"))
def test_sharded_experts(first: str, one_rank: None) -> None:
    block, plain = Block("loop"), Block("loop")
    alone = rows_of(observed(plain))
    run(plain)
    if first == "shard":
        fully_shard(block.experts)
        rows = observed(block)
    else:
        rows = observed(block)
        fully_shard(block.experts)
    run(block)
    for name, row in rows_of(rows).items():
        assert torch.equal(row, alone[name]), name
