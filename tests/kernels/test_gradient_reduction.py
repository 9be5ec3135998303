"""Gradients averaged in FP8 over 2 and 4 real processes, against the definition computed in one."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from helpers.process_group import run_ranks
from kernels.helpers.gradient_parameters import SHAPES, parameters
from torch import Tensor, nn
from torch import distributed as dist

from fp8scope_kernels import E3M2, E4M3, E5M2, STATISTICS, Format, StatisticsBuffer
from fp8scope_kernels.gradient_reduction import Fp8GradientReducer


def gradient(rank: int, index: int, shape: tuple[int, ...], step: int = 0) -> Tensor:
    """Other sizes on other ranks, and a wide spread of exponents."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * index + rank)
    spread = torch.randn(shape, generator=generator).mul(4).exp2()
    return torch.randn(shape, generator=generator) * spread * (1 + rank) * 1e-4


def expected(grads: list[Tensor], format: Format, u: float) -> tuple[Tensor, Tensor]:
    """The definition: (the mean, q)."""
    assert format.dtype is not None
    largest = max((g.abs().max().item() for g in grads if g.numel()), default=0.0)
    scale = torch.tensor(format.max) / torch.tensor(largest) if largest else torch.tensor(1.0)
    scale = scale * u
    first, *others = [(g * scale).clamp(-format.max, format.max).to(format.dtype).float() for g in grads]
    total = sum(others, start=first)
    q = total.clamp(-format.max, format.max).to(format.dtype).float()
    return q / (scale * len(grads)), q


def job_reduce(rank: int, size: int, bucket: int, e5m2: bool) -> dict[str, Any]:
    named, buffer, sent = parameters(), StatisticsBuffer(), []
    format = E5M2 if e5m2 else E4M3
    reducer = Fp8GradientReducer(named, format=format, bucket_elements=bucket)
    reducer.observe(buffer)
    for index, (_, parameter) in enumerate(named):
        parameter.grad = gradient(rank, index, tuple(parameter.shape))

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(output: Tensor, input: Tensor, **options: Any) -> Any:
            sent.append(input.nbytes)
            return original(output, input, **options)

        return call

    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_to_all_single", gather):
            patch.setattr(dist, name, counted(getattr(dist, name)))
        reducer.reduce()
    return {
        "grads": [p.grad for _, p in named],
        "rows": {info.name: row for info, row in zip(buffer.catalogue, buffer.data.tolist(), strict=True)},
        "sent": sent,
        "u": list(reducer.pre_scale.values()),
    }


@cache
def reduced(size: int, bucket: int = 2**26, e5m2: bool = False) -> list[dict[str, Any]]:
    """What each rank has; one start of processes for all tests that look at it."""
    return run_ranks(job_reduce, size, bucket, e5m2)


def bits(x: Tensor) -> list[int]:
    flat: list[int] = x.contiguous().view(-1).view(torch.int32).tolist()
    return flat


