"""AdamW in 8 and 16 bits: against torch's AdamW, by hand, through checkpoints, and over ranks."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from process_group import run_ranks
from torch import Tensor, nn
from torch import distributed as dist

from fp8scope_kernels import E4M3, STATISTICS, StatisticsBuffer, amax_to_scale
from fp8scope_kernels.gradients import Fp8GradientReducer
from fp8scope_kernels.optimizer import FP16, LEVELS, MAX_BETAS, Fp8AdamW, Level

levels = pytest.mark.parametrize("level", LEVELS)


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[float]:
    losses = []
    dtype = next(model.parameters()).dtype
    for step in range(first, first + steps):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        loss = (model(x.to(dtype)).float() - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def one(values: list[float], grad: list[float], **options: Any) -> tuple[nn.Parameter, Fp8AdamW]:
    parameter = nn.Parameter(torch.tensor(values))
    parameter.grad = torch.tensor(grad)
    return parameter, Fp8AdamW([parameter], **options)


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


# --- odd values -----------------------------------------------------------------------------------------


def test_a_second_moment_never_vanishes() -> None:
    """One spike of 1e6, and the others' squares are beyond FP16's reach: they do not leap all the same."""
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
def test_a_bad_gradient_stays_visible(level: Level, bad: float) -> None:
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
@settings(max_examples=40, deadline=None)
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


def test_closure() -> None:
    parameter, optimizer = one([1.0], [0.0])

    def closure() -> float:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    assert optimizer.step(closure) == 1.0
    assert parameter.item() < 1.0


# --- telemetry ------------------------------------------------------------------------------------------


def test_every_stored_tensor_is_observable() -> None:
    model, buffer = make_model(), StatisticsBuffer()
    optimizer = Fp8AdamW(model.parameters())
    assert optimizer.observe(buffer, model.named_parameters()) == 12
    train(model, optimizer, 3)
    buffer.zero_()
    train(model, optimizer, 1, first=3)
    rows = {
        i.name: dict(zip(STATISTICS, row.tolist(), strict=True))
        for i, row in zip(buffer.catalogue, buffer.data, strict=True)
    }
    assert [info.format for info in buffer.catalogue[:3]] == ["E4M3", "FP16", "FP16"]
    assert (buffer.catalogue[0].module, buffer.catalogue[0].role) == ("0.weight", "exp_avg")
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        for key, format in (("exp_avg", E4M3), ("exp_avg_sq", FP16), ("master", FP16)):
            row = rows[f"{name}.{key}"]
            assert row["numel"] == parameter.numel()
            assert row["scale"] == state[f"{key}_scale"].item()
            assert row["amax"] * row["scale"] == pytest.approx(format.max, rel=1e-6)
            # The scale is rounded to float32: amax times scale may be a last place above the maximum.
            assert row["saturated"] <= 1
            assert row["nonfinite"] == 0
    # Small first moments are flushed, as the counter says.
    moment = optimizer.state[model.get_parameter("0.weight")]["exp_avg"].float()
    assert rows["0.weight.exp_avg"]["underflow"] == (moment == 0).sum().item()


def test_fp16_is_counted_by_the_definitions() -> None:
    """A second moment with zeros, values that vanish and values that FP16 holds as subnormals."""
    exponents = [0, -20, -37, -38, -39, -40, -41, -60]
    parameter = nn.Parameter(torch.zeros(9))
    # Squared and taken times 2^-10: 2^(e-10), in a tensor whose largest is scaled to just below 2^16.
    parameter.grad = torch.tensor([2.0 ** (e / 2) for e in exponents] + [0.0])
    buffer = StatisticsBuffer()
    optimizer = Fp8AdamW([parameter], betas=(0.0, 1 - 2.0**-10))
    optimizer.observe(buffer, [("p", parameter)])
    optimizer.step()
    row = dict(zip(STATISTICS, buffer.data[1].tolist(), strict=True))
    scaled = [2.0 ** (e - 10) * row["scale"] for e in exponents]
    assert row["underflow"] == sum(x <= 2.0**-25 for x in scaled) == 2
    assert row["subnormal"] == sum(2.0**-25 < x < 2.0**-14 - 2.0**-25 for x in scaled) == 4
    assert (row["numel"], row["nonfinite"]) == (9, 0)
    # What was flushed is kept as the smallest number; zero stays zero.
    stored = optimizer.state[parameter]["exp_avg_sq"].tolist()
    assert stored[-2:] == [2.0**-24, 0.0]


def test_observing_changes_no_number() -> None:
    plain, watched = make_model(), make_model()
    optimizer = Fp8AdamW(watched.parameters())
    optimizer.observe(StatisticsBuffer(), watched.named_parameters())
    assert train(plain, Fp8AdamW(plain.parameters()), 5) == train(watched, optimizer, 5)


def test_o1_has_nothing_to_observe() -> None:
    model = make_model()
    assert Fp8AdamW(model.parameters(), level="O1").observe(StatisticsBuffer(), model.named_parameters()) == 0


# --- checkpoints ----------------------------------------------------------------------------------------


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@levels
@pytest.mark.parametrize("way", [copy.deepcopy, through_a_file])
def test_a_checkpoint_brings_everything_back(
    level: Level, way: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    model, twin = make_model(), make_model()
    optimizer = Fp8AdamW(model.parameters(), level=level)
    train(model, optimizer, 5)
    twin.load_state_dict(model.state_dict())
    again = Fp8AdamW(twin.parameters(), level=level)
    again.load_state_dict(way(optimizer.state_dict()))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        for key, value in optimizer.state[a].items():
            other = again.state[b][key]
            assert other == value if key == "step" else torch.equal(other.float(), value.float())
            assert key == "step" or (other.dtype == value.dtype and other is not value)
    assert train(twin, again, 5, first=5) == train(model, optimizer, 5, first=5)


# --- errors ---------------------------------------------------------------------------------------------


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


def test_more_errors() -> None:
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


# --- O3: state over ranks -------------------------------------------------------------------------------


def job_sharded(rank: int, size: int, steps: int, level: Level) -> dict[str, Any]:
    model = make_model()
    optimizer = Fp8AdamW(model.parameters(), lr=1e-2, level=level)
    losses = train(model, optimizer, steps)
    owned = [name for name, p in model.named_parameters() if p in optimizer.state]
    late = nn.Parameter(torch.zeros(2))
    refused = ""
    try:
        optimizer.add_param_group({"params": [late]})
    except RuntimeError as error:
        refused = str(error)
    state = copy.deepcopy(optimizer.state_dict())
    twin = make_model()
    twin.load_state_dict(model.state_dict())
    again = Fp8AdamW(twin.parameters(), lr=1e-2, level=level)
    if not refused:
        optimizer.param_groups.pop()
        state = copy.deepcopy(optimizer.state_dict())
    again.load_state_dict(state)
    dist.barrier()
    return {
        "losses": losses,
        "weights": [p.detach().clone() for p in model.parameters()],
        "owned": owned,
        "refused": refused,
        "later": train(twin, again, 3, first=steps) == train(model, optimizer, 3, first=steps),
    }


@pytest.mark.parametrize("size", [2, 4])
def test_o3_is_o2_with_the_state_shared_out(size: int) -> None:
    model = make_model()
    losses = train(model, Fp8AdamW(model.parameters(), lr=1e-2), 6)
    results = run_ranks(job_sharded, size, 6, "O3")
    for result in results:
        assert result["losses"] == losses
        for ours, whole in zip(result["weights"], model.parameters(), strict=True):
            assert torch.equal(ours, whole)
        assert "cannot be added after the first step" in result["refused"]
        assert result["later"]
    # Every tensor is one rank's.
    assert sorted(name for result in results for name in result["owned"]) == sorted(
        name for name, _ in model.named_parameters()
    )
    assert all(result["owned"] for result in results)


def job_all_of_it(rank: int, size: int) -> dict[str, Any]:
    """FP8 gradients and O3 together, each rank with its own share of the batch."""
    model, buffer = make_model(), StatisticsBuffer()
    optimizer = Fp8AdamW(model.parameters(), lr=1e-2, level="O3")
    reducer = Fp8GradientReducer(model.named_parameters())
    reducer.observe(buffer)
    optimizer.observe(buffer, model.named_parameters())
    losses = []
    for step in range(150):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
        loss = (model(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        reducer.reduce()
        optimizer.step()
        losses.append(loss.item())
    rows = {info.name: row[0].item() for info, row in zip(buffer.catalogue, buffer.data, strict=True)}
    return {"losses": losses, "weights": [p.detach().clone() for p in model.parameters()], "rows": rows}


def test_fp8_gradients_and_o3_together_reach_adamws_loss() -> None:
    model = make_model()
    reference = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 150)[-20:]
    first, second = run_ranks(job_all_of_it, 2)
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], second["weights"], strict=True))
    last = [(a + b) / 2 for a, b in zip(first["losses"], second["losses"], strict=True)][-20:]
    assert sum(last) / 20 == pytest.approx(sum(reference) / 20, rel=0.05)
    # Gradients are seen on both ranks, what is stored where it is stored.
    for name, parameter in model.named_parameters():
        seen = 150 * parameter.numel()
        assert first["rows"][f"{name}.grad"] == second["rows"][f"{name}.grad_sum"] == seen
        assert sorted(rank["rows"][f"{name}.master"] for rank in (first, second)) == [0, seen]


def test_o2_keeps_everything_on_every_rank() -> None:
    for result in run_ranks(job_sharded, 2, 2, "O2"):
        assert len(result["owned"]) == 4
        assert result["refused"] == ""
