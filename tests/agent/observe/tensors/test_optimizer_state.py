"""What the optimizer holds and does: seen in sampled steps, and not changed."""

import copy
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from agent.helpers.watching import AMAX, NONFINITE, NUMEL, SATURATED, SCALE, Watched
from torch import Tensor, nn

from fp8scope_kernels import Fp8AdamW


def model_of(width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.LayerNorm(width), nn.Linear(width, 8, bias=False))


def weight_of(model: nn.Sequential) -> nn.Parameter:
    """The first layer's."""
    weight = model[0].weight
    assert isinstance(weight, nn.Parameter)
    return weight


def keep(seen: dict[str, Tensor], gradient: Tensor) -> None:
    seen["grad"] = gradient.clone()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
    torch.manual_seed(1)
    (model(torch.randn(4, 16)).square().mean() * factor).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_it_works() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watched = Watched(model, optimizer, every=2)
    weight = weight_of(model)
    for index in range(4):
        before = weight.detach().clone()
        seen: dict[str, Tensor] = {}
        weight.register_hook(partial(keep, seen))  # type: ignore[no-untyped-call]
        step = watched.step(lambda: train(model, optimizer))
        names = [name for name in watched.names if name.startswith("0.weight.")]
        assert names == [f"0.weight.{role}" for role in ("weight_grad", "update", "exp_avg", "exp_avg_sq")]
        if index % 2:
            assert all(step.row(name)[NUMEL] == 0 for name in names)
            continue
        state = optimizer.state[weight]
        update = weight.detach().double() - before.double()
        expected = {key: state[key] for key in ("exp_avg", "exp_avg_sq")}
        expected |= {"weight_grad": seen["grad"], "update": update}
        for role, tensor in expected.items():
            row = step.row(f"0.weight.{role}")
            assert row[NUMEL] == tensor.numel() and row[AMAX] == pytest.approx(float(tensor.abs().max()))
            assert row[NONFINITE] == 0 and np.isnan(row[SCALE:SATURATED]).all()
        ratio = float(update.norm() / before.double().norm())
        assert step.extra("update_ratio", "0.weight.update") == pytest.approx(ratio, rel=1e-6)
        assert np.isnan(step.extra("update_ratio", "0.weight.weight_grad"))
    # Matrices only: no bias, no norm.
    assert {info.module for info in watched.catalogue if "exp_avg" in info.role} == {"0.weight", "2.weight"}


def test_does_not_change_the_training() -> None:
    def weights(watch: bool) -> list[Tensor]:
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        watched = Watched(model, optimizer, every=1) if watch else None
        for _ in range(4):
            train(model, optimizer) if watched is None else watched.step(lambda: train(model, optimizer))
        return [parameter.detach() for parameter in model.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(weights(True), weights(False), strict=True))


@pytest.mark.parametrize(
    ("make", "moments"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), set()),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {"momentum_buffer"}),
        (lambda p: torch.optim.RMSprop(p, centered=True), {"square_avg", "grad_avg"}),
        (lambda p: torch.optim.Adam(p, amsgrad=True), {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        (lambda p: torch.optim.AdamW(p, foreach=True), {"exp_avg", "exp_avg_sq"}),
    ],
    ids=["sgd", "momentum", "rmsprop", "amsgrad", "foreach"],
)
def test_works_with_any_optimizer(make: Any, moments: set[str]) -> None:
    model = model_of()
    optimizer = make(model.parameters())
    watched = Watched(model, optimizer)
    step = watched.step(lambda: train(model, optimizer))
    roles = {info.role for info in watched.catalogue if info.name.startswith("0.weight.")}
    assert roles == {"weight_grad", "update", *moments}
    assert all(step.row(f"0.weight.{role}")[NUMEL] == 32 * 16 for role in moments)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_our_own_optimizer_counts_its_state_itself(level: Any) -> None:
    model = model_of()
    optimizer = Fp8AdamW(model.parameters(), level=level)
    watched = Watched(model, optimizer, every=2)
    steps = [watched.step(lambda: train(model, optimizer)) for _ in range(2)]
    formats = {info.name: info.format for info in watched.catalogue}
    if level == "O1":
        assert "0.weight.master" not in formats and formats["0.weight.exp_avg"] == ""
        assert steps[1].row("0.weight.exp_avg")[NUMEL] == 0
        return
    # Every step, with everything that a quantised tensor has.
    assert formats["0.weight.exp_avg"] == "E4M3" and formats["0.weight.exp_avg_sq"] == "FP16"
    for step in steps:
        row = step.row("0.weight.exp_avg")
        assert row[NUMEL] == 32 * 16 and row[AMAX] * row[SCALE] == pytest.approx(448)
    assert steps[0].row("0.weight.update")[NUMEL] and not steps[1].row("0.weight.update")[NUMEL]


