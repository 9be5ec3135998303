"""Models that are made on the meta device and get memory later: their scaling state begins as any other."""

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save as write

from fp8scope_kernels import (
    E4M3,
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Linear,
    Recipe,
    RowwiseScaling,
    ScalingState,
    convert,
    fp8_layers,
    scaling_status,
    set_backend,
)

RECIPES = (
    DelayedScaling(),
    DelayedScaling(amax_compute="most_recent", interval=2),
    CurrentScaling(),
    RowwiseScaling(),
    BlockScaling(),
    MXFP8(),
    NVFP4(),
)
recipes = pytest.mark.parametrize(
    "recipe", RECIPES, ids=[f"{recipe.kind} {index}" for index, recipe in enumerate(RECIPES)]
)


@pytest.fixture(autouse=True, params=["auto", "reference"])
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    set_backend(request.param)
    yield
    set_backend("auto")


@pytest.fixture(autouse=True)
def used_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`to_empty` gives memory that something else has used, as in a process that has been running."""
    empty_like = torch.empty_like

    def used(x: Tensor, **options: Any) -> Tensor:
        out = empty_like(x, **options)
        return out if out.is_meta else out.fill_(123)

    monkeypatch.setattr(torch, "empty_like", used)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """As in a script: the seed comes before the model, and streams of rounding follow from it."""
    torch.manual_seed(0)


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


def made(recipe: Recipe, device: str) -> nn.Sequential:
    with torch.device(device):
        model = make()
    convert(model, recipe)
    return model


def initialise(model: nn.Module) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 8)


def train(model: nn.Module, steps: int = 3) -> list[Tensor]:
    """The outputs and the gradients of some steps."""
    seen = []
    for step in range(steps):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).requires_grad_()
        model.zero_grad()
        y = model(x)
        y.square().mean().backward()
        seen += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return seen


def assert_trains_as_any_other(model: nn.Module, recipe: Recipe) -> None:
    """Bit for bit the run of a model that was made on the CPU."""
    twin = made(recipe, "cpu")
    initialise(twin)
    for (name, own), (_, other) in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        assert own.device == other.device and torch.equal(own, other), name
    assert all(map(torch.equal, train(model), train(twin)))


@recipes
@pytest.mark.parametrize("order", ["convert first", "convert on meta"])
def test_it_works(recipe: Recipe, order: str) -> None:
    """The usual order with FSDP2: made on meta, converted, `to_empty`, initialised."""
    if order == "convert first":
        with torch.device("meta"):
            model = make()
            convert(model, recipe)
    else:
        model = made(recipe, "meta")
    model.to_empty(device="cpu")
    initialise(model)
    assert set(scaling_status(model).values()) == {"fresh"}
    assert_trains_as_any_other(model, recipe)


@recipes
def test_a_layer_that_is_made_on_meta(recipe: Recipe) -> None:
    layers = []
    for device in ("meta", "cpu"):
        torch.manual_seed(3)
        layer = Fp8Linear(32, 64, recipe=recipe, device=device).to_empty(device="cpu")
        torch.manual_seed(4)
        layer.reset_parameters()
        layers.append(layer)
    assert all(map(torch.equal, train(layers[0]), train(layers[1])))


@recipes
def test_a_used_model_through_meta(recipe: Recipe) -> None:
    """Down to meta and back: the values are gone, and so is what the state knew of them."""
    model = made(recipe, "cpu")
    initialise(model)
    train(model)
    model.to("meta").to_empty(device="cpu")
    initialise(model)
    assert_trains_as_any_other(model, recipe)


@recipes
def test_memory_that_replaces_buffers_one_by_one(recipe: Recipe) -> None:
    """As loaders of other libraries do, past `to_empty`."""
    model = made(recipe, "meta")
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            assert buffer is not None
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
        for name, parameter in list(module._parameters.items()):
            assert parameter is not None
            module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="cpu"))
    initialise(model)
    twin = made(recipe, "cpu")
    initialise(twin)
    assert all(map(torch.equal, train(model), train(twin)))


@recipes
def test_a_plain_checkpoint_assigned_to_a_meta_model(recipe: Recipe) -> None:
    plain = make()
    initialise(plain)
    model = made(recipe, "meta")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.load_state_dict(plain.state_dict(), strict=False, assign=True)
    missing = "missing" if isinstance(recipe, DelayedScaling) else "fresh"
    assert set(scaling_status(model).values()) == {missing}
    twin = made(recipe, "cpu")
    initialise(twin)
    assert all(map(torch.equal, train(model), train(twin)))
    assert set(scaling_status(model).values()) == {missing}
    assert not any(buffer.is_meta for buffer in model.buffers())


@recipes
@pytest.mark.parametrize("how", ["assigned", "after to_empty"])
@pytest.mark.parametrize("training", [True, False])
def test_a_resumed_run_is_the_same_run(recipe: Recipe, how: str, training: bool) -> None:
    first = made(recipe, "cpu")
    initialise(first)
    train(first)
    checkpoint = copy.deepcopy(first.state_dict())
    model = made(recipe, "meta")
    if how == "assigned":
        model.load_state_dict(checkpoint, assign=True)
    else:
        # A load that goes nowhere, because meta tensors keep nothing, must not be remembered.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.load_state_dict(checkpoint)
        model.to_empty(device="cpu")
        model.load_state_dict(checkpoint)
    restored = "restored" if isinstance(recipe, DelayedScaling) else "fresh"
    assert set(scaling_status(model).values()) == {restored}
    model.train(training), first.train(training)
    assert all(map(torch.equal, train(model), train(first)))


@recipes
@pytest.mark.parametrize("through", ["in place", "load_state_dict"])
def test_a_run_resumed_from_a_distributed_checkpoint(recipe: Recipe, through: str, tmp_path: Path) -> None:
    first = made(recipe, "cpu")
    initialise(first)
    train(first)
    write(first.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    model = made(recipe, "meta")
    model.to_empty(device="cpu")
    state = model.state_dict()
    read(state, checkpoint_id=tmp_path, no_dist=True)
    if through == "load_state_dict":
        model.load_state_dict(state)
    assert all(map(torch.equal, train(model), train(first)))


@pytest.mark.parametrize("lost", ["scale", "amax_history", "calls"])
def test_a_checkpoint_with_part_of_the_state_assigned_to_a_meta_model(lost: str) -> None:
    first = made(DelayedScaling(), "cpu")
    initialise(first)
    train(first)
    checkpoint = {k: v.clone() for k, v in first.state_dict().items() if not k.endswith(lost)}
    model = made(DelayedScaling(), "meta")
    with pytest.warns(RuntimeWarning, match="or only part of it"):
        model.load_state_dict(checkpoint, strict=False, assign=True)
    twin = made(DelayedScaling(), "cpu")
    twin.load_state_dict({k: v for k, v in checkpoint.items() if "scaling" not in k}, strict=False)
    assert all(map(torch.equal, train(model), train(twin)))


def test_to_empty_of_a_model_with_memory_keeps_the_state() -> None:
    model = made(DelayedScaling(), "cpu")
    initialise(model)
    train(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu")
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_new_weights_have_no_history() -> None:
    layer = Fp8Linear(32, 64, recipe=DelayedScaling())
    train(layer)
    layer.reset_parameters()
    assert not any(buffer.any() for buffer in layer.buffers())


@recipes
@pytest.mark.parametrize("training", [True, False])
def test_a_model_on_meta_has_shapes(recipe: Recipe, training: bool) -> None:
    model = made(recipe, "meta").train(training)
    for _ in range(2):
        y = model(torch.randn(4, 32, device="meta"))
        assert y.is_meta and y.shape == (4, 32)
        y.sum().backward()
    model.to_empty(device="cpu")
    initialise(model)
    assert_trains_as_any_other(model.train(), recipe)


def test_a_bf16_copy_and_a_pickle_of_a_meta_model() -> None:
    for change in (copy.deepcopy, lambda model: model.bfloat16()):
        change_: Callable[[nn.Module], nn.Module] = change
        model = change_(made(DelayedScaling(), "meta")).to_empty(device="cpu")
        for _, layer in fp8_layers(model):
            state = layer.state_of("input")
            assert state.scale.dtype == torch.float32 and not state.amax_history.any()


def test_a_state_from_before_it_could_be_on_meta() -> None:
    """Pickles of version 0.1 have no such attribute, and store the scale of a recipe without state."""
    state = ScalingState(CurrentScaling(), E4M3)
    values = copy.copy(state.__dict__)
    del values["_is_empty"]
    values["_non_persistent_buffers_set"] = set()
    older = ScalingState.__new__(ScalingState)
    older.__setstate__(values)
    assert not older.state_dict()
    assert older.next_scale(torch.tensor(2.0)) == 224
