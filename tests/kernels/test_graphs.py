"""Layers in graphs: torch.compile without graph breaks, make_fx, torch.export, FakeTensorMode, torch.func.

The `aot_eager` backend traces, functionalises and partitions as the default one does, without a C++ compiler.
"""

import copy
import gc
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernels.helpers.gpt import Gpt, some_words
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
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
    observe,
    unobserve,
)

RECIPES: tuple[Recipe, ...] = (
    DelayedScaling(history_length=3, interval=2),
    CurrentScaling(stochastic_gradients=True),
    CurrentScaling(),
    CurrentScaling(fp8_format="E4M3", power_of_two=True),
    RowwiseScaling(),
    BlockScaling(),
    BlockScaling(power_of_two=False),
    MXFP8(),
    NVFP4(),
)
ONE_OF_EACH = tuple({type(recipe): recipe for recipe in RECIPES}.values())
recipes = pytest.mark.parametrize("recipe", RECIPES, ids=str)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def make_mlp(recipe: Recipe, width: int = 32) -> tuple[Any, StatisticsBuffer]:
    """ReLU and squares: what surrounds the layers rounds the same in every graph."""
    torch.manual_seed(0)
    model, buffer = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width)), StatisticsBuffer()
    convert(model, recipe)
    observe(model, buffer)
    return model, buffer


def inputs(seed: int = 1, rows: int = 24, width: int = 32) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def tensors_of(model: nn.Module, buffer: StatisticsBuffer) -> dict[str, Tensor]:
    """Everything that training changes: parameters, gradients, scaling state and both kinds of counters."""
    grads = {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    state = {name: value.clone() for name, value in model.named_buffers()}
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    rows = {"rows": buffer.data.clone(), "blocks": buffer.block_data.clone()}
    return {**parameters, **state, **grads, **rows}


def assert_equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert some.keys() == others.keys()
    different = [name for name in some if not torch.equal(some[name], others[name])]
    assert not different


def train(run: Callable[..., Tensor], model: nn.Module, batches: list[Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for batch in batches:
        loss = run(batch).square().mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", ONE_OF_EACH, ids=lambda recipe: recipe.kind)
def test_it_works(recipe: Recipe) -> None:
    """A GPT of four layers is one graph, and its first step has the bits and counts of eager mode."""
    results = []
    for compiling in (False, True):
        torch.manual_seed(0)
        model, buffer = Gpt(layers=4), StatisticsBuffer()
        convert(model, recipe)
        observe(model, buffer)
        counter = CompileCounterWithBackend("aot_eager")
        run = torch.compile(model, backend=counter, fullgraph=True) if compiling else model
        loss = run(some_words(0))
        torch.autograd.backward(loss)
        assert counter.frame_count == int(compiling)
        results.append({**tensors_of(model, buffer), "loss": loss.detach()})
    assert_equal(*results)


@recipes
def test_training_in_a_graph_equals_eager_training(recipe: Recipe) -> None:
    results = []
    for compiling in (False, True):
        model, buffer = make_mlp(recipe)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiling else model
        losses = train(run, model, [inputs(seed) for seed in range(6)])
        results.append({**tensors_of(model, buffer), "losses": torch.tensor(losses)})
    assert_equal(*results)


@pytest.mark.parametrize("recipe", [DelayedScaling(), BlockScaling()], ids=lambda recipe: recipe.kind)
def test_the_default_backend(recipe: Recipe) -> None:
    """What torch's own compiler makes of the graph, with statistics sampled in one of the steps."""
    results = []
    for compiling in (False, True):
        model, buffer = make_mlp(recipe)
        run = torch.compile(model, fullgraph=True) if compiling else model
        train(run, model, [inputs(0)])
        buffer.sampling = True
        train(run, model, [inputs(1)])
        assert buffer.sample_data is not None
        results.append({**tensors_of(model, buffer), "samples": buffer.sample_data.clone()})
    assert_equal(*results)


def test_layers_of_the_same_shape_share_one_graph() -> None:
    """Blocks compiled one by one, as for large models: torch gives up after eight graphs of one function."""
    counter = CompileCounterWithBackend("aot_eager")
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(12)))
    convert(model, DelayedScaling())
    for layer in model:
        layer.compile(backend=counter, fullgraph=True)
    train(model, model, [inputs(0), inputs(1)])
    # One more where a gradient of the input is wanted, which is not so of the first layer.
    assert counter.frame_count <= 2
    assert all(int(layer.state_of("grad_output").calls) == 2 for _, layer in fp8_layers(model))


def test_equal_calls_are_not_merged() -> None:
    """A compiler may compute once what occurs twice: a layer called twice must still count twice."""

    def twice(layer: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = layer(x) + layer(x)
        return output

    results = []
    for run in (twice, torch.compile(twice, fullgraph=True)):
        model, buffer = make_mlp(DelayedScaling(history_length=4))
        x = inputs().requires_grad_()
        torch.autograd.backward(run(model[0], x).sum())
        assert x.grad is not None
        results.append({**tensors_of(model, buffer), "x": x.grad})
        assert int(model[0].state_of("input").calls) == 2
    assert_equal(*results)


@pytest.mark.parametrize("recipe", [DelayedScaling(), RowwiseScaling()], ids=lambda recipe: recipe.kind)
def test_recomputed_activations_are_not_counted_again(recipe: Recipe) -> None:
    """`checkpoint` inside of a graph, and around one."""
    results = []
    for form in ("eager", "inside", "around"):
        model, buffer = make_mlp(recipe)

        def recomputing(x: Tensor, model: nn.Module = model) -> Tensor:
            output: Tensor = checkpoint(model, x, use_reentrant=False)
            return output

        if form == "inside":
            run: Callable[[Tensor], Tensor] = torch.compile(recomputing, backend="aot_eager", fullgraph=True)
        else:
            if form == "around":
                model.compile(backend="aot_eager", fullgraph=True)
            run = recomputing
        losses = train(run, model, [inputs(seed).requires_grad_() for seed in range(3)])
        results.append({**tensors_of(model, buffer), "losses": torch.tensor(losses)})
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])


