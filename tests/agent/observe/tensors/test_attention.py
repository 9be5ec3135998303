"""The bound of attention logits in sampled steps."""

import gc
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from agent.helpers.watching import NUMEL, Watched
from torch import Tensor, nn
from torch.nn import functional

from fp8scope.observe.tensors.attention import logit_bound

ORIGINAL = functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """No collector of another test listens, and none of this test is left."""
    gc.collect()
    yield
    assert functional.scaled_dot_product_attention is ORIGINAL


class Attention(nn.Module):
    """Self-attention of two heads."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)
        self.out = nn.Linear(16, 16)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, 16))
        return out


class Model(nn.Module):
    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Attention(scale) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def train(model: nn.Module, x: Tensor) -> None:
    model(x).float().square().mean().backward()


def logits_of(block: Attention, x: Tensor) -> Tensor:
    q, k, _ = block.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
    logits: Tensor = (q @ k.transpose(-1, -2)).abs() * (8**-0.5 if block.scale is None else block.scale)
    return logits


@pytest.mark.parametrize("scale", [None, 0.5])
def test_it_works(scale: float | None) -> None:
    model = Model(scale)
    watched = Watched(model, every=2)
    x = torch.randn(3, 5, 16)
    steps = [watched.step(partial(train, model, x)) for _ in range(3)]
    # The rows appear with the first call; they are not counted as tensors.
    assert watched.tensors == 12 and watched.names[12:] == ["blocks.0.logits", "blocks.1.logits"]
    first = model.blocks[0]
    assert isinstance(first, Attention)
    largest = float(logits_of(first, x).detach().max())
    for index, step in enumerate(steps):
        if index % 2:
            assert step.row("blocks.0.logits")[NUMEL] == 0
            continue
        assert largest <= step.extra("logit_bound", "blocks.0.logits") <= 4 * largest
        row = step.row("blocks.0.logits")
        assert row[NUMEL] == 3 * 2 * 5 * 5 and np.isnan(row[NUMEL + 1 :]).all()
    watched.collector.close()
    assert functional.scaled_dot_product_attention is ORIGINAL


def test_a_bound_is_never_below_a_logit() -> None:
    generator = torch.Generator().manual_seed(0)
    for heads, key_heads in ((4, 4), (4, 2), (4, 1)):
        q = torch.randn(2, heads, 7, 8, generator=generator)
        k = torch.randn(2, key_heads, 9, 8, generator=generator)
        wide = k.repeat_interleave(heads // key_heads, -3)
        largest = (q @ wide.transpose(-1, -2)).abs().max() * 8**-0.5
        assert largest <= logit_bound(q, k) < 4 * largest
    # Reached where a query and a key are parallel; half types do not overflow.
    q = torch.zeros(1, 1, 2, 4, dtype=torch.float16)
    q[0, 0, 1, 2] = 60_000
    assert logit_bound(q, q, scale=1.0) == pytest.approx(3.6e9, rel=1e-3)
    assert torch.isnan(logit_bound(q, q * torch.nan))


def test_of_several_calls_the_largest_counts_and_nan_does_not() -> None:
    model = Model()
    watched = Watched(model)
    x = torch.randn(3, 5, 16)

    def accumulate() -> None:
        for factor in (1.0, 10.0, torch.nan):
            train(model, factor * x)

    loud = watched.step(accumulate)
    calm = watched.step(partial(train, model, x))
    name = "blocks.0.logits"
    assert loud.extra("logit_bound", name) == pytest.approx(100 * calm.extra("logit_bound", name), rel=1e-5)
    watched.collector.close()


def test_evaluations_and_other_models_do_not_count() -> None:
    model, other = Model(), Model()
    watched = Watched(model)

    def work() -> None:
        train(model, torch.ones(1, 2, 16))
        other(torch.full((1, 2, 16), 1e3))
        model.eval()
        model(torch.full((1, 2, 16), 1e3))
        model.train()

    assert watched.step(work).extra("logit_bound", "blocks.0.logits") < 1e3
    watched.collector.close()


def test_keyword_arguments_and_multi_head_attention() -> None:
    layer = nn.MultiheadAttention(16, 2, batch_first=True)
    model = nn.Sequential(nn.Linear(16, 16), nn.Identity())
    model[1].attention = layer
    watched = Watched(model)
    x = torch.randn(2, 3, 16)

    def work() -> None:
        hidden = model[0](x)
        layer(hidden, hidden, hidden, need_weights=False)[0].sum().backward()
        q = torch.ones(1, 2, 4)
        functional.scaled_dot_product_attention(query=q, key=3 * q, value=q)

    step = watched.step(work)
    # Called by no submodule of an observed layer's: the row has the name of the root.
    assert step.extra("logit_bound", "logits") >= 6.0
    watched.collector.close()


def test_scripted_and_compiled_code_keeps_working() -> None:
    model = Model()
    watched = Watched(model)

    def attend(q: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    q = torch.randn(1, 2, 3, 4)
    assert torch.equal(torch.jit.script(attend)(q), ORIGINAL(q, q, q))
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    watched.step(lambda: compiled(q))
    assert torch.equal(compiled(q), ORIGINAL(q, q, q))
    watched.collector.close()


def test_two_runs_listen_and_the_last_one_restores() -> None:
    first, second = Watched(Model()), Watched(Model())
    first.collector.close()
    assert functional.scaled_dot_product_attention is not ORIGINAL
    second.collector.close()
    assert functional.scaled_dot_product_attention is ORIGINAL


def test_what_a_model_hands_over() -> None:
    watched = Watched(nn.Sequential(nn.Linear(16, 16)))
    q = torch.ones(1, 2, 4)
    step = watched.step(lambda: watched.collector.note_attention("blocks.0", q, 3 * q, None))
    assert step.extra("logit_bound", "blocks.0.logits") == pytest.approx(6.0)
    watched.collector.close()