@pytest.mark.parametrize("size", [2, 4])
def test_it_works(size: int) -> None:
    """Bit for bit the definition, on every rank, and no more than one byte an element on the wire."""
    results = reduced(size)
    for index, shape in enumerate(SHAPES):
        mean, q = expected([gradient(rank, index, shape) for rank in range(size)], E4M3, 1 / size)
        for rank, result in enumerate(results):
            assert bits(result["grads"][index]) == bits(mean), (index, rank)
            at_maximum = (q.abs() == E4M3.max).sum().item() > 1e-5 * max(q.numel(), 1)
            assert result["u"][index] == (0.5 if at_maximum else 1.0) / size
    elements = sum(torch.Size(shape).numel() for shape in SHAPES)
    padded = -(-elements // size) * size
    assert results[0]["sent"] == [padded, padded // size]


@pytest.mark.parametrize("bucket", [1, 50])
def test_buckets_do_not_change_results(bucket: int) -> None:
    whole, parts = reduced(2, e5m2=True)[0], reduced(2, bucket, e5m2=True)[0]
    assert len(parts["sent"]) > len(whole["sent"])
    assert [bits(g) for g in parts["grads"]] == [bits(g) for g in whole["grads"]]
    mean, _ = expected([gradient(rank, 1, SHAPES[1]) for rank in range(2)], E5M2, 0.5)
    assert bits(whole["grads"][1]) == bits(mean)


def test_the_mean_is_close_to_the_exact_one() -> None:
    result = reduced(4)[0]["grads"][1]
    exact = torch.stack([gradient(rank, 1, SHAPES[1]) for rank in range(4)]).double().mean(0)
    assert torch.linalg.vector_norm(result.double() - exact) < 2**-4 * torch.linalg.vector_norm(exact)


def test_every_tensor_is_observable() -> None:
    """Rows equal what a float64 count finds, both for a rank's own gradient and for the sum."""
    for rank, result in enumerate(reduced(2)):
        assert len(result["rows"]) == 2 * len(SHAPES)
        grads = [gradient(r, 1, SHAPES[1]) for r in range(2)]
        mean, q = expected(grads, E4M3, 0.5)
        own = dict(zip(STATISTICS, result["rows"]["p1.grad"], strict=True))
        scale = (torch.tensor(448.0) / max(g.abs().max() for g in grads)).item() / 2
        scaled = grads[rank].double().abs() * scale
        half = E4M3.smallest_subnormal / 2
        assert own == {
            "numel": 64 * 32,
            "amax": grads[rank].abs().max().item(),
            "scale": scale,
            "saturated": 0.0,
            "underflow": (scaled <= half).sum().item(),
            "subnormal": ((scaled > half) & (scaled < E4M3.smallest_normal - half)).sum().item(),
            "nonfinite": 0.0,
        }
        total = dict(zip(STATISTICS, result["rows"]["p1.grad_sum"], strict=True))
        assert total["numel"] == 64 * 32
        assert total["amax"] == pytest.approx(mean.abs().max().item(), rel=1e-6)
        assert total["scale"] == 2 * scale
        assert total["saturated"] == (q.abs() == 448.0).sum().item()
        assert total["subnormal"] == ((q != 0) & (q.abs() < E4M3.smallest_normal)).sum().item() > 0
        assert (total["underflow"], total["nonfinite"]) == (0.0, 0.0)


# --- bad and missing gradients --------------------------------------------------------------------------


def job_odd(rank: int, size: int) -> dict[str, Any]:
    named = parameters([(4,), (4,), (4,), (4,)])
    buffer = StatisticsBuffer()
    reducer = Fp8GradientReducer(named)
    reducer.observe(buffer)
    bad, here, nowhere, half = (parameter for _, parameter in named)
    bad.grad = torch.tensor([1.0, torch.inf if rank == 0 else 2.0, 3.0, torch.nan if rank == 1 else 1.0])
    here.grad = torch.ones(4) if rank == 1 else None
    half.data = half.data.bfloat16()
    half.grad = torch.full((4,), 0.5 + rank, dtype=torch.bfloat16)
    reducer.reduce()
    nonfinite = STATISTICS.index("nonfinite")
    return {
        "grads": [p.grad for _, p in named],
        "nonfinite": {i.name: row[nonfinite] for i, row in zip(buffer.catalogue, buffer.data, strict=True)},
        "u": reducer.pre_scale["p0"],
        "nowhere": nowhere.grad is None,
    }


def test_bad_and_missing_gradients() -> None:
    results = run_ranks(job_odd, 2)
    for result in results:
        bad, here, _, half = result["grads"]
        assert bad.isnan().tolist() == [False, True, False, True]
        assert bad[[0, 2]].tolist() == pytest.approx([1.0, 3.0], rel=2**-4)
        assert here.tolist() == pytest.approx([0.5] * 4, rel=1e-6)
        assert result["nowhere"]
        assert half.dtype == torch.bfloat16 and half.tolist() == pytest.approx([1.0] * 4, rel=2**-4)
        assert result["nonfinite"]["p0.grad"] == 1
        assert result["nonfinite"]["p0.grad_sum"] == 2
        assert result["nonfinite"]["p1.grad"] == 0


def job_mismatch(rank: int, size: int) -> str:
    with pytest.raises(ValueError, match="Ranks have different parameters") as caught:
        Fp8GradientReducer(parameters([(4 + rank,)]))
    return str(caught.value)


def test_ranks_must_have_the_same_parameters() -> None:
    assert len(run_ranks(job_mismatch, 2)) == 2


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"pass model.named_parameters\(\)"):
        Fp8GradientReducer([])
    with pytest.raises(ValueError, match="E3M2 is not; use E4M3 or E5M2"):
        Fp8GradientReducer(parameters(), format=E3M2)
    with pytest.raises(ValueError, match="threshold is a share"):
        Fp8GradientReducer(parameters(), threshold=1.0)
    with pytest.raises(ValueError, match="must be at least 1"):
        Fp8GradientReducer(parameters(), interval=0)
    with pytest.raises(ValueError, match="Parameters are on cpu, meta"):
        Fp8GradientReducer([*parameters(), ("m", nn.Parameter(torch.zeros(2, device="meta")))])
    named = parameters([(3, 2)])
    named[0][1].grad = torch.eye(3, 2).to_sparse()
    with pytest.raises(ValueError, match="The gradient of p0 is sparse"):
        Fp8GradientReducer(named).reduce()


# --- a single process, and training ---------------------------------------------------------------------


def test_a_single_process_rounds_to_fp8() -> None:
    named = parameters([(64, 32)])
    named[0][1].grad = gradient(0, 1, (64, 32))
    Fp8GradientReducer(named).reduce()
    mean, _ = expected([gradient(0, 1, (64, 32))], E4M3, 1.0)
    assert bits(named[0][1].grad) == bits(mean)


def test_state_survives_a_checkpoint() -> None:
    named = parameters([(8,)])
    reducer = Fp8GradientReducer(named)
    for _ in range(3):
        named[0][1].grad = torch.ones(8)
        reducer.reduce()
    state = copy.deepcopy(reducer.state_dict())
    twin = Fp8GradientReducer(named)
    twin.load_state_dict(state)
    assert twin.pre_scale == reducer.pre_scale != {"p0": 1.0}
    with pytest.raises(ValueError, match="other parameters"):
        Fp8GradientReducer(parameters()).load_state_dict(state)


def job_train(rank: int, size: int) -> dict[str, list[float]]:
    return {way: train(rank, size, fp8=way == "fp8") for way in ("fp8", "exact")}


def train(rank: int, size: int, *, fp8: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    reducer = Fp8GradientReducer(model.named_parameters())
    losses = []
    for step in range(60):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(32, 16, generator=generator)
        loss = (model(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if fp8:
            reducer.reduce()
        else:
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= size
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("size", [2, 4])
def test_training_with_it_reaches_the_same_loss(size: int) -> None:
    """The loss falls by more than half, and FP8 ends within 2 % of float32 on the same data."""
    results = run_ranks(job_train, size)
    fp8, exact = (torch.tensor([r[way] for r in results]).mean(0)[-10:].mean() for way in ("fp8", "exact"))
    assert exact < 0.5
    assert fp8.item() == pytest.approx(exact.item(), rel=0.02)
