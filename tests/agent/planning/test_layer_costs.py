"""Measured costs: bytes that can be counted by hand, and times of a clock that the test owns."""

from collections.abc import Iterator

import torch
from torch import nn

import fp8scope
from fp8scope.planning.layer_costs import ADAM_BYTES, measure, stage_scalars


def test_it_works() -> None:
    layers = [nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 16, bias=False)]
    batch = torch.randn(8, 32)
    first, relu, last = measure(layers, batch, repeats=2)
    assert [cost.name for cost in (first, relu, last)] == ["0", "1", "2"]
    # Weight and gradient in float32, and two moments. The layer keeps its input; ReLU keeps its output.
    assert first.weights == 32 * 64 * (4 + 4 + ADAM_BYTES) and relu.weights == 0
    assert first.activations == 8 * 32 * 4 and relu.activations == 8 * 64 * 4
    assert all(cost.seconds > 0 for cost in (first, relu, last))


def test_seconds_are_the_median_after_a_first_pass() -> None:
    def ticks() -> Iterator[float]:
        now = 0.0
        # Each pass reads the clock twice. The first one is not counted.
        for seconds in (100.0, 1.0, 9.0, 2.0):
            yield now
            yield (now := now + seconds)

    clock = ticks()
    (cost,) = measure([nn.Linear(4, 4)], torch.randn(2, 4), repeats=3, clock=lambda: next(clock))
    assert cost.seconds == 2.0


def test_frozen_weights_have_neither_gradient_nor_moments_and_gradients_stay() -> None:
    layer = nn.Linear(4, 4)
    layer.bias.requires_grad_(False)
    grad = layer.weight.grad = torch.ones(4, 4)
    (cost,) = measure([layer], torch.randn(2, 4), optimizer_bytes=0)
    assert cost.weights == 16 * 8 + 4 * 4
    assert layer.weight.grad is grad and bool((grad == 1).all()) and layer.bias.grad is None


def test_fp8_layers_keep_quantised_operands() -> None:
    """In bfloat16 where there are no FP8 units: the input's and the weight's."""
    layers = nn.Sequential(nn.Linear(32, 64, bias=False))
    fp8scope.convert(layers, fp8scope.CurrentScaling())
    (cost,) = measure(list(layers), torch.randn(16, 32))
    assert 2 * (16 * 32 + 32 * 64) <= cost.activations <= 2 * (16 * 32 + 32 * 64) + 64


def test_stages_have_scalars_by_name() -> None:
    assert stage_scalars(2, 0.5, 3e9) == {"stage_2_seconds": 0.5, "stage_2_memory": 3e9}
