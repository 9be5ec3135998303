"""`keep_weights`: a weight is quantised once for the calls of a block, with the results of separate calls."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernels.helpers.gpt import Gpt, some_words
from torch import Tensor, nn
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from fp8scope_kernels import (
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Linear,
    Recipe,
    RowwiseScaling,
    StatisticsBuffer,
    convert,
    fp8_layers,
    keep_weights,
    observe,
    revert,
)

RECIPES: tuple[Recipe, ...] = (
    *(DelayedScaling(), CurrentScaling(), CurrentScaling(stochastic_gradients=True)),
    *(RowwiseScaling(), BlockScaling(), BlockScaling(power_of_two=False), MXFP8(), NVFP4()),
)
recipes = pytest.mark.parametrize("recipe", RECIPES, ids=str)
MICRO_BATCHES = 4
SIZE = 32


def make_gpt(recipe: Recipe) -> tuple[Gpt, StatisticsBuffer]:
    torch.manual_seed(0)
    model, buffer = Gpt(layers=1), StatisticsBuffer()
    convert(model, recipe)
    observe(model, buffer)
    return model, buffer


def accumulate(call: Callable[[Tensor], Tensor], first: int = 0) -> list[float]:
    """The losses of a step's micro-batches, after their backward passes."""
    losses = []
    for seed in range(first, first + MICRO_BATCHES):
        loss = call(some_words(seed))
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
    return losses


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def weight_rows(buffer: StatisticsBuffer) -> list[int]:
    return [index for index, tensor in enumerate(buffer.catalogue) if tensor.role == "weight"]


def make_layer(recipe: Recipe | None = None) -> Any:
    torch.manual_seed(0)
    return Fp8Linear(SIZE, SIZE, recipe=recipe or CurrentScaling())


def count_elements(layer: Any) -> Tensor:
    """A row of statistics for the layer's weight; its first number counts the elements quantised."""
    buffer = StatisticsBuffer()
    observe(nn.ModuleDict({"layer": layer}), buffer)
    row: Tensor = layer.slots["weight"].row
    return row


@recipes
def test_it_works(recipe: Recipe) -> None:
    """One quantisation for four micro-batches; the bits of four, where a scale has no history."""
    (model, buffer), (other, others) = make_gpt(recipe), make_gpt(recipe)
    for step in range(2):
        with keep_weights(model):
            shared = accumulate(model, first=10 * step)
        separate = accumulate(other, first=10 * step)
        if not isinstance(recipe, DelayedScaling):
            assert shared == separate
            for gradient, expected in zip(gradients(model), gradients(other), strict=True):
                assert torch.equal(gradient, expected)
    statistics, expected = buffer.data.clone(), others.data.clone()
    weights = weight_rows(buffer)
    assert torch.equal(statistics[weights, 0] * MICRO_BATCHES, expected[weights, 0])
    assert torch.equal(statistics[weights, 1], expected[weights, 1])
    if not isinstance(recipe, DelayedScaling):
        rest = [index for index in range(len(buffer.catalogue)) if index not in weights]
        assert torch.equal(statistics[rest], expected[rest])
        counters = [3, 4, 5, 6]
        assert torch.equal(statistics[weights][:, counters] * MICRO_BATCHES, expected[weights][:, counters])


def test_a_delayed_scale_advances_once_in_a_block() -> None:
    layer, x = make_layer(DelayedScaling(history_length=4)), torch.randn(SIZE, SIZE)
    state = layer.state_of("weight")
    with keep_weights(layer):
        layer(x)
        scale = state.scale.clone()
        with torch.no_grad():
            layer(x)
    assert state.calls == 1
    assert state.scale == scale
    layer(x)
    assert state.calls == 2
    assert layer.state_of("input").calls == 3


def step_of_sgd(layer: Any) -> None:
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(layer.parameters(), lr=0.1).step()


def step_behind_the_version(layer: Any) -> None:
    """As FSDP2 refills the tensors of weights."""
    with torch.autograd._unsafe_preserve_version_counter(layer.weight):  # type: ignore[attr-defined]
        step_of_sgd(layer)


def edit_in_place(layer: Any) -> None:
    with torch.no_grad():
        layer.weight.mul_(1.5)


def load(layer: Any) -> None:
    layer.load_state_dict(make_layer().state_dict() | {"weight": torch.randn(SIZE, SIZE)})


def replace(layer: Any) -> None:
    layer.weight = nn.Parameter(torch.randn(SIZE, SIZE).bfloat16())


@pytest.mark.parametrize("change", [step_of_sgd, step_behind_the_version, edit_in_place, load, replace])
def test_a_weight_that_changes_is_quantised_again(change: Callable[[Any], None]) -> None:
    layer, x = make_layer(), torch.randn(SIZE, SIZE)
    with keep_weights(layer):
        before = layer(x)
        change(layer)
        after = layer(x)
    assert not torch.equal(before, after)
    assert torch.equal(after, layer(x))


