"""FP8 layers under DDP and FSDP2: training on two ranks is training on one, and its checkpoints come back."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from helpers.process_group import run_ranks
from kernels.helpers.scaling_ranks import STEPS, batch, make_model, scales, train
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fp8scope_kernels import (
    STATISTICS,
    CurrentScaling,
    DelayedScaling,
    Recipe,
    StatisticsBuffer,
    observe,
    scaling_status,
)
from fp8scope_kernels.distributed import keep_scaling_out_of_ddp, sync_amaxes_after
from fp8scope_kernels.recipes import recipe_from_dict

recipes = pytest.mark.parametrize(
    "recipe", [DelayedScaling(reduce_amax=True), CurrentScaling()], ids=["delayed", "current"]
)


def job_wrapped(rank: int, size: int, values: dict[str, Any], wrap: str) -> dict[str, Any]:
    model = make_model(recipe_from_dict(values))
    buffer = StatisticsBuffer()
    observe(model, buffer)
    inner: nn.Module = model
    if wrap == "ddp":
        model = DistributedDataParallel(model)  # type: ignore[assignment]
    else:
        for layer in (inner[0], inner[2]):  # type: ignore[index]
            fully_shard(layer)
        fully_shard(inner)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.05)
    sync_amaxes_after(optimizer, inner)
    losses = train(model, [rank], optimizer)
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(inner, options=options)
    return {
        "losses": losses,
        "weights": {name: value for name, value in state.items() if "scaling" not in name},
        "grads": {name: full(p.grad) for name, p in inner.named_parameters()},
        "rows": buffer.data.tolist(),
        "names": [info.name for info in buffer.catalogue],
        "scales": scales(inner),
    }


@cache
def two_ranks(recipe: Recipe, wrap: str) -> list[dict[str, Any]]:
    return run_ranks(job_wrapped, 2, recipe.to_dict(), wrap)


def full(grad: Any) -> Tensor:
    whole: Tensor = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return whole.clone()


def alone(recipe: Recipe | None) -> dict[str, Any]:
    """One process, with the whole batch at once."""
    model = make_model(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = train(model, [0, 1], optimizer)
    return {
        "losses": losses,
        "weights": dict(model.state_dict()),
        "grads": {name: p.grad for name, p in model.named_parameters()},
    }


@recipes
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_it_works(recipe: Recipe, wrap: str) -> None:
    """Loss and gradients are those of one process with the whole batch, as closely as the formats allow.

    The two do not round alike: a rank's gradient is relative to its own half of the batch (twice as large),
    and current scaling takes its own amax. Every product of a gradient has two operands with relative errors
    of at most 2^-4 (E4M3) and 2^-3 (E5M2); both runs are off by that much at worst, and errors of many
    elements average out. Asserted is half of the bound of one run, in the Frobenius norm (0.036 at most,
    when it was written).
    """
    first, second = two_ranks(recipe, wrap)
    whole = alone(recipe)
    bound = (2**-4 + 2**-3) / 2
    losses = [(a + b) / 2 for a, b in zip(first["losses"], second["losses"], strict=True)]
    assert losses == pytest.approx(whole["losses"], rel=0.02)
    for name, grad in whole["grads"].items():
        assert torch.equal(first["grads"][name], second["grads"][name])
        error = torch.linalg.vector_norm(first["grads"][name] - grad) / torch.linalg.vector_norm(grad)
        assert error < bound, f"{name}: {error:.4f}"
    for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
        assert torch.equal(first["weights"][name], second["weights"][name])
    # It is FP8 that was trained, not something exact by mistake.
    exact = alone(None)
    assert not torch.allclose(first["grads"]["0.weight"], exact["grads"]["0.weight"], rtol=1e-4)


@recipes
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_counters_are_those_of_the_ranks_own_data(recipe: Recipe, wrap: str) -> None:
    for rank, result in enumerate(two_ranks(recipe, wrap)):
        rows = dict(zip(result["names"], result["rows"], strict=True))
        numel, amax = STATISTICS.index("numel"), STATISTICS.index("amax")
        assert {name: row[numel] for name, row in rows.items()} == {
            "0.input": STEPS * 16 * 32,
            "0.weight": STEPS * 32 * 64,
            "0.grad_output": STEPS * 16 * 64,
            "2.input": STEPS * 16 * 64,
            "2.weight": STEPS * 32 * 64,
            "2.grad_output": STEPS * 16 * 32,
        }
        own = max(batch(step, rank).abs().max().item() for step in range(STEPS))
        assert rows["0.input"][amax] == own
        assert rows["0.input"][STATISTICS.index("nonfinite")] == 0


def job_ddp_buffers(rank: int, size: int) -> tuple[float, list[str]]:
    """A model inside of another, which has buffers of its own and a list of what DDP shall ignore."""
    outer = nn.Sequential(make_model(DelayedScaling()), nn.BatchNorm1d(32), nn.BatchNorm1d(32))
    ignored: Any = ["2.running_mean"]
    outer._ddp_params_and_buffers_to_ignore = ignored
    wrapped = DistributedDataParallel(outer)
    for step in range(2):
        wrapped(batch(step, rank)).sum().backward()
    return scales(outer)["0.0.input"], sorted(wrapped.named_module_buffers)


def test_ddp_excludes_scaling_state_from_broadcasts() -> None:
    own = [448.0 / batch(0, rank).abs().max().item() for rank in (0, 1)]
    results = run_ranks(job_ddp_buffers, 2)
    assert [scale for scale, _ in results] == pytest.approx(own, rel=1e-6)
    rest = [
        "1.num_batches_tracked",
        "1.running_mean",
        "1.running_var",
        "2.num_batches_tracked",
        "2.running_var",
    ]
    assert [names for _, names in results] == [rest, rest]


def test_the_list_of_what_ddp_ignores_can_be_extended() -> None:
    model = make_model(DelayedScaling())
    assert keep_scaling_out_of_ddp(model) == 6 * 3
    names: Any = model._ddp_params_and_buffers_to_ignore
    assert set(names) == {name for name, _ in model.named_buffers()}


# FSDP2's checkpoints


def job_fsdp_checkpoint(rank: int, size: int) -> dict[str, Any]:
    recipe = DelayedScaling(history_length=3, reduce_amax=True)
    models = [make_model(recipe) for _ in range(2)]
    for model in models:
        fully_shard(model)
    trained, restored = models
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05)
    sync_amaxes_after(optimizer, trained)
    train(trained, [rank], optimizer)
    options = StateDictOptions(full_state_dict=True)
    state = copy.deepcopy(get_model_state_dict(trained, options=options))
    set_model_state_dict(restored, state, options=options)
    status = scaling_status(restored)
    x = batch(9, rank)
    losses = []
    for model in models:
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
    same = [torch.equal(a, b) for a, b in zip(trained.buffers(), restored.buffers(), strict=True)]
    return {"losses": losses, "status": status, "same": same, "keys": sorted(state)}


def test_an_fsdp_checkpoint_restores_the_scaling_state() -> None:
    for result in run_ranks(job_fsdp_checkpoint, 2):
        assert result["losses"][0] == result["losses"][1]
        assert all(result["same"])
        assert "0.scaling.input.amax_history" in result["keys"]
        assert set(result["status"].values()) == {"restored"}
        assert list(result["status"])[:3] == ["0.input", "0.weight", "0.grad_output"]
