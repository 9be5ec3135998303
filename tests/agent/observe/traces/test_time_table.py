"""The time of a traced step by layer and kind of operator, from real traces."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from agent.helpers.wire_server import WireServer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8scope.config import Settings
from fp8scope.observe.traces.layer_ranges import LayerRanges
from fp8scope.observe.traces.time_table import KINDS, PASSES, time_table
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run
from fp8scope_kernels import DelayedScaling, convert

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        output: Tensor = x + self.out(mixed)
        return output


class Model(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        output: Tensor = x
        return output


def in_fp8(model: nn.Module) -> nn.Module:
    convert(model, DelayedScaling())
    return model


def hooks_of(model: nn.Module) -> list[int]:
    return [key for module in model.modules() for key in (*module._forward_hooks, *module._forward_pre_hooks)]


def table_of(model: nn.Module, step: Callable[[], object]) -> dict[str, Any]:
    before = hooks_of(model)
    with torch.profiler.profile() as profile:
        ranges = LayerRanges([model])
        step()
        ranges.remove()
    assert hooks_of(model) == before
    return time_table(profile.events(), ranges.held)


def training(model: nn.Module) -> Callable[[], object]:
    tokens = torch.randint(0, 20, (4, 8), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


def rows(table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["path"]: row for row in table["layers"]}


def test_it_works() -> None:
    model = in_fp8(Model())
    table = table_of(model, training(model))
    by_path = rows(table)
    assert set(by_path) == {"embed", "blocks.*", "blocks.*.qkv", "blocks.*.out", "optimizer", ""}
    assert by_path["blocks.*.qkv"]["count"] == 3 and by_path["blocks.*.qkv"]["module"] == "Fp8Linear"
    for path in ("blocks.*.qkv", "blocks.*.out"):
        row = by_path[path]
        assert min(row[name] for name in ("forward", "backward", "products", "casts")) > 0
        assert row["recomputed"] == row["attention"] == 0
    assert by_path["blocks.*"]["attention"] > 0 and by_path["blocks.*"]["casts"] == 0
    assert by_path["optimizer"]["products"] == 0 < by_path["optimizer"]["other"]
    for row in table["layers"]:
        whole = sum(row[name] for name in KINDS)
        assert sum(row[name] for name in PASSES) == pytest.approx(whole, abs=1e-8)
    assert table["seconds"] == pytest.approx(sum(row[name] for row in table["layers"] for name in KINDS))
    assert table["device"] == "host"


def test_layers_in_high_precision_have_no_casts_and_keep_nothing() -> None:
    model = Model()
    table = table_of(model, training(model))
    assert all(row["casts"] == 0 for row in table["layers"]) and table["held"] == {}
    assert rows(table)["blocks.*.out"]["products"] > 0


def test_fp8_layers_tell_what_they_keep() -> None:
    """Exactly: the transposed operands of both products, as the backward pass reads them."""
    model = in_fp8(nn.Sequential(nn.Linear(32, 64)))
    x = torch.randn(16, 32)
    model(x)
    ((product, _),) = model(x).grad_fn.next_functions
    saved = [tensor for tensor in product.saved_tensors if tensor is not None]
    table = table_of(model, lambda: model(x))
    held = table["held"]
    assert held.pop("input") == x.nbytes
    assert held and sum(held.values()) == sum(tensor.nbytes for tensor in saved)


def test_recomputed_activations_are_a_pass_of_their_own() -> None:
    model = in_fp8(Model(recompute=True))
    table = table_of(model, training(model))
    row = rows(table)["blocks.*.qkv"]
    assert min(row[name] for name in PASSES) > 0
    # Reading what a checkpoint keeps would compute it again.
    assert table["held"] == {}


def test_a_module_that_raises_or_calls_itself_leaves_the_others_right() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            if again:
                self(x, again=False)
            raise ArithmeticError

    class Caught(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails, self.last = Fails(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(ArithmeticError):
                self.fails(x)
            output: Tensor = self.last(x)
            return output

    model = Caught()
    by_path = rows(table_of(model, lambda: model(torch.ones(2, 8)).sum().backward()))
    assert by_path["last"]["forward"] > 0 and by_path["last"]["backward"] > 0


def test_a_compiled_model_is_not_compiled_again() -> None:
    torch.compiler.reset()
    compiled: list[int] = []

    def backend(module: Any, inputs: Any) -> Any:
        compiled.append(1)
        return module.forward

    model = Block()
    model.compile(backend=backend)
    x = torch.ones(2, 4, WIDTH)
    model(x)
    table = table_of(model, lambda: model(x))
    model(x)
    assert compiled == [1] and set(rows(table)) == {""}


@pytest.fixture
def run(server: WireServer, settings: Settings) -> Iterator[Run]:
    # With a budget, steps this short would be light, and others would be traced.
    run = Run(replace(settings, overhead=None), blank_registration("traced"))
    yield run
    run.finish()


def test_the_run_sends_the_table_of_its_last_trace(server: WireServer, run: Run) -> None:
    model = in_fp8(Model())
    step, before = training(model), hooks_of(model)
    run.watch(model)
    run.trace_steps(1, 3)
    for _ in range(4):
        with run.step():
            step()
    assert run.finish().errors == 0
    document = server.run.registration["environment"]["step_times"]
    assert document["step"] == 3 and rows(document)["blocks.*.qkv"]["casts"] > 0
    assert hooks_of(model) == before


def test_a_gradient_of_a_gradient_is_as_without_a_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.ones(2, 4, requires_grad=True)

    def second() -> Tensor:
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    expected, traced = second(), []
    table_of(model, lambda: traced.append(second()))
    assert torch.equal(traced[0], expected)


def test_layers_of_torchao_have_casts_and_tell_what_they_keep() -> None:
    model = Model().bfloat16()
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    table = table_of(model, training(model))
    row = rows(table)["blocks.*.qkv"]
    assert row["module"] == "Float8Linear" and row["casts"] > row["products"] > 0
    # It keeps its input in high precision, and casts it in the backward pass.
    assert table["held"] == {"bfloat16": table["held"]["input"], "input": table["held"]["input"]}
