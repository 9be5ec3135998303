"""BF16 from FP32 units."""

import pytest
import torch
from torch import nn

from fp8scope.demo import arithmetic
from fp8scope.demo.arithmetic import RoundedLinear, rounded
from fp8scope_kernels import DelayedScaling, Fp8Linear, convert


@pytest.fixture
def no_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "has_units", lambda: False)


def test_it_works(no_units: None) -> None:
    model = nn.Sequential(nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 4))
    assert arithmetic.prepare(model) == 2
    with arithmetic.bf16():
        result = model(torch.randn(5, 32))
    assert torch.equal(result, result.bfloat16().float())
    assert "FP32 units" in arithmetic.describe()


def test_equals_the_results_of_bf16_units() -> None:
    torch.manual_seed(1)
    plain = nn.Linear(64, 48)
    other = RoundedLinear(64, 48)
    other.load_state_dict(plain.state_dict())
    x, grad = torch.randn(40, 64), torch.randn(40, 48).bfloat16()
    y = torch.nn.functional.linear(x.bfloat16(), plain.weight.bfloat16(), plain.bias.bfloat16())
    plain_x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        torch.autograd.backward(plain(plain_x), grad)
    mine_x = x.clone().requires_grad_()
    mine = other(mine_x)
    torch.autograd.backward(mine, grad.float())
    # Sums are taken in another order: one unit in BF16's last place, now and then.
    torch.testing.assert_close(mine, y.float(), atol=0.02, rtol=0.01)
    assert mine_x.grad is not None and plain_x.grad is not None
    torch.testing.assert_close(mine_x.grad, plain_x.grad, atol=0.02, rtol=0.01)
    assert other.weight.grad is not None and plain.weight.grad is not None
    torch.testing.assert_close(other.weight.grad, plain.weight.grad, atol=0.05, rtol=0.01)
    assert torch.equal(mine, mine.bfloat16().float())
    assert torch.equal(mine_x.grad, mine_x.grad.bfloat16().float())


def test_fp8_layers_are_not_changed(no_units: None) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 5))
    convert(model, DelayedScaling())
    assert arithmetic.prepare(model) == 1
    assert type(model[0]) is Fp8Linear
    assert type(model[1]) is RoundedLinear


def test_changes_nothing_on_a_cpu_with_bf16_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "has_units", lambda: True)
    model = nn.Linear(4, 4)
    assert arithmetic.prepare(model) == 0
    assert type(model) is nn.Linear
    with arithmetic.bf16():
        assert model(torch.randn(2, 4)).dtype == torch.bfloat16


def test_rounding_rounds_the_gradient_too() -> None:
    x = torch.tensor([1.0, 1.0 + 2**-10], requires_grad=True)
    y = rounded(x)
    assert y.tolist() == [1.0, 1.0]
    torch.autograd.backward(y, torch.tensor([1.0 + 2**-10, 2.0]))
    assert x.grad is not None and x.grad.tolist() == [1.0, 2.0]