@recipes
def test_evaluation_then_training_counts_once_and_turns_the_weight(recipe: Recipe) -> None:
    layer, x = make_layer(recipe), torch.randn(SIZE, SIZE, requires_grad=True)
    row = count_elements(layer)
    with keep_weights(layer):
        with torch.no_grad():
            layer.eval()(x)
            assert row[0] == 0
            layer.train()(x)
        for _ in range(2):
            x.grad = None
            layer(x).sum().backward()
    assert row[0] == SIZE * SIZE
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    assert x.grad is not None and torch.equal(expected, x.grad)


def test_in_a_graph() -> None:
    torch.compiler.reset()
    (model, buffer), (other, others) = make_gpt(DelayedScaling()), make_gpt(DelayedScaling())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for step in range(2):
        with keep_weights(model):
            in_graph = accumulate(compiled, first=10 * step)
        with keep_weights(other):
            eager = accumulate(other, first=10 * step)
        assert in_graph == eager
    for gradient, expected in zip(gradients(model), gradients(other), strict=True):
        assert torch.equal(gradient, expected)
    assert torch.equal(buffer.data, others.data)


def test_a_compiled_backward_pass_does_not_own_what_it_saved() -> None:
    """A compiler may write into the tensors that a graph returns to be saved."""
    layer, x = make_layer(), torch.randn(SIZE, SIZE)
    weight = layer.weight.detach()
    settings = (*layer.operator_settings, torch.float32, True, True)
    with keep_weights(layer):
        for _ in range(2):
            passed = torch.ops.fp8scope.linear(x, weight, None, layer.number, layer.turn, *settings)
            assert passed[3].float().abs().sum() > 0
            passed[3].zero_()
            passed[4].zero_()


def test_with_activation_checkpointing() -> None:
    (model, _), (other, _) = make_gpt(DelayedScaling()), make_gpt(DelayedScaling())
    with keep_weights(model):
        recomputed = accumulate(lambda words: checkpoint(model, words, use_reentrant=False))
    with keep_weights(other):
        direct = accumulate(other)
    assert recomputed == direct
    for gradient, expected in zip(gradients(model), gradients(other), strict=True):
        assert torch.equal(gradient, expected)


def test_nothing_stays_after_the_block() -> None:
    model, _ = make_gpt(CurrentScaling())
    layers = [layer for _, layer in fp8_layers(model)]
    with pytest.raises(KeyError), keep_weights(model):
        model(some_words(0))
        with keep_weights(model):
            assert layers[0].kept_weight is not None
        assert layers[0].kept_weight is not None
        raise KeyError
    assert all(layer.kept_weight is None for layer in layers)


def test_copies_in_the_block_share_nothing() -> None:
    layer, x = make_layer(), torch.randn(SIZE, SIZE)
    with keep_weights(layer):
        expected = layer(x)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert other.kept_weight is None
            assert torch.equal(other(x), expected)
        assert not any("kept" in name for name in layer.state_dict())


def test_a_layer_can_be_reverted_in_the_block() -> None:
    layer = make_layer()
    with keep_weights(layer):
        layer(torch.randn(SIZE, SIZE))
        revert(layer)
        layer(torch.randn(SIZE, SIZE))
    assert type(layer) is nn.Linear
    assert "kept_weight" not in vars(layer)


def test_inference_tensors_are_quantised_at_each_call() -> None:
    with torch.inference_mode():
        layer, x = make_layer(), torch.randn(SIZE, SIZE)
        with keep_weights(layer):
            before = layer(x)
            layer.weight.copy_(torch.randn(SIZE, SIZE))
            assert not torch.equal(layer(x), before)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    yield
    dist.destroy_process_group()


def test_sharded_weights_are_kept_until_the_optimizer_steps(one_rank: None) -> None:
    (model, buffer), (other, _) = make_gpt(CurrentScaling()), make_gpt(CurrentScaling())
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, other)]
    with keep_weights(model):
        for step in range(2):
            assert accumulate(model, first=10 * step) == accumulate(other, first=10 * step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    (name, layer), *_ = fp8_layers(model)
    numel = layer.in_features * layer.out_features
    assert buffer.data[weight_rows(buffer)[0], 0] == 2 * numel, name


@pytest.mark.parametrize("recipe", [CurrentScaling(), RowwiseScaling()], ids=str)
def test_weights_of_tensor_parallel_layers(one_rank: None, recipe: Recipe) -> None:
    (model, buffer), (other, others) = make_gpt(recipe), make_gpt(recipe)
    mesh = init_device_mesh("cpu", (1,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in (*model.blocks, *other.blocks):
        assert isinstance(block, nn.Module)
        parallelize_module(block, mesh, plan)
    with keep_weights(model):
        shared = accumulate(model)
    assert shared == accumulate(other)
    weights = weight_rows(buffer)
    assert torch.equal(buffer.data[weights, 0] * MICRO_BATCHES, others.data[weights, 0])
