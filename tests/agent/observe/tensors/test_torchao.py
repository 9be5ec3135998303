"""torchao's layers: scales and counts are those of torchao's own cast, bit for bit."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from agent.helpers.watching import AMAX, NUMEL, SATURATED, SCALE, Watched, brute_force
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic

from fp8scope.observe.tensors.torchao import Float8Observer
from fp8scope_kernels import E4M3, E5M2, exponent_histogram

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
FORMATS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}


def float8_model(recipe: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 48, dtype=dtype), nn.GELU(), nn.Linear(48, 16, bias=False, dtype=dtype)
    )
    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    convert_to_float8_training(model, config=config)
    return model


class Seen:
    """The high-precision tensors that a layer gets, as its own hooks see them."""

    def __init__(self, layer: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.layer: Any = layer
        layer.register_forward_hook(self._forward)

    def _forward(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.tensors["input"] = inputs[0].detach()
        self.tensors["weight"] = self.layer.weight.detach().clone()
        output.register_hook(self._backward)  # type: ignore[no-untyped-call]

    def _backward(self, gradient: Tensor) -> None:
        self.tensors["grad_output"] = gradient.detach()

    def cast(self, role: str) -> Any:
        """torchao's Float8TrainingTensor of this tensor, made the way `Float8Linear` makes it."""
        config = getattr(self.layer.config, f"cast_config_{role}")
        x = self.tensors[role]
        return hp_tensor_to_float8_dynamic(
            x.t() if role == "weight" else x.reshape(-1, x.shape[-1]),
            config.target_dtype,
            self.layer.linear_mm_config,
            scaling_granularity=config.scaling_granularity,
            axiswise_dim=get_maybe_axiswise_dim(0 if role == "weight" else -1, config.scaling_granularity),
            round_scales_to_power_of_2=self.layer.config.round_scales_to_power_of_2,
        )


def train(model: nn.Module, x: Tensor, factor: float = 1.0) -> None:
    (model(x).square().mean() * factor).backward()


