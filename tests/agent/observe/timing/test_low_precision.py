"""The scalars of gradients that are reduced in FP8, and of what an optimizer stores."""

from typing import Any

import pytest
import torch
from agent.helpers.watching import AMAX, NUMEL, SATURATED, SCALE, Watched
from helpers.process_group import run_ranks
from torch import nn

from fp8scope.guard import Guard
from fp8scope.observe.timing import Measures
from fp8scope.observe.timing.low_precision import stored_state
from fp8scope_kernels import Fp8AdamW, Fp8GradientReducer

ELEMENTS = 16 * 33 + 33 + 33 * 8


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 33), nn.Linear(33, 8, bias=False))


def job_reduced(rank: int, size: int) -> dict[str, Any]:
    """Three steps; the reducer is made after the model is watched, as in a script with `attach`."""
    model = model_of()
    optimizer = Fp8AdamW(model.parameters(), lr=1e-2, level="O2")
    watched, measures = Watched(model, optimizer, every=2), Measures(Guard())
    measures.watch(model, optimizer)
    reducer = Fp8GradientReducer(model.named_parameters())
    scalars, rows = [], []

    def step() -> None:
        measures.begin()
        optimizer.zero_grad()
        torch.manual_seed(rank)
        model(torch.randn(4, 16)).square().mean().backward()
        reducer.reduce()
        optimizer.step()
        reading = measures.end({})
        assert reading is not None
        scalars.append(reading.read())

    for _ in range(3):
        seen = watched.step(step)
        rows.append({name: seen.row(name).tolist() for name in seen.names if ".grad" in name})
    measures.close()
    return {"scalars": scalars, "rows": rows, "u": reducer.pre_scale, "names": reducer.names}


def test_it_works() -> None:
    """On two ranks: the scaling factors, the bytes, and the tensors of each step after the first."""
    for result in run_ranks(job_reduced, 2):
        last, factors = result["scalars"][-1], sorted(result["u"].values())
        assert (last["fp8_gradients/mu_min"], last["fp8_gradients/mu_max"]) == (factors[0], factors[-1])
        assert last["fp8_gradients/mu_median"] == factors[1]
        assert 0 <= last["fp8_gradients/saturated_max"] < 1
        # Half of what a rank holds goes to the other rank, twice; amaxes and shares are 12 bytes a tensor.
        padded = ELEMENTS + ELEMENTS % 2
        assert last["fp8_gradients/bytes"] == padded + 12 * 3
        assert last["fp8_gradients/bytes_bf16"] == 2 * ELEMENTS
        assert last["fp8_gradients/bytes_float32"] == 4 * ELEMENTS
        for name in result["names"]:
            cast, total = result["rows"][2][f"{name}.grad"], result["rows"][2][f"{name}.grad_sum"]
            assert cast[NUMEL] == total[NUMEL] > 0 and cast[AMAX] > 0 and cast[SATURATED] == 0
            assert total[SCALE] == pytest.approx(2 * cast[SCALE])
        state = result["scalars"][0]
        assert state["optimizer_state/exp_avg_bytes"] == ELEMENTS
        # They are sent once, and the page keeps the last value.
        assert "optimizer_state/exp_avg_bytes" not in last


@pytest.mark.parametrize(("level", "sizes"), [("O1", (4, 4, 0)), ("O2", (1, 2, 2)), ("O3", (1, 2, 2))])
def test_an_optimizers_state_by_kind(level: Any, sizes: tuple[int, int, int]) -> None:
    model = model_of()
    optimizer = Fp8AdamW(model.parameters(), level=level)
    assert stored_state(optimizer) == {}
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    expected = dict(zip(("exp_avg", "exp_avg_sq", "master"), sizes, strict=True))
    stored = {
        f"optimizer_state/{key}_bytes": float(size * ELEMENTS) for key, size in expected.items() if size
    }
    # A float32 scale for each of the blocks of three first moments, and for each other tensor.
    scales = sum(-(-parameter.numel() // 256) for parameter in model.parameters()) + 2 * 3
    stored |= {"optimizer_state/scales_bytes": 4.0 * scales} if level != "O1" else {}
    stored |= {"optimizer_state/parameters": float(ELEMENTS), "optimizer_state/level": float(level[1])}
    assert stored_state(optimizer) == stored


def test_a_plain_optimizer_has_kinds_too() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    stored = stored_state(optimizer)
    assert (
        stored["optimizer_state/exp_avg_bytes"] == stored["optimizer_state/exp_avg_sq_bytes"] == 4 * ELEMENTS
    )
    assert "optimizer_state/level" not in stored and "optimizer_state/step_bytes" not in stored


def test_a_reducer_of_another_model_is_not_read() -> None:
    model, other = model_of(), model_of()
    measures = Measures(Guard())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    measures.watch(model, optimizer)
    reducer = Fp8GradientReducer(other.named_parameters())
    other(torch.randn(4, 16)).sum().backward()
    reducer.reduce()
    measures.begin()
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    reading = measures.end({})
    assert reading is not None and not any("fp8_gradients" in name for name in reading.read())
    measures.close()
