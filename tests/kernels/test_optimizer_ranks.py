"""AdamW in 8 and 16 bits over ranks: O3 keeps each tensor's state on one of them."""

import copy
from typing import Any

import pytest
import torch
from helpers.process_group import run_ranks
from kernels.helpers.optimizer_training import make_model, train
from torch import distributed as dist
from torch import nn

from fp8scope_kernels import StatisticsBuffer
from fp8scope_kernels.gradient_reduction import Fp8GradientReducer
from fp8scope_kernels.optimizer import Fp8AdamW, Level


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
def test_it_works(size: int) -> None:
    """O3 is O2 with the state shared out."""
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