def test_large_weights_are_subsampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8scope.observe.tensors.optimizer_state.UPDATE_ELEMENTS", 1024)
    linear = nn.Linear(64, 48, bias=False)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.5)
    watched = Watched(linear, optimizer)

    def work() -> None:
        linear.weight.grad = linear.weight.detach().clone()
        optimizer.step()

    step = watched.step(work)
    assert step.row("weight.update")[NUMEL] == 1024
    assert step.row("weight.weight_grad")[NUMEL] == 3 * 1024
    assert step.extra("update_ratio", "weight.update") == pytest.approx(0.5, rel=1e-5)


def test_a_zero_weight_has_no_update_ratio() -> None:
    linear = nn.Linear(16, 16, bias=False)
    nn.init.zeros_(linear.weight)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.5)
    watched = Watched(linear, optimizer)
    step = watched.step(lambda: train(linear, optimizer))
    assert step.row("weight.update")[NUMEL] == 256 and np.isnan(step.extra("update_ratio", "weight.update"))


def test_tolerates_missing_frozen_and_non_finite_gradients() -> None:
    model = model_of()
    model[2].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watched = Watched(model, optimizer)

    def work() -> None:
        model[0].weight.grad = torch.full((32, 16), torch.nan)
        optimizer.step()

    step = watched.step(work)
    assert step.row("0.weight.weight_grad")[NONFINITE] == 32 * 16
    assert step.row("2.weight.weight_grad")[NUMEL] == 0


def test_gradients_are_unscaled_as_for_the_optimizer() -> None:
    """Under a GradScaler: divided by its factor, and not at all in a step that it skips."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    watched = Watched(model, optimizer)
    seen = []

    def work(factor: float) -> None:
        loss = model(torch.ones(4, 16)).square().mean() * factor
        (gradient,) = torch.autograd.grad(loss, weight_of(model), retain_graph=True)
        seen.append(float(gradient.abs().max()))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    assert watched.step(lambda: work(1.0)).row("0.weight.weight_grad")[AMAX] == pytest.approx(seen[0])
    assert watched.step(lambda: work(float("inf"))).row("0.weight.weight_grad")[NUMEL] == 0


def test_counts_once_when_watched_twice_and_ignores_copies() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    watched = Watched(model, optimizer)
    watched.collector.watch(model, optimizer)
    assert len(optimizer._optimizer_step_pre_hooks) == len(optimizer._optimizer_step_post_hooks) == 1
    step = watched.step(lambda: train(model, optimizer))
    assert step.row("0.weight.weight_grad")[NUMEL] == 32 * 16
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert len(twin.state) == len(optimizer.state)


def test_an_internal_failure_does_not_stop_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: Tensor) -> None:
        raise MemoryError("no room")

    model = model_of()
    before = weight_of(model).detach().clone()
    optimizer = torch.optim.AdamW(model.parameters())
    watched = Watched(model, optimizer)
    monkeypatch.setattr("fp8scope.observe.tensors.optimizer_state.measure", broken)
    with pytest.raises(MemoryError):
        watched.step(lambda: train(model, optimizer))
    assert not torch.equal(weight_of(model), before)