def test_products_and_frozen_weights() -> None:
    """Graphs follow `products`, `precision`, and which tensors want a gradient."""
    for change in ("products", "frozen weight", "no bias", "bf16", "evaluation", "no grad"):
        results = []
        for compiling in (False, True):
            model, buffer = make_mlp(CurrentScaling())
            layer: Any = model[2]
            if change == "products":
                layer.products = ("dgrad",)
            elif change == "frozen weight":
                layer.weight.requires_grad_(False)
            elif change == "no bias":
                layer.bias = None
            elif change == "bf16":
                layer.precision = "bf16"
            elif change == "evaluation":
                model.eval()
            run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiling else model
            if change == "no grad":
                with torch.no_grad():
                    run(inputs())
            else:
                train(run, model, [inputs()])
            results.append(tensors_of(model, buffer))
        assert_equal(*results)


def test_batches_of_any_size() -> None:
    results = []
    for compiling in (False, True):
        model, buffer = make_mlp(DelayedScaling())
        run = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True) if compiling else model
        train(run, model, [inputs(0, rows) for rows in (24, 7, 31, 1)])
        results.append(tensors_of(model, buffer))
    assert_equal(*results)


def test_a_copy_counts_by_itself() -> None:
    model, buffer = make_mlp(DelayedScaling())
    other = copy.deepcopy(model)
    train(torch.compile(other, backend="aot_eager", fullgraph=True), other, [inputs()])
    assert not buffer.data[:, 0].any()
    assert [int(layer.state_of("input").calls) for _, layer in fp8_layers(model)] == [0, 0]
    assert [int(layer.state_of("input").calls) for _, layer in fp8_layers(other)] == [1, 1]


def test_a_graph_whose_layer_is_gone_says_so() -> None:
    layer = Fp8Linear(8, 8, recipe=CurrentScaling())
    arguments = (layer.number, layer.turn, *layer.operator_settings, torch.float32, False, False)
    x, weight = torch.ones(2, 8), torch.ones(8, 8)
    del layer
    gc.collect()
    with pytest.raises(RuntimeError, match="compile the model again"):
        torch.ops.fp8scope.linear(x, weight, None, *arguments)


