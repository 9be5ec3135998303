"""Experts in FP8: rows of all experts of a layer, and of each where they are few."""

import logging

import pytest
import torch
from agent.helpers.watching import AMAX, NUMEL, SCALE, Watched
from agent.helpers.wire_server import WireServer
from torch import Tensor, nn
from torch._C import _len_torch_function_stack

from fp8scope.config import Settings, settings_from
from fp8scope.control.precision import find, fp8_layers_of, precision_of, set_precision, set_products
from fp8scope.control.suspended_hooks import without_hooks
from fp8scope.observe.memory_account import memory_account
from fp8scope.observe.timing.flops import training_precision
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run
from fp8scope_kernels import EXPERT_TENSORS, CurrentScaling, DelayedScaling, Fp8GroupedLinear, Recipe, convert

EXPERTS, WIDTH = 3, 32
OFFSETS = torch.tensor([10, 10, 16])


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = torch.nn.functional.grouped_mm(x, self.w.mT, offs=OFFSETS.int())
        return output


class Mixture(nn.Module):
    """A module that `convert` finds, and a layer that a script made."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = Experts()
        convert(self, recipe)
        self.down = Fp8GroupedLinear(EXPERTS, WIDTH, WIDTH, recipe=recipe)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self.experts(x), OFFSETS)
        return output


def train(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


LAYERS = ("experts.w", "down")
ROLES = ("input", "weight", "grad_output")


def test_it_works() -> None:
    model, x = Mixture(DelayedScaling(history_length=4)), torch.randn(16, WIDTH)
    watched = Watched(model)
    step = watched.step(lambda: train(model, x))
    assert set(watched.names) == {
        f"{layer}.{path}{role}"
        for layer in LAYERS
        for path in ("", *(f"expert_{expert}." for expert in range(EXPERTS)))
        for role in ROLES
    }
    assert step.row("experts.w.input")[NUMEL] == 16 * WIDTH
    assert step.row("experts.w.input")[AMAX] == float(x.abs().max())
    assert step.row("experts.w.input")[SCALE] != step.row("experts.w.input")[SCALE], "unknown"
    assert step.row("experts.w.expert_0.input")[AMAX] == float(x[:10].abs().max())
    assert step.row("experts.w.expert_1.input")[NUMEL] == 0
    assert step.row("experts.w.expert_2.input")[SCALE] == pytest.approx(448 / float(x[10:].abs().max()))
    assert step.histograms["down.weight"].sum() == 2 * WIDTH * WIDTH
    assert step.histograms["down.expert_2.weight"].sum() == WIDTH * WIDTH
    assert step.extra("history_amax", "experts.w.input") == float(x.abs().max())
    # An expert that never had tokens is not frozen.
    assert step.extra("scale_frozen", "experts.w.input") == 0
    nothing = step.extra("scale_frozen", "experts.w.expert_1.input")
    assert nothing != nothing
    assert watched.collector.recipe == DelayedScaling(history_length=4).to_dict()
    assert training_precision(model, None) == "fp8"
    # Two layers, three tensors, three experts: a scale, a history of 4 and a counter of 8 bytes.
    assert memory_account([model], [])["scaling"] == 2 * 3 * 3 * (4 + 4 * 4 + 8)


def test_the_server_gets_a_row_for_each_expert(server: WireServer, settings: Settings) -> None:
    model, x = Mixture(DelayedScaling()), torch.randn(16, WIDTH)
    run = Run(settings, blank_registration("experts"))
    assert run.watch(model) == 2 * len(ROLES) * (1 + EXPERTS)
    for _ in range(2):
        with run.step():
            train(model, x)
    report = run.finish()
    assert report.complete and report.errors == 0
    catalogue = next(iter(server.run.catalogues.values()))
    tensors = {tensor["name"]: index for index, tensor in enumerate(catalogue)}
    assert catalogue[tensors["experts.w.expert_2.weight"]]["module"] == "experts.w.expert_2"
    statistics = server.run.rows[1]["tensors"]
    amax = statistics["amax"][tensors["down.expert_0.weight"]]
    assert amax == float(model.down.weight[0].detach().abs().max())
    assert statistics["scale"][tensors["down.expert_0.weight"]] == pytest.approx(448 / amax)
    # Without tokens, and of several histories, a scale is left out.
    assert statistics["scale"][tensors["down.expert_1.weight"]] is None
    assert statistics["scale"][tensors["down.weight"]] is None


class PlainMixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.experts(x)
        return output


def test_a_bf16_run_has_the_rows_of_its_fp8_run(server: WireServer, settings: Settings) -> None:
    model, x = PlainMixture(), torch.randn(16, WIDTH)
    run = Run(settings, blank_registration("experts in BF16"))
    assert run.watch(model) == len(ROLES)
    for _ in range(2):
        with run.step():
            train(model, x)
    report = run.finish()
    assert report.complete and report.errors == 0
    catalogue = next(iter(server.run.catalogues.values()))
    assert [tensor["name"] for tensor in catalogue] == [f"experts.w.{role}" for role in ROLES]
    statistics = server.run.rows[1]["tensors"]
    assert statistics["amax"][0] == float(x.abs().max())
    assert statistics["amax"][1] == float(model.experts.w.detach().abs().max())
    assert statistics["nonfinite"] == [0, 0, 0]
    # The run has ended: nothing of it is left in the model.
    assert not model.experts._forward_pre_hooks and not model.experts._forward_hooks
    assert not model.experts._forward_hooks_always_called


def test_a_failure_while_experts_are_observed_does_not_reach_the_script() -> None:
    model = PlainMixture()
    watched = Watched(model)
    with pytest.raises(RuntimeError, match="nothing to multiply"):
        model.experts.register_forward_hook(fail)
        model(torch.randn(16, WIDTH))
    assert not _len_torch_function_stack()
    model.experts._forward_hooks.popitem()
    assert watched.step(lambda: train(model, torch.randn(16, WIDTH))).row("experts.w.input")[NUMEL] > 0


def fail(*_: object) -> None:
    raise RuntimeError("nothing to multiply")


def test_many_experts_have_common_rows(caplog: pytest.LogCaptureFixture) -> None:
    assert settings_from(environment={}).expert_tensors == Settings().expert_tensors == EXPERT_TENSORS
    assert settings_from(environment={"FP8SCOPE_EXPERT_TENSORS": "17"}).expert_tensors == 17
    model = Mixture(CurrentScaling())
    with caplog.at_level(logging.INFO, logger="fp8scope"):
        watched = Watched(model, expert_tensors=17)
    watched.step(lambda: train(model, torch.randn(16, WIDTH)))
    assert watched.names == [f"{layer}.{role}" for layer in LAYERS for role in ROLES]
    assert watched.tensors == 6
    assert "18 tensors of single experts are counted together" in caplog.text
    assert Watched(Mixture(CurrentScaling()), expert_tensors=18).tensors == 6 + 18


def test_experts_can_be_switched_and_left_uncounted() -> None:
    model, x = Mixture(CurrentScaling()), torch.randn(16, WIDTH)
    assert [path for path, _ in fp8_layers_of(model)] == list(LAYERS)
    ((path, products),) = find([model], "experts.*").layers
    assert path == "experts.w" and precision_of(products) == "fp8"
    set_products(products, ["fprop"])
    set_products(products, None)
    set_precision(products, "bf16")
    watched = Watched(model)
    step = watched.step(lambda: train(model, x))
    assert step.row("experts.w.input")[NUMEL] == 0 and step.row("down.input")[NUMEL] == 16 * WIDTH
    set_precision(products, "fp8")

    def hidden() -> None:
        with without_hooks([model]):
            train(model, x)

    assert watched.step(hidden).row("experts.w.input")[NUMEL] == 0
    assert watched.step(lambda: train(model, x)).row("experts.w.input")[NUMEL] == 16 * WIDTH
