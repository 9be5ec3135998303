"""Transformer Engine's modules, by modules laid out the same way: TE itself runs only on a GPU.

The stand-in does what TE 2 documents (recipe.h, `nvte_delayed_scaling_recipe_amax_and_scale_update`): it
casts with `scale`, writes amax into row 0 of the history, and at the end of the autocast, or of the backward
pass, rolls the history and computes the next scale.
"""

import copy
import pickle
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agent.helpers.watching import AMAX, NUMEL, SATURATED, SCALE, Watched
from torch import Tensor, nn

from fp8scope_kernels import E4M3, E5M2


class Meta:
    """TE's FP8TensorMeta: float32 scale and scale_inv [tensors], amax_history [length, tensors]."""

    def __init__(self, tensors: int, length: int, largest: float) -> None:
        self.scale = torch.ones(tensors)
        self.scale_inv = torch.ones(tensors)
        self.amax_history = torch.zeros(length, tensors)
        self.largest = largest

    def see(self, index: int, x: Tensor) -> None:
        self.amax_history[0, index] = torch.maximum(self.amax_history[0, index], x.detach().abs().max())

    def update(self) -> None:
        """In place, as TE's fused kernel does it."""
        newest = self.amax_history[0].clone()
        rolled = self.amax_history.roll(-1, 0)
        largest = rolled.amax(0)
        # With a length of 1 the roll changes nothing, and the newest amax is still the one to follow.
        largest = torch.maximum(largest, newest)
        rolled[0] = 0
        self.amax_history.copy_(rolled)
        usable = torch.isfinite(largest) & (largest > 0)
        self.scale.copy_(torch.where(usable, self.largest / largest, self.scale))
        self.scale_inv.copy_(1 / self.scale)


class Module(nn.Module):
    """A stand-in for te.Linear (one weight) or te.LayerNormMLP (two)."""

    def __init__(self, sizes: list[tuple[int, int]], length: int = 4, format: str = "HYBRID") -> None:
        super().__init__()
        self.products = len(sizes)
        for index, (rows, columns) in enumerate(sizes):
            name = "weight" if self.products == 1 else f"fc{index + 1}_weight"
            self.register_parameter(name, nn.Parameter(torch.randn(rows, columns) / columns**0.5))
        self.layer_norm_weight = nn.Parameter(torch.ones(sizes[0][1]))
        self.length = length
        # Filled at the first call in FP8, as TE does.
        self.fp8_meta: dict[str, Any] = {"recipe": SimpleNamespace(fp8_format=SimpleNamespace(name=format))}
        self.seen: dict[str, list[Tensor]] = {"input": [], "weight": [], "grad_output": []}
        self.used: dict[str, list[float]] = {"input": [], "weight": [], "grad_output": []}

    @property
    def weights(self) -> list[Tensor]:
        return [p for n, p in self.named_parameters() if n.endswith("weight") and p.dim() == 2]

    def forward(self, x: Tensor) -> Tensor:
        if "scaling_fwd" not in self.fp8_meta:
            self.fp8_meta["scaling_fwd"] = Meta(3 * self.products, self.length, 448.0)
            self.fp8_meta["scaling_bwd"] = Meta(2 * self.products, self.length, 57344.0)
        forward = self.fp8_meta["scaling_fwd"]
        for index, weight in enumerate(self.weights):
            for offset, (role, tensor) in enumerate((("input", x), ("weight", weight))):
                forward.see(3 * index + offset, tensor)
                self.seen[role].append(tensor.detach())
                self.used[role].append(float(forward.scale[3 * index + offset]))
            x = x @ weight.t()
            x.register_hook(partial(self._backward, index))  # type: ignore[no-untyped-call]
        return x

    def _backward(self, index: int, gradient: Tensor) -> None:
        backward = self.fp8_meta["scaling_bwd"]
        backward.see(2 * index, gradient)
        self.seen["grad_output"].append(gradient)
        self.used["grad_output"].append(float(backward.scale[2 * index]))


def train(model: nn.Sequential, x: Tensor, factor: float = 1.0) -> None:
    """An FP8 step: forward tensors are updated when the autocast ends, backward ones after the backward."""
    modules = [module for module in model.modules() if isinstance(module, Module)]
    out = model(x)
    for module in modules:
        module.fp8_meta["scaling_fwd"].update()
    (out.square().sum() * factor).backward()
    for module in modules:
        module.fp8_meta["scaling_bwd"].update()


def train_on(model: nn.Sequential, batches: list[Tensor]) -> None:
    for x in batches:
        train(model, x)


def test_it_works() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Module([(24, 16)]), nn.GELU(), Module([(8, 24)]))
    watched = Watched(model, every=3)
    for index, factor in enumerate((1.0, 8.0, 0.1, 3.0, 1e4)):
        x = torch.randn(2, 5, 16) * factor
        step = watched.step(lambda x=x: train(model, x))  # type: ignore[misc]
        for path in ("0", "2"):
            module = model[int(path)]
            assert isinstance(module, Module)
            for role, tensors in module.seen.items():
                row = step.row(f"{path}.{role}")
                assert row[NUMEL] == tensors[-1].numel(), (path, role)
                assert row[AMAX] == float(tensors[-1].abs().max()), (index, path, role)
                assert row[SCALE] == module.used[role][-1], (index, path, role)
                assert torch.isnan(torch.tensor(row[SATURATED:])).all()
            if index % 3 == 0:
                past = [float(x.abs().max()) for x in module.seen["input"]]
                # Of a history of length 4, row 0 is empty: three are remembered.
                assert step.extra("history_amax", f"{path}.input") == pytest.approx(max(past[-3:]))
                assert step.extra("scale_frozen", f"{path}.input") == 0
    formats = {info.role: info.format for info in watched.catalogue}
    assert formats == {"input": "E4M3", "weight": "E4M3", "grad_output": "E5M2"}
    shapes = {info.name: info.shape for info in watched.catalogue}
    assert (shapes["0.weight"], shapes["2.input"]) == ((24, 16), (-1, 24))
    assert watched.collector.recipe == {"recipe": "transformer_engine"}