def check_against_torchao(seen: Seen, step: Any, path: str) -> None:
    for role, x in seen.tensors.items():
        name = f"{path}.{role}"
        cast = seen.cast(role)
        format = FORMATS[cast._data.dtype]
        x = x.t() if role == "weight" else x.reshape(-1, x.shape[-1])
        row = step.row(name)
        finite = x[torch.isfinite(x)]
        assert row[NUMEL] == x.numel()
        assert row[AMAX] == float(finite.abs().max()) if finite.numel() else row[AMAX] == 0
        scale = cast._scale.double().flatten().median()
        assert row[SCALE] == float(scale) or (row[SCALE] != row[SCALE] and scale.isnan())
        counts = brute_force(x, cast._scale, format.max, format.smallest_normal, cast._data)
        assert row[SATURATED:].tolist() == counts, (name, row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_works(recipe: str, dtype: torch.dtype) -> None:
    model = float8_model(recipe, dtype)
    watched = Watched(model)
    assert watched.tensors == 6
    seen = [Seen(model[0]), Seen(model[2])]
    for factor in (1.0, 1e-6, 1e6):
        torch.manual_seed(1)
        x = torch.randn(2, 8, 32, dtype=dtype) * factor
        x[0, 0, 0] = 0.0
        step = watched.step(partial(train, model, x, factor))
        check_against_torchao(seen[0], step, "0")
        check_against_torchao(seen[1], step, "2")
    formats = {info.name: info.format for info in watched.catalogue}
    assert formats["0.input"] == "E4M3"
    assert formats["0.grad_output"] == ("E5M2" if recipe == "tensorwise" else "E4M3")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("recipe", RECIPES)
def test_counts_of_a_non_finite_element_match_torchao(recipe: str, bad: float) -> None:
    model = float8_model(recipe)
    watched = Watched(model)
    seen = Seen(model[0])
    x = torch.randn(8, 32)
    x[3, 5] = bad
    step = watched.step(lambda: model(x))
    check_against_torchao(seen, step, "0")
    assert step.row("0.input")[-1] == 1


def test_all_zero_and_tiny_tensors_have_torchaos_scale() -> None:
    model = float8_model("tensorwise")
    watched = Watched(model)
    seen = Seen(model[0])
    for x in (torch.zeros(4, 32), torch.full((4, 32), 1e-30)):
        step = watched.step(partial(model, x))
        check_against_torchao(seen, step, "0")
        assert step.row("0.input")[SCALE] == pytest.approx(448 / 1e-12)


@pytest.mark.parametrize("recipe", RECIPES)
def test_observing_does_not_change_the_training(recipe: str) -> None:
    plain, observed = float8_model(recipe), float8_model(recipe)
    watched = Watched(observed)
    x = torch.randn(8, 32)
    train(plain, x)
    watched.step(lambda: train(observed, x))
    assert torch.equal(plain(x), observed(x))
    for one, other in zip(plain.parameters(), observed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_only_rowwise_casts_have_block_statistics() -> None:
    x = torch.randn(8, 32)
    step = Watched(model := float8_model("rowwise")).step(lambda: train(model, x))
    assert step.extra("blocks", "0.input") == 8 and step.extra("blocks", "0.weight") == 48
    low, middle, high = (step.extra(f"scale_{which}", "0.input") for which in ("min", "median", "max"))
    assert 0 < low <= middle <= high and step.row("0.input")[SCALE] == middle
    step = Watched(model := float8_model("tensorwise")).step(lambda: train(model, x))
    assert "blocks" not in step.observed.extras


@pytest.mark.parametrize("recipe", RECIPES)
def test_samples_contain_error_and_exponents(recipe: str) -> None:
    model = float8_model(recipe)
    x = torch.randn(16, 32)
    watched = Watched(model, every=2)
    seen = Seen(model[0])
    step = watched.step(lambda: train(model, x))
    assert (step.histograms["0.input"] == exponent_histogram(x).numpy()).all()
    cast = seen.cast("input")
    error = (x.double() - cast._data.double() / cast._scale.double()).square().sum()
    assert step.extra("sq_error", "0.input") == pytest.approx(float(error), rel=1e-5)
    assert step.extra("sq_signal", "0.input") == pytest.approx(float(x.double().square().sum()), rel=1e-12)
    between = watched.step(lambda: train(model, x))
    assert between.histograms == {} and between.observed.extras == {}


def test_describes_the_recipe() -> None:
    collector = Watched(float8_model("rowwise")).collector
    assert collector.recipe["recipe"] == "torchao.float8"
    assert collector.recipe["weight"] == "float8_e4m3fn rowwise" and collector.recipe["power_of_two"] is True


def test_a_sharded_weight_has_only_its_local_statistics() -> None:
    """FSDP makes a class of its own of the layer, and keeps a part of the weight on each rank."""
    model = float8_model("tensorwise")
    layer = model[0]
    layer.__class__ = type("FSDPFloat8Linear", (type(layer),), {})
    watched = Watched(model)
    assert watched.tensors == 6
    (observer,) = [hook for hook in layer._forward_hooks.values() if isinstance(hook, Float8Observer)]
    part = next(layer.parameters()).detach()[:8]
    step = watched.step(lambda: observer.write("weight", observer.slots["weight"], part))
    row = step.row("0.weight")
    assert (row[NUMEL], row[AMAX], row[-1]) == (8 * 32, float(part.abs().max()), 0)
    assert torch.isnan(torch.tensor(row[SCALE:-1])).all()


def test_weights_gathered_in_fp8_have_only_their_scale() -> None:
    model = float8_model("tensorwise")
    watched = Watched(model)
    seen = Seen(model[0])
    watched.step(lambda: model(torch.randn(4, 32)))
    gathered = seen.cast("weight")
    (observer,) = [hook for hook in model[0]._forward_hooks.values() if isinstance(hook, Float8Observer)]
    row = watched.step(lambda: observer.write("weight", observer.slots["weight"], gathered)).row("0.weight")
    assert row[NUMEL] == 48 * 32 and row[SCALE] == float(gathered._scale)
    assert torch.isnan(torch.tensor([row[AMAX], *row[SATURATED:]])).all()


def test_copies_are_not_counted() -> None:
    model = float8_model("tensorwise")
    watched = Watched(model)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]

    def work() -> None:
        for twin in twins:
            train(twin, torch.randn(4, 32))

    assert not watched.step(work).observed.statistics.any()
    assert Watched(twins[0]).step(lambda: twins[0](torch.randn(4, 32))).row("0.input")[NUMEL] == 4 * 32


def test_watching_twice_counts_once() -> None:
    model = float8_model("tensorwise")
    watched = Watched(model)
    assert watched.collector.watch(model) == 6
    assert watched.step(lambda: model(torch.randn(4, 32))).row("0.input")[NUMEL] == 4 * 32


def test_a_cast_that_is_switched_off_is_not_observed() -> None:
    from torchao.float8.config import CastConfig, ScalingType

    off = CastConfig(scaling_type=ScalingType.DISABLED)
    config = Float8LinearConfig(
        cast_config_grad_output=off,
        cast_config_weight_for_grad_input=off,
        cast_config_input_for_grad_weight=off,
        emulate=True,
    )
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 16)), config=config)
    watched = Watched(model)
    assert watched.tensors == 2
    watched.step(lambda: model(torch.randn(4, 32)))
    assert watched.names == ["0.input", "0.weight"]
