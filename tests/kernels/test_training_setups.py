"""Fp8Linear in the ways models are trained: compiled, autocast, accumulated, tied, copied, and at once."""

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
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
    observe,
)

RECIPES: tuple[Recipe, ...] = (
    *(DelayedScaling(), CurrentScaling(), RowwiseScaling(), BlockScaling(), MXFP8(), NVFP4()),
)
recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.kind)
WORDS, WIDTH = 48, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return x + hidden


class Model(nn.Module):
    """Words in, logits out; the head has the embedding's weight, the second `up` that of the first."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        second: nn.Module = self.blocks[1]
        second.up.weight = self.blocks[0].up.weight  # type: ignore[union-attr]
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits: Tensor = self.head(x)
        return logits


def make_model(recipe: Recipe, recompute: bool = False) -> tuple[Model, StatisticsBuffer]:
    torch.manual_seed(0)
    model, buffer = Model(recompute), StatisticsBuffer()
    convert(model, recipe)
    observe(model, buffer)
    return model, buffer


def words(seed: int, rows: int = 8) -> Tensor:
    return torch.randint(WORDS, (rows, 16), generator=torch.Generator().manual_seed(seed))


def loss_of(run: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    return functional.cross_entropy(run(batch)[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train(run: Callable[[Tensor], Tensor], model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        loss = loss_of(run, words(step))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    with warnings.catch_warnings():
        # torch's own, about its own code.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        yield


@recipes
def test_it_works(recipe: Recipe) -> None:
    """Tied parameters are trained, and each quantised tensor is counted once per call of its layer."""
    model, buffer = make_model(recipe)
    losses = train(model, model)
    assert losses[-1] < losses[0]
    assert model.head.weight is model.embed.weight
    assert model.blocks[1].up.weight is model.blocks[0].up.weight  # type: ignore[union-attr]
    tokens = 3 * 8 * 16
    numel = {info.name: row[0] for info, row in zip(buffer.catalogue, buffer.data.tolist(), strict=True)}
    assert numel == {
        f"blocks.{i}.{layer}.{role}": count
        for i in range(2)
        for layer, wide in (("up", (1, 4)), ("down", (4, 1)))
        for role, count in (
            ("input", tokens * WIDTH * wide[0]),
            ("weight", 3 * 4 * WIDTH * WIDTH),
            ("grad_output", tokens * WIDTH * wide[1]),
        )
    }


@pytest.mark.parametrize("recipe", [DelayedScaling(), MXFP8()], ids=lambda recipe: recipe.kind)
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_a_compiled_model_counts_and_trains_like_an_eager_one(
    recipe: Recipe, autocast: bool, recompute: bool
) -> None:
    results = []
    for compiling in (False, True):
        model, buffer = make_model(recipe, recompute)
        called = torch.compile(model, backend="aot_eager", fullgraph=not recompute) if compiling else model

        def run(batch: Tensor, called: Callable[[Tensor], Tensor] = called) -> Tensor:
            # Over one step at a time: eager autocast keeps its copies of the weights as long as it is active.
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return called(batch)

        results.append((train(run, model), buffer.data.clone(), gradients(model)))
    (losses, rows, grads), (losses_again, rows_again, grads_again) = results
    # What surrounds the layers may round differently once compiled, and a count follow suit.
    assert losses_again == pytest.approx(losses, rel=1e-2 if autocast else 1e-4)
    assert torch.equal(rows[:, 0], rows_again[:, 0])
    torch.testing.assert_close(rows_again[:, 1], rows[:, 1], rtol=5e-2, atol=0)
    assert grads.keys() == grads_again.keys()
    for name in grads:
        difference = (grads_again[name] - grads[name]).norm()
        assert difference <= (0.1 if autocast else 0.02) * grads[name].norm()


@pytest.mark.parametrize("recipe", [CurrentScaling(), RowwiseScaling()], ids=lambda recipe: recipe.kind)
def test_accumulated_gradients_are_the_sum_of_each(recipe: Recipe) -> None:
    """Recipes without memory; each batch brings its own scale whether gradients are kept or not."""
    model, _ = make_model(recipe)
    apart: dict[str, Tensor] = {}
    for seed in range(3):
        model.zero_grad()
        torch.autograd.backward(loss_of(model, words(seed)))
        apart = {name: grad + apart.get(name, 0) for name, grad in gradients(model).items()}
    model.zero_grad()
    for seed in range(3):
        torch.autograd.backward(loss_of(model, words(seed)))
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, apart[name])


@recipes
def test_one_backward_for_several_forwards(recipe: Recipe) -> None:
    """Saved operands carry their own scales: a later forward must not change what an earlier one saved."""
    layer = Fp8Linear(16, 24, bias=False, recipe=recipe)
    torch.manual_seed(0)
    first, second = torch.randn(8, 16), 50 * torch.randn(8, 16)
    layer(first)
    expected = torch.autograd.grad(layer(first).sum(), layer.weight)[0]
    layer = Fp8Linear.from_linear(layer, recipe)
    layer(first)
    outputs = layer(first), layer(second)
    (actual,) = torch.autograd.grad(outputs[0].sum(), layer.weight)
    torch.testing.assert_close(actual, expected)


@recipes
def test_copies_train_apart(recipe: Recipe) -> None:
    model, buffer = make_model(recipe)
    train(model, model, steps=1)
    twin, rows = copy.deepcopy(model), buffer.data.clone()
    assert twin.head.weight is twin.embed.weight
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    twin_losses = train(twin, twin)
    assert torch.equal(buffer.data, rows), "a copy's tensors are not the model's"
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert train(model, model) == twin_losses


def test_a_compiled_model_takes_batches_of_any_size() -> None:
    model, buffer = make_model(DelayedScaling())
    run = torch.compile(model, backend="aot_eager")
    for rows in (8, 3, 5, 1):
        torch.autograd.backward(loss_of(run, words(rows, rows)))
    assert buffer.data[0, 0] == (8 + 3 + 5 + 1) * 16 * WIDTH


def test_evaluating_in_between_changes_nothing() -> None:
    model, buffer = make_model(DelayedScaling())
    twin, _ = make_model(DelayedScaling())
    train(model, model, steps=2)
    train(twin, twin, steps=2)
    rows = buffer.data.clone()
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        loss_of(model, words(99))
    model.train()
    assert torch.equal(buffer.data, rows)
    assert train(model, model) == train(twin, twin)


def test_autocast_to_float16_keeps_gradients_finite() -> None:
    model, _ = make_model(CurrentScaling())
    with torch.autocast("cpu", torch.float16):
        loss = 1024 * loss_of(model, words(1))
    torch.autograd.backward(loss)
    for name, grad in gradients(model).items():
        assert grad.dtype == torch.float32, name
        assert torch.isfinite(grad).all(), name
