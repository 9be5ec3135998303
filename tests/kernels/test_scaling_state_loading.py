"""Scaling state after loading a checkpoint is restored, or reported as missing or stale."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from fp8scope_kernels import (
    E4M3,
    MXFP8,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipe,
    RowwiseScaling,
    ScalingState,
    convert,
    fp8_layers,
    plain_state_dict,
    scaling_status,
)

NAMES = [f"{layer}.{role}" for layer in "02" for role in ("input", "weight", "grad_output")]


def make_model(recipe: Recipe | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    if recipe is not None:
        convert(model, recipe)
    return model


def batch(size: float = 1.0) -> Tensor:
    return size * torch.randn(16, 32, generator=torch.Generator().manual_seed(1))


def trained(recipe: Recipe, size: float = 1.0) -> nn.Sequential:
    model = make_model(recipe)
    for _ in range(3):
        model(batch(size)).square().mean().backward()
    return model


@contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_it_works() -> None:
    model, twin = trained(DelayedScaling()), make_model(DelayedScaling())
    assert scaling_status(twin) == dict.fromkeys(NAMES, "fresh")
    with silent():
        twin.load_state_dict(model.state_dict())
        assert scaling_status(twin) == dict.fromkeys(NAMES, "restored")
        twin(batch()).square().mean().backward()
    assert scaling_status(twin) == dict.fromkeys(NAMES, "restored")


def test_a_bf16_checkpoint_has_no_scaling_state() -> None:
    """Weights of a BF16 run into an FP8 model that has already trained: its scales were for other weights."""
    model = trained(DelayedScaling(), size=1000.0)
    with pytest.warns(RuntimeWarning, match="no scaling state, or only part of it, for some tensors"):
        model.load_state_dict(make_model().state_dict())
    assert scaling_status(model) == dict.fromkeys(NAMES, "missing")
    layer = dict(fp8_layers(model))["0"]
    assert layer.state_of("input").calls == 0
    model(batch())
    assert layer.state_of("input").scale.item() == pytest.approx(448.0 / batch().abs().max().item(), rel=1e-6)
    assert layer.state_of("input").status == "missing"


@pytest.mark.parametrize("lost", ["scale", "amax_history", "calls"])
def test_reports_each_missing_part_of_the_state(lost: str) -> None:
    model = trained(DelayedScaling())
    checkpoint = copy.deepcopy(model.state_dict())
    del checkpoint[f"2.scaling.weight.{lost}"]
    # Strictly, that is an error: the checkpoint is damaged.
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match=f"2.scaling.weight.{lost}"):
        make_model(DelayedScaling()).load_state_dict(checkpoint)
    with pytest.warns(RuntimeWarning, match="some tensors"):
        model.load_state_dict(checkpoint, strict=False)
    assert {name for name, status in scaling_status(model).items() if status == "missing"} == {"2.weight"}
    assert model.get_submodule("2.scaling.weight").get_buffer("amax_history").count_nonzero() == 0


@pytest.mark.parametrize("factor", [1e-3, 1e3])
@pytest.mark.parametrize("training", [False, True])
def test_a_stale_scale_is_reported_and_not_used(factor: float, training: bool) -> None:
    model, twin = trained(DelayedScaling()), make_model(DelayedScaling())
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        twin.get_parameter("0.weight").mul_(factor)
    twin.train(training)
    with pytest.warns(RuntimeWarning, match="does not fit its tensor"):
        twin(batch())
    assert scaling_status(twin)["0.weight"] == "stale"
    assert scaling_status(twin)["0.input"] == "restored"
    reference = make_model(DelayedScaling())
    with torch.no_grad():
        reference.get_parameter("0.weight").mul_(factor)
    torch.testing.assert_close(twin[0](batch()), reference[0](batch()))


@pytest.mark.parametrize("margin", [0, 6])
@pytest.mark.parametrize("factor", [0.1, 1.0, 10.0])
def test_changes_of_one_training_step_are_not_stale(margin: int, factor: float) -> None:
    state = ScalingState(DelayedScaling(margin=margin), E4M3)
    state.next_scale(torch.tensor(1.0))
    twin = copy.deepcopy(state)
    with silent():
        twin.load_state_dict(state.state_dict())
        twin.next_scale(torch.tensor(factor))
    assert twin.status == "restored"


def test_an_empty_tensor_is_not_stale() -> None:
    model, twin = trained(DelayedScaling()), make_model(DelayedScaling())
    twin.load_state_dict(model.state_dict())
    with silent():
        twin(batch()[:0])
    assert scaling_status(twin)["0.input"] == "restored"


def test_a_checkpoint_from_before_training_is_fresh() -> None:
    twin = make_model(DelayedScaling())
    with silent():
        twin.load_state_dict(make_model(DelayedScaling()).state_dict())
        twin(batch())
    assert set(scaling_status(twin).values()) == {"fresh"}


def test_recipes_without_history_report_nothing_missing() -> None:
    model = trained(CurrentScaling())
    with silent():
        model.load_state_dict(make_model().state_dict(), strict=False)
    assert set(scaling_status(model).values()) == {"fresh"}


def in_the_older_form(model: nn.Module) -> dict[str, Tensor]:
    """A checkpoint from when the number of calls was extra state."""
    state = {}
    for key, value in model.state_dict().items():
        state[key.replace(".calls", "._extra_state")] = value.clone()
    return state


@pytest.mark.parametrize("interval", [1, 2])
def test_older_checkpoints_are_read_and_reported(interval: int) -> None:
    recipe = DelayedScaling(history_length=4, interval=interval)
    model, twin = trained(recipe), make_model(recipe)
    with pytest.warns(UserWarning, match="older form, which was read without loss") as warned:
        twin.load_state_dict(in_the_older_form(model))
    assert not [w for w in warned if issubclass(w.category, RuntimeWarning)]
    assert scaling_status(twin) == dict.fromkeys(NAMES, "restored")
    with silent():
        for seed in range(1, 5):
            assert torch.equal(twin(batch(seed)), model(batch(seed)))
    assert twin.state_dict().keys() == model.state_dict().keys()


def test_older_checkpoints_of_recipes_without_history() -> None:
    """Their extra state meant nothing: no error, no warning."""
    model, twin = trained(CurrentScaling()), make_model(CurrentScaling())
    older = model.state_dict() | {"0.scaling.input._extra_state": torch.tensor(3)}
    with silent():
        twin.load_state_dict(older)
    assert torch.equal(twin(batch()), model(batch()))


def test_the_newer_count_takes_precedence() -> None:
    model, twin = trained(DelayedScaling()), make_model(DelayedScaling())
    with silent():
        twin.load_state_dict(model.state_dict() | {"0.scaling.input._extra_state": torch.tensor(99)})
    assert twin.get_submodule("0.scaling.input").get_buffer("calls") == 3


STATELESS = (CurrentScaling(), RowwiseScaling(), BlockScaling(), MXFP8())


@pytest.mark.parametrize("recipe", STATELESS, ids=lambda recipe: recipe.kind)
def test_a_recipe_without_state_has_the_checkpoints_of_a_bf16_model(recipe: Recipe) -> None:
    """Strictly in both directions: only delayed scaling has something to store."""
    model, plain = trained(recipe), make_model()
    assert list(model.state_dict()) == list(plain.state_dict())
    with silent():
        model.load_state_dict(plain.state_dict())
        plain.load_state_dict(model.state_dict())
    # The scale of the last call can be read all the same.
    assert len([name for name, _ in model.named_buffers() if name.endswith(".scale")]) == 6


@pytest.mark.parametrize("recipe", STATELESS, ids=lambda recipe: recipe.kind)
@pytest.mark.parametrize("assign", [False, True])
def test_checkpoints_that_stored_such_scales_are_still_read(recipe: Recipe, assign: bool) -> None:
    model, twin = trained(recipe), make_model(recipe)
    scales = {f"{layer}.scaling.{role}.scale": torch.tensor(3.0) for layer, role in map(_split, NAMES)}
    with silent():
        twin.load_state_dict(model.state_dict() | scales, assign=assign)
    assert torch.equal(twin(batch()), model(batch()))
    with pytest.raises(RuntimeError, match="Unexpected key.*scaling.other.scale"):
        twin.load_state_dict(model.state_dict() | {"0.scaling.other.scale": torch.tensor(3.0)})


def _split(name: str) -> list[str]:
    return name.split(".")


@pytest.mark.parametrize("recipe", STATELESS, ids=lambda recipe: recipe.kind)
def test_a_recipe_without_state_takes_over_from_delayed_scaling(recipe: Recipe) -> None:
    twin = make_model(recipe)
    with silent():
        twin.load_state_dict(trained(DelayedScaling()).state_dict())
    assert torch.equal(twin(batch()), trained(recipe)(batch()))


@pytest.mark.parametrize("older", [False, True])
def test_the_plain_state_dict_loads_strictly_into_a_bf16_model(older: bool) -> None:
    model, plain = trained(DelayedScaling()), make_model()
    saved = in_the_older_form(model) if older else model
    state = plain_state_dict(saved)
    with silent():
        plain.load_state_dict(state)
    assert list(state) == list(plain.state_dict())
    assert all(torch.equal(value, model.get_parameter(key)) for key, value in plain.state_dict().items())
    assert not any("scaling.input" in path for path in getattr(state, "_metadata", ()))


def test_coming_back_from_bf16_is_fresh() -> None:
    model, twin = trained(DelayedScaling()), make_model(DelayedScaling())
    twin.load_state_dict(model.state_dict())
    for _, layer in fp8_layers(twin):
        layer.precision = "bf16"
        layer.precision = "fp8"
    assert set(scaling_status(twin).values()) == {"fresh"}