@recipes
def test_make_fx(recipe: Recipe) -> None:
    model, buffer = make_mlp(recipe)
    again, rows = make_mlp(recipe)
    graph = make_fx(model)(inputs(0))
    # Tracing is a call, too.
    again(inputs(0))
    for _ in range(2):
        assert torch.equal(graph(inputs(2)), again(inputs(2)))
    assert_equal(tensors_of(model, buffer), tensors_of(again, rows))


@recipes
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_export(recipe: Recipe, training: bool) -> None:
    """An exported program computes as the model in evaluation mode, and changes no state."""
    model, buffer = make_mlp(recipe)
    train(model, model, [inputs(seed) for seed in range(3)])
    model.train(training)
    before = tensors_of(model, buffer)
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(model, (inputs(0),), dynamic_shapes=({0: rows},))
    assert_equal(before, tensors_of(model, buffer))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    read = torch.export.load(file).module()
    model.eval()
    for x in (inputs(5), 3 * inputs(6, rows=5)):
        assert torch.equal(program.module()(x), model(x))
        assert torch.equal(read(x), model(x))


def test_a_model_that_was_never_called_is_exported_with_its_own_scales() -> None:
    model, _ = make_mlp(DelayedScaling())
    program = torch.export.export(model.eval(), (inputs(),))
    assert torch.equal(program.module()(inputs(3)), model(inputs(3)))


@recipes
def test_without_memory(recipe: Recipe) -> None:
    """FakeTensorMode tells shapes and dtypes of both passes, eager and in a graph."""
    with FakeTensorMode():
        model = make_mlp(recipe)[0]
        for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
            x = torch.randn(24, 32, requires_grad=True)
            output = run(x)
            torch.autograd.backward(output.sum())
            assert output.shape == (24, 32)
            assert x.grad is not None and x.grad.shape == x.shape
            assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


@recipes
def test_func_grad(recipe: Recipe) -> None:
    """torch.func's gradients, and counts, are those of `backward`."""
    model, buffer = make_mlp(recipe)
    again, rows = make_mlp(recipe)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(model, parameters, (x,))
        return output.square().mean()

    for seed in range(2):
        grads, grad_x = torch.func.grad(loss, argnums=(0, 1))(dict(model.named_parameters()), inputs(seed))
        x = inputs(seed).requires_grad_()
        again.zero_grad()
        torch.autograd.backward(again(x).square().mean())
        assert x.grad is not None
        assert torch.equal(grad_x, x.grad)
        assert_equal(grads, {name: p.grad for name, p in again.named_parameters() if p.grad is not None})
    assert torch.equal(buffer.data, rows.data)


def test_func_refuses_what_has_no_meaning() -> None:
    model, _ = make_mlp(CurrentScaling())
    x = inputs()
    parameters: dict[str, Tensor] = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(model, parameters, (x,))
        return output.square().sum()

    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.func.grad(lambda x: torch.func.grad(loss, argnums=1)(parameters, x).square().sum())(x)
    with pytest.raises(NotImplementedError, match="each sample needs scales of its own"):
        torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x[:, None])
    stacked = {name: torch.stack((p, p)) for name, p in parameters.items()}
    with pytest.raises(NotImplementedError, match="over the weights of an FP8 layer"):
        torch.vmap(loss, in_dims=(0, None))(stacked, x)


@pytest.mark.parametrize("dim", [0, 1])
def test_vmap_over_inputs_is_one_batch(dim: int) -> None:
    model, buffer = make_mlp(DelayedScaling())
    again, rows = make_mlp(DelayedScaling())
    x = inputs(rows=60).view(3, 20, 32)
    mapped = torch.vmap(model, in_dims=dim, out_dims=dim)(x)
    whole = again(x.movedim(dim, 0).reshape(60, 32))
    assert torch.equal(mapped.movedim(dim, 0).reshape(60, 32), whole)
    for output in (mapped, whole):
        torch.autograd.backward(output.square().sum())
    assert_equal(tensors_of(model, buffer), tensors_of(again, rows))


