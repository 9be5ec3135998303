"""AdamW in 8 and 16 bits where values are odd: vanishing, bad, empty, and any within FP16's reach."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.helpers.optimizer_training import one
from torch import nn

from fp8scope_kernels import amax_to_scale
from fp8scope_kernels.optimizer import LEVELS, Level
from fp8scope_kernels.optimizer_storage import FP16

levels = pytest.mark.parametrize("level", LEVELS)


def test_it_works() -> None:
    """A second moment never vanishes.

    One spike of 1e6, and the others' squares are beyond FP16's reach: they do not leap all the same.
    """
    parameter, optimizer = one([1.0, 1.0], [1e6, 1e-3], lr=0.1, weight_decay=0.0, eps=1e-8)
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg_sq"].tolist()[1] == FP16.smallest_subnormal
    for _ in range(20):
        before = parameter.detach().clone()
        parameter.grad = torch.tensor([1e-3, 1e-3])
        optimizer.step()
        # No step of Adam's is much longer than the learning rate.
        assert (parameter - before).abs().max() < 0.11


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@levels
def test_a_non_finite_gradient_stays_visible(level: Level, bad: float) -> None:
    parameter, optimizer = one([1.0, 2.0], [bad, 1.0], level=level)
    optimizer.step()
    assert parameter.isnan().tolist() == [True, False]


def test_zeros_and_empty_tensors() -> None:
    zero, optimizer = one([0.0, 0.0], [0.0, 0.0])
    empty = nn.Parameter(torch.zeros(0, 3))
    empty.grad = torch.zeros(0, 3)
    single = nn.Parameter(torch.tensor(2.0))
    single.grad = torch.tensor(1.0)
    optimizer.add_param_group({"params": [empty, single]})
    for _ in range(3):
        optimizer.step()
    assert zero.tolist() == [0.0, 0.0]
    assert 1.99 < single.item() < 2.0


def test_a_parameter_without_gradient_is_left() -> None:
    parameter, optimizer = one([0.1, 0.2], [0.0, 0.0])
    parameter.grad = None
    before = parameter.detach().clone()
    optimizer.step()
    assert torch.equal(parameter, before)


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=40)
def test_weights_stay_within_fp16_of_float32(values: list[float], seed: int) -> None:
    """After a step, each weight is AdamW's to half a unit in FP16's last place, or of its subnormals."""
    grads = torch.randn(len(values), generator=torch.Generator().manual_seed(seed))
    parameter, optimizer = one(values, grads.tolist(), lr=0.01)
    exact = nn.Parameter(torch.tensor(values))
    exact.grad = grads
    master = amax_to_scale(exact.detach().abs().max(), FP16)
    # The master weight is rounded before the first step, too: two roundings.
    torch.optim.AdamW([exact], lr=0.01).step()
    optimizer.step()
    floor = FP16.smallest_subnormal * torch.maximum(
        1 / master, 1 / optimizer.state[parameter]["master_scale"]
    )
    size = torch.maximum(exact.abs(), torch.tensor(values).abs())
    assert bool(((parameter - exact).abs() <= 1.01 * size * 2**-10 + floor + 1e-6 * size + 1e-7).all())