def test_observes_modules_of_two_products() -> None:
    model = nn.Sequential(Module([(32, 16), (8, 32)]))
    watched = Watched(model)
    step = watched.step(lambda: train(model, torch.randn(6, 16)))
    assert sorted(watched.names) == sorted(
        f"0.gemm{product}.{role}" for product in (1, 2) for role in ("input", "weight", "grad_output")
    )
    numel = {name: step.row(name)[NUMEL] for name in watched.names}
    assert (numel["0.gemm1.input"], numel["0.gemm2.input"], numel["0.gemm2.grad_output"]) == (96, 192, 48)
    module = model[0]
    assert isinstance(module, Module)
    # Backward runs through the second product first.
    for product, gradient in ((2, module.seen["grad_output"][0]), (1, module.seen["grad_output"][1])):
        assert step.row(f"0.gemm{product}.grad_output")[AMAX] == float(gradient.abs().max())


def test_gradient_accumulation_adds_up() -> None:
    model = nn.Sequential(Module([(24, 16)]))
    watched = Watched(model)
    batches = [torch.randn(4, 16) * factor for factor in (1.0, 9.0, 2.0)]
    step = watched.step(partial(train_on, model, batches))
    module = model[0]
    assert isinstance(module, Module)
    for role in ("input", "grad_output"):
        expected = max(float(x.abs().max()) for x in module.seen[role])
        assert step.row(f"0.{role}")[AMAX] == expected
    assert step.row("0.input")[NUMEL] == 3 * 4 * 16 and step.row("0.grad_output")[NUMEL] == 3 * 4 * 24


def test_a_backward_that_was_not_rolled_yet_is_read_from_row_zero() -> None:
    """Older versions of TE roll the history at the next call."""
    model = nn.Sequential(Module([(24, 16)]))
    watched = Watched(model)
    step = watched.step(lambda: model(torch.randn(4, 16)).sum().backward())
    assert step.row("0.grad_output")[AMAX] == 1.0 and step.row("0.grad_output")[SCALE] == 1.0
    assert step.row("0.input")[AMAX] == float(model[0].seen["input"][0].abs().max())  # type: ignore[index]


def test_a_tensor_of_zeros_freezes_its_scale() -> None:
    model = nn.Sequential(Module([(24, 16)], length=3))
    watched = Watched(model)
    for _ in range(3):
        step = watched.step(lambda: train(model, torch.zeros(4, 16)))
    assert step.extra("scale_frozen", "0.input") == 1 and step.extra("scale_frozen", "0.weight") == 0


@pytest.mark.parametrize(("name", "backward"), [("E4M3", E4M3), ("E5M2", E5M2), ("HYBRID", E5M2)])
def test_formats_are_those_of_the_recipe(name: str, backward: Any) -> None:
    model = nn.Sequential(Module([(24, 16)], format=name))
    watched = Watched(model)
    watched.step(lambda: train(model, torch.randn(4, 16)))
    formats = {info.role: info.format for info in watched.catalogue}
    assert formats["grad_output"] == backward.name
    assert formats["input"] == ("E5M2" if name == "E5M2" else "E4M3")


@pytest.mark.parametrize("state", [SimpleNamespace(), SimpleNamespace(scale=torch.ones(3)), None, "nonsense"])
def test_ignores_states_of_other_recipes(state: Any) -> None:
    """MXFP8, block and current scaling keep no history: nothing is observed, and nothing fails."""
    model = nn.Sequential(Module([(24, 16)]))
    module = model[0]
    assert isinstance(module, Module)
    watched = Watched(model)

    def work() -> None:
        model(torch.randn(4, 16)).sum().backward()
        module.fp8_meta |= {"scaling_fwd": state, "scaling_bwd": state}

    watched.step(work)
    module.forward = lambda x: x @ module.weights[0].t()  # type: ignore[method-assign]
    assert not watched.step(lambda: model(torch.randn(4, 16)).sum().backward()).observed.statistics.any()


def test_modules_that_never_ran_in_fp8_have_no_statistics() -> None:
    model = nn.Sequential(Module([(24, 16)]))
    assert Watched(model).step(lambda: None).observed.statistics.size == 0


def test_copies_and_evaluation_are_not_counted() -> None:
    model = nn.Sequential(Module([(24, 16)]))
    watched = Watched(model)
    model.eval()
    twin = copy.deepcopy(model).train()
    again = pickle.loads(pickle.dumps(model)).train()

    def work() -> None:
        for each in (model, twin, again):
            train(each, torch.randn(4, 16))

    seen = watched.step(work)
    assert not seen.observed.statistics.any()