@recipes
def test_operators_are_registered_properly(recipe: Recipe) -> None:
    """Fakes have the shapes, dtypes and strides of the results, and nothing else is written to."""
    layer = Fp8Linear(16, 8, recipe=recipe)
    recipe_text, products = layer.operator_settings
    x, weight, bias = inputs(rows=12, width=16), layer.weight.detach(), torch.ones(8)
    tests = ("test_schema", "test_faketensor")
    for matrix in (x, x.t().contiguous().t()):
        settings = recipe_text, products, torch.float32, True, True
        arguments = (matrix, weight, bias, layer.number, layer.turn, *settings)
        torch.library.opcheck(torch.ops.fp8scope.linear.default, arguments, test_utils=tests)
        _, *saved = torch.ops.fp8scope.linear(*arguments)
        grad = inputs(rows=12, width=8)
        dtypes = torch.float32, torch.bfloat16, None
        torch.library.opcheck(
            torch.ops.fp8scope.linear_gradients.default,
            (grad, *saved, None, None, layer.number, recipe_text, products, *dtypes),
            test_utils=tests,
        )
        torch.library.opcheck(
            torch.ops.fp8scope.frozen_linear.default,
            (matrix, weight, bias, torch.ones(()), torch.ones(()), recipe_text, products, torch.bfloat16),
            test_utils=tests,
        )


def make_plain() -> tuple[nn.Sequential, StatisticsBuffer]:
    """A model in high precision, observed. The second ReLU changes a watched layer's output in place."""
    torch.manual_seed(0)
    layers = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64, bias=False), nn.ReLU(inplace=True)
    model, buffer = nn.Sequential(*layers, nn.Linear(64, 32)), StatisticsBuffer()
    observe(model, buffer)
    return model, buffer


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_layers_in_high_precision_are_observed_in_one_graph(backend: str) -> None:
    """With the numbers of eager mode, and the training of a model that nobody observes."""
    results = []
    for form in ("eager", "compiled", "recomputed"):
        model, buffer = make_plain()
        run: Callable[[Tensor], Tensor] = model
        if form != "eager":
            counter = CompileCounterWithBackend(backend)

            def recomputing(x: Tensor, model: nn.Module = model) -> Tensor:
                output: Tensor = checkpoint(model, x, use_reentrant=False)
                return output

            called = recomputing if form == "recomputed" else model
            run = torch.compile(called, backend=counter, fullgraph=True)
        losses = train(run, model, [inputs(seed).requires_grad_() for seed in range(3)])
        assert form == "eager" or counter.frame_count == 1
        results.append({**tensors_of(model, buffer), "losses": torch.tensor(losses)})
    unobserved, buffer = make_plain()
    unobserve(unobserved)
    losses = train(
        torch.compile(unobserved, backend=backend), unobserved, [inputs(seed) for seed in range(3)]
    )
    assert torch.equal(results[1]["losses"], torch.tensor(losses))
    assert results[0]["rows"][:, 0].all()
    assert_equal(results[1], results[2])
    if backend == "aot_eager":
        assert_equal(results[0], results[1])
    else:
        torch.testing.assert_close(results[0]["rows"], results[1]["rows"], rtol=1e-5, atol=0)


def test_observed_layers_of_the_same_shape_share_one_graph() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.up(x)
            return hidden.relu()

    counter = CompileCounterWithBackend("aot_eager")
    blocks = [Block() for _ in range(12)]
    model, buffer = nn.Sequential(*blocks), StatisticsBuffer()
    observe(model, buffer)
    for block in blocks:
        block.compile(backend=counter, fullgraph=True)
    train(model, model, [inputs(0), inputs(1)])
    # One more where a gradient of the input is wanted, which is not so of the first layer.
    assert counter.frame_count <= 2
    assert buffer.data[:, 0].tolist() == 12 * [2 * 24 * 32, 2 * 32 * 32, 2 * 24 * 32]


def test_a_graph_goes_on_without_an_observer() -> None:
    """An observer that is gone, as after the end of a run, counts nothing."""
    model, buffer = make_plain()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    run(inputs())
    rows = buffer.data.clone()
    unobserve(model)
    gc.collect()
    assert torch.equal(run(inputs()), model(inputs()))
    assert torch.equal(buffer.data, rows)
