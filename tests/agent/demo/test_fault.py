"""The demo's fault: stale gradient scales, and what it takes for them to do harm."""

import pytest
import torch
from torch import Tensor, nn

from fp8scope.demo.fault import LOSS_SCALE, freeze_gradient_scales
from fp8scope_kernels import (
    STATISTICS,
    CurrentScaling,
    DelayedScaling,
    Recipe,
    StatisticsBuffer,
    convert,
    observe,
)

SATURATED, SCALE, NUMEL = (STATISTICS.index(name) for name in ("saturated", "scale", "numel"))
# The largest element itself may come out a rounding error above the largest value of the format.
CLEAN = 0.001


class Bench:
    """Two FP8 layers, and one step of their gradients at a time."""

    def __init__(self, recipe: Recipe) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        convert(self.model, recipe)
        self.statistics = StatisticsBuffer()
        observe(self.model, self.statistics)
        self.roles = [entry.role for entry in self.statistics.catalogue]

    def step(self, loss_scale: float = 1.0) -> dict[str, Tensor]:
        """The rows of each role: float64 [layers, statistics]."""
        self.statistics.zero_()
        self.model.zero_grad()
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))
        torch.autograd.backward(self.model(x).square().mean() * loss_scale)
        rows = self.statistics.data.clone()
        return {
            role: rows[[index for index, known in enumerate(self.roles) if known == role]]
            for role in set(self.roles)
        }


def rate(rows: Tensor) -> float:
    return float((rows[:, SATURATED] / rows[:, NUMEL]).max())


def test_it_works() -> None:
    bench = Bench(DelayedScaling())
    before = bench.step()
    assert freeze_gradient_scales(bench.model) == 2
    for _ in range(20):
        after = bench.step(LOSS_SCALE)
    assert torch.equal(after["grad_output"][:, SCALE], before["grad_output"][:, SCALE])
    assert rate(after["grad_output"]) > 0.2
    assert rate(before["grad_output"]) < CLEAN


def test_forward_scales_are_still_updated() -> None:
    bench = Bench(DelayedScaling(history_length=1))
    bench.step()
    freeze_gradient_scales(bench.model)
    for role in ("input", "weight"):
        before = bench.step()[role][:, SCALE]
        with torch.no_grad():
            for parameter in bench.model.parameters():
                parameter.mul_(2)
        bench.step()
        after = bench.step()[role][:, SCALE]
        assert not torch.equal(after, before), role


def test_working_scales_recover_within_a_few_steps() -> None:
    bench = Bench(DelayedScaling())
    bench.step()
    assert rate(bench.step(LOSS_SCALE)["grad_output"]) > 0.2
    # One step a layer: what is clipped in one hides from the layer before how large its gradient will be.
    bench.step(LOSS_SCALE)
    assert rate(bench.step(LOSS_SCALE)["grad_output"]) < CLEAN


def test_stale_scales_are_harmless_while_magnitudes_are_stable() -> None:
    bench = Bench(DelayedScaling())
    bench.step()
    freeze_gradient_scales(bench.model)
    assert rate(bench.step()["grad_output"]) < CLEAN


def test_dividing_by_the_loss_scale_is_exact() -> None:
    plain, scaled = Bench(DelayedScaling()), Bench(DelayedScaling())
    for bench in (plain, scaled):
        for parameter in bench.model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    plain.step()
    scaled.step(LOSS_SCALE)
    for one, other in zip(plain.model.parameters(), scaled.model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(other.grad / LOSS_SCALE, one.grad, rtol=1e-5, atol=1e-9)


def test_current_scaling_cannot_go_stale() -> None:
    bench = Bench(CurrentScaling())
    with pytest.raises(ValueError, match="no delayed scaling"):
        freeze_gradient_scales(bench.model)


def test_a_model_without_fp8_has_nothing_to_freeze() -> None:
    assert freeze_gradient_scales(nn.Linear(16, 16)) == 0
