"""AdamW in 8 and 16 bits: against torch's AdamW, by hand, and what it refuses."""

from typing import Any

import pytest
import torch
from kernels.helpers.optimizer_training import make_model, one, train
from torch import nn

from fp8scope_kernels import StatisticsBuffer
from fp8scope_kernels.optimizer import LEVELS, MAX_BETA2, Fp8AdamW, Level
from fp8scope_kernels.optimizer_storage import FORMAT_OF


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
        # To one of the two neighbours, or to the nearest.
        assert stored.tolist() == pytest.approx(value.tolist(), rel=2**-3 if key == "exp_avg" else 1e-3)
    assert torch.equal(parameter, state["master"].float() * state["master_scale"].reciprocal())


def test_o1_is_adamw() -> None:
    ours, theirs = make_model(), make_model()
    options: dict[str, Any] = {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    losses = train(ours, Fp8AdamW(ours.parameters(), level="O1", **options), 30)
    assert losses == pytest.approx(train(theirs, torch.optim.AdamW(theirs.parameters(), **options), 30))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "beta1"), [(torch.float32, 0.9), (torch.bfloat16, 0.9), (torch.float32, 0.95)]
)
def test_training_reaches_adamws_loss(dtype: torch.dtype, beta1: float) -> None:
    exact, model = make_model(), make_model(dtype)
    betas = (beta1, 0.999)
    reference = train(exact, torch.optim.AdamW(exact.parameters(), lr=1e-2, betas=betas), 150)[-20:]
    losses = train(model, Fp8AdamW(model.parameters(), lr=1e-2, betas=betas), 150)[-20:]
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
    tensors = [v for s in optimizer.state.values() for k, v in s.items() if k in FORMAT_OF]
    assert sum(t.nbytes for t in tensors) == expected * sum(p.numel() for p in model.parameters())
    # One float32 for each block of a first moment, and one for each other tensor.
    scales = [v.numel() for s in optimizer.state.values() for k, v in s.items() if k.endswith("scale")]
    blocks = sum(-(-p.numel() // 256) for p in model.parameters())
    assert sum(scales) == (0 if level == "O1" else blocks + 2 * len(optimizer.state))


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
        ({"betas": (0.9, 0.9999)}, r"can be at most 0.999512, got \(0.9, 0.9999\).*too coarse to decay"),
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


def test_the_second_moment_decays_at_the_largest_beta() -> None:
    """Why beta2 is limited: up to there a moment loses something at every step without a gradient."""
    values = (torch.arange(16, dtype=torch.float32) + 16).tolist()
    parameter, optimizer = one(values, values, betas=(0.9, MAX_BETA2), lr=0.0)
    optimizer.step()
    state = optimizer.state[parameter]
    start = state["exp_avg_sq"].float() / state["exp_avg_sq_scale"]
    for _ in range(10):
        parameter.grad = torch.zeros(16)
        optimizer.step()
    assert bool((state["exp_avg_sq"].float() / state["exp_avg_sq_scale"] < start).all())


@pytest.mark.parametrize("beta1", [0.9, 0.95])
def test_the_first_moment_decays_at_the_right_rate(beta1: float) -> None:
    """Elements without a gradient, while the largest of their blocks keeps its own and with it the scale.

    Rounded to nearest, moments stay where they are: all below four subnormal steps at 0.9, and most at 0.95.
    """
    grad = torch.rand(4, 256, generator=torch.Generator().manual_seed(0)) + 0.5
    grad[:, 0] = 4.0
    parameter, optimizer = one(grad.tolist(), grad.tolist(), betas=(beta1, 0.999), lr=0.0)
    optimizer.step()
    grad[:, 1:] = 0.0
    state, means = optimizer.state[parameter], {}
    for step in range(1, 401):
        if step in (1, 40, 80):
            means[step] = (state["exp_avg"].float() / state["exp_avg_scale"][:, None])[:, 1:].mean().item()
        parameter.grad = grad
        optimizer.step()
    for step in (40, 80):
        assert (means[step] / means[1]) ** (1 / (step - 1)) == pytest.approx(beta1, abs=0.002)
    assert (state["exp_avg"].float()[:, 1:] != 0).sum() < 3


def test_foreach_changes_no_bit() -> None:
    results = []
    for foreach in (True, False):
        for level in LEVELS:
            model = make_model(torch.bfloat16)
            model.append(nn.LayerNorm(16))
            optimizer = Fp8AdamW(
                [
                    {"params": model[0].parameters(), "weight_decay": 0.0},
                    {"params": [*model[2].parameters(), *model[3].parameters()], "lr": 3e-3},
                ],
                lr=torch.tensor(1e-2),
                level=level,
                foreach=foreach,
            )
            results.append((train(model, optimizer, 6), optimizer.state_dict()["state"]))
    assert results[3:] and len(results) == 6
    for (losses, ours), (other_losses, theirs) in zip(results[:3], results[3:], strict=True):
        assert losses == other_losses
        for index, state in ours.items():
            for key, value in state.items():
                other = theirs[index][key]
                assert value == other if key == "step" else torch.equal(value.float(), other.float()), key


def test_parameters_without_a_gradient_leave_their_bucket_for_a_step() -> None:
    """As experts without tokens: the bits are those of each parameter by itself."""
    weights = []
    for foreach in (True, False):
        random = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(size, generator=random)) for size in (3, 300, 256)]
        optimizer = Fp8AdamW(parameters, lr=0.1, foreach=foreach)
        for step in range(5):
            for number, parameter in enumerate(parameters):
                gradient = torch.randn(parameter.shape, generator=random)
                parameter.grad = None if step % 3 == number else gradient
            optimizer.step()
        weights.append([parameter.detach() for parameter in parameters])
    assert all(torch.equal(joined, single) for joined, single in zip(*weights, strict=True))


def test_a_tensor_as_learning_rate_is_read_at_every_step() -> None:
    parameter, optimizer = one([1.0], [1.0], lr=torch.tensor(0.1), weight_decay=0.0)
    optimizer.step()
    optimizer.param_groups[0]["lr"].fill_(0.0)
    before = parameter.item()
    optimizer.step()
    assert before == pytest.approx(0.9, abs=1e-3)
    assert parameter.item() == pytest.approx(before, rel=1e-6)


def test_a_sparse_gradient_changes_nothing() -> None:
    first, optimizer = one([1.0], [1.0])
    second = nn.Parameter(torch.ones(2))
    second.grad = torch.ones(2).to_sparse()
    optimizer.add_param_group({"params": [second]})
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()
    assert first.item() == 1.0
    assert not optimizer.state[first]
