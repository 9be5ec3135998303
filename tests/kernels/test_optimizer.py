"""AdamW in 8 and 16 bits: against torch's AdamW, by hand, and what it refuses."""

from typing import Any

import pytest
import torch
from kernels.helpers.optimizer_training import make_model, one, train
from torch import Tensor

from fp8scope_kernels import StatisticsBuffer
from fp8scope_kernels.optimizer import MAX_BETAS, Fp8AdamW, Level


def test_it_works() -> None:
    """The first step by hand: what is stored, in what, with which scale."""
    parameter, optimizer = one([1.0, -2.0, 0.5], [0.5, -1.0, 0.001], lr=0.1, weight_decay=0.5)
    optimizer.step()
    state = optimizer.state[parameter]
    grad, start = torch.tensor([0.5, -1.0, 0.001]), torch.tensor([1.0, -2.0, 0.5])
    assert state["step"] == 1
    # The moments divide to the gradient's sign at the first step.
    weight = start * (1 - 0.1 * 0.5) - 0.1 * grad.sign()
    for key, dtype, largest, value in (
        ("exp_avg", torch.float8_e4m3fn, 448.0, 0.1 * grad),
        ("exp_avg_sq", torch.float16, 65504.0, 0.001 * grad**2),
        ("master", torch.float16, 65504.0, weight),
    ):
        assert state[key].dtype == dtype
        assert state[f"{key}_scale"].item() == pytest.approx(largest / value.abs().max().item(), rel=1e-5)
        stored = state[key].float() / state[f"{key}_scale"]
        assert stored.tolist() == pytest.approx(value.tolist(), rel=2**-4 if key == "exp_avg" else 1e-3)
    assert torch.equal(parameter, state["master"].float() * state["master_scale"].reciprocal())


def test_o1_is_adamw() -> None:
    ours, theirs = make_model(), make_model()
    options: dict[str, Any] = {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    losses = train(ours, Fp8AdamW(ours.parameters(), level="O1", **options), 30)
    assert losses == pytest.approx(train(theirs, torch.optim.AdamW(theirs.parameters(), **options), 30))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_reaches_adamws_loss(dtype: torch.dtype) -> None:
    exact, model = make_model(), make_model(dtype)
    reference = train(exact, torch.optim.AdamW(exact.parameters(), lr=1e-2), 150)[-20:]
    losses = train(model, Fp8AdamW(model.parameters(), lr=1e-2), 150)[-20:]
    assert sum(reference) / 20 < 0.2
    assert sum(losses) / 20 == pytest.approx(sum(reference) / 20, rel=0.05)


@pytest.mark.parametrize(
    ("level", "dtype", "expected"),
    [("O1", "float32", 8), ("O1", "bfloat16", 12), ("O2", "float32", 5), ("O2", "bfloat16", 5)],
)
def test_bytes_of_state(level: Level, dtype: str, expected: int) -> None:
    model = make_model(getattr(torch, dtype))
    optimizer = Fp8AdamW(model.parameters(), level=level)
    train(model, optimizer, 1)
    tensors = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim()]
    assert sum(t.nbytes for t in tensors) == expected * sum(p.numel() for p in model.parameters())


def test_closure() -> None:
    parameter, optimizer = one([1.0], [0.0])

    def closure() -> float:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    assert optimizer.step(closure) == 1.0
    assert parameter.item() < 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "O4"}, "level must be one of O1, O2, O3, got 'O4'"),
        ({"lr": -1.0}, "must not be negative"),
        ({"eps": -1.0}, "must not be negative"),
        ({"weight_decay": -1.0}, "must not be negative"),
        ({"betas": (0.9, 1.0)}, "from 0 to less than 1"),
        ({"betas": (0.95, 0.999)}, r"at most 0.9375 and 0.999512, got \(0.95, 0.999\)"),
        ({"betas": (0.9, 0.9999)}, "too coarse to decay"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one([1.0], [1.0], **options)


def test_o1_takes_any_beta() -> None:
    one([1.0], [1.0], level="O1", betas=(0.99, 0.9999))[1].step()


def test_refuses_invalid_parameters_and_gradients() -> None:
    with pytest.raises(TypeError, match="Only floating-point parameters"):
        Fp8AdamW([torch.zeros(2, dtype=torch.int64)])
    parameter, optimizer = one([1.0, 2.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="1 parameters have no name"):
        optimizer.observe(StatisticsBuffer(), [])
    parameter.grad = torch.ones(2).to_sparse()
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_moments_decay_at_the_largest_betas(key: str) -> None:
    """Why betas are limited: up to there a moment loses something at every step without a gradient."""
    values = (torch.arange(16, dtype=torch.float32) + 16).tolist()
    parameter, optimizer = one(values, values, betas=MAX_BETAS, lr=0.0)
    optimizer.step()
    state = optimizer.state[parameter]
    start = state[key].float() / state[f"{key}_scale"]
    for _ in range(10):
        parameter.grad = torch.zeros(16)
        optimizer.step()
    assert bool((state[key].float() / state[f"{key}_scale"] < start).all())
