"""Scaling state and layers over process groups: equal scales, DDP, FSDP2."""

import copy
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from process_group import run_ranks
from torch import Tensor, nn
from torch import distributed as dist
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
    convert,
    fp8_layers,
    observe,
    scaling_status,
)
from fp8scope_kernels.distributed import keep_scaling_out_of_ddp, sync_amaxes, sync_amaxes_after
from fp8scope_kernels.recipes import ROLES, recipe_from_dict

STEPS = 4


def make_model(recipe: Recipe | None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    if recipe is not None:
        convert(model, recipe)
    return model


def batch(step: int, rank: int, rows: int = 16) -> Tensor:
    """Rank 1's data is larger, so that amaxes differ."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 32, generator=generator) * (1 + 2 * rank)


def scales(model: nn.Module) -> dict[str, float]:
    return {
        f"{path}.{role}": layer.state_of(role).scale.item()
        for path, layer in fp8_layers(model)
        for role in ROLES
    }


def train(
    model: nn.Module, ranks: list[int], optimizer: torch.optim.Optimizer, averaged: bool = False
) -> list[float]:
    """The loss of each step on these ranks' data; without `averaged`, one rank's loss is its own."""
    losses = []
    for step in range(STEPS):
        x = torch.cat([batch(step, rank) for rank in ranks])
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# --- equal scales ---------------------------------------------------------------------------------------


def job_sync(rank: int, size: int, reduce_amax: bool) -> dict[str, Any]:
    model = make_model(DelayedScaling(history_length=3, reduce_amax=reduce_amax))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = sync_amaxes_after(optimizer, model)
    train(model, [rank], optimizer)
    synced = scales(model)
    histories = {name: b.tolist() for name, b in model.named_buffers() if "history" in name}
    handle.remove()
    train(model, [rank], optimizer)
    return {"synced": synced, "histories": histories, "later": scales(model)}


def test_it_works() -> None:
    """Ranks with other data have the same histories and scales, and those of the larger amax."""
    first, second = run_ranks(job_sync, 2, True)
    assert first["synced"] == second["synced"]
    assert first["histories"] == second["histories"]
    newest = first["histories"]["0.scaling.input.amax_history"]
    largest = [max(batch(s, r).abs().max().item() for r in (0, 1)) for s in (3, 2, 1)]
    assert newest == pytest.approx(largest, rel=1e-6)
    # Four calls: the last scale came from the maxima of the first three, of both ranks.
    past = max(batch(s, r).abs().max().item() for s in (0, 1, 2) for r in (0, 1))
    assert first["synced"]["0.input"] == pytest.approx(448.0 / past, rel=1e-6)
    # The hook is gone, and so is the agreement.
    assert first["later"]["0.input"] != second["later"]["0.input"]


def test_without_the_option_ranks_keep_their_own() -> None:
    first, second = run_ranks(job_sync, 2, False)
    assert first["synced"]["0.input"] != second["synced"]["0.input"]
    assert first["synced"]["0.weight"] == second["synced"]["0.weight"]


def job_collectives(rank: int, size: int) -> list[Any]:
    model = make_model(DelayedScaling(history_length=5, reduce_amax=True))
    calls = []
    original = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        # Rank 0 alone has called the model: what was never called has no say.
        if rank == 0:
            model(batch(0, 0)).sum().backward()
        taken = sync_amaxes(model)
    finally:
        dist.all_reduce = original
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    return [taken, calls, scales(model), sync_amaxes(model, alone)]


def test_one_all_reduce_takes_all_tensors() -> None:
    for taken, calls, synced, alone in run_ranks(job_collectives, 2):
        assert taken == 6
        assert calls == [6 * (5 + 1)]
        assert synced["0.input"] == pytest.approx(448.0 / batch(0, 0).abs().max().item(), rel=1e-6)
        assert all(0 < scale < torch.inf for scale in synced.values())
        assert alone == 0


def test_a_single_process_has_nothing_to_do() -> None:
    model = make_model(DelayedScaling(reduce_amax=True))
    model(batch(0, 0)).sum().backward()
    before = scales(model)
    assert sync_amaxes(model) == 0
    assert scales(model) == before


def test_the_option_is_part_of_the_recipe() -> None:
    recipe = DelayedScaling(reduce_amax=True)
    assert recipe_from_dict(recipe.to_dict()) == recipe
    with pytest.raises(ValueError, match=r"reduce_amax must be True or False, got 1\."):
        DelayedScaling(reduce_amax=1)  # type: ignore[arg-type]


def job_unreduced(rank: int, size: int) -> list[str]:
    model = make_model(DelayedScaling(reduce_amax=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.no_grad():
            for step in range(260):
                model(batch(step, rank, rows=1))
    return [str(warning.message) for warning in caught]


def test_an_option_that_nobody_acts_on_is_told() -> None:
    for messages in run_ranks(job_unreduced, 2):
        assert len(messages) == 4  # the inputs and weights of two layers, each once
        assert all("never reduced: call sync_amaxes(model)" in message for message in messages)


# --- DDP ------------------------------------------------------------------------------------------------


def job_wrapped(rank: int, size: int, values: dict[str, Any], wrap: str) -> dict[str, Any]:
    model = make_model(recipe_from_dict(values))
    buffer = StatisticsBuffer()
    observe(model, buffer)
    inner: nn.Module = model
    if wrap == "ddp":
        keep_scaling_out_of_ddp(model)
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


recipes = pytest.mark.parametrize(
    "recipe", [DelayedScaling(reduce_amax=True), CurrentScaling()], ids=["delayed", "current"]
)


@recipes
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_training_on_two_ranks_is_training_on_one(recipe: Recipe, wrap: str) -> None:
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


def job_ddp_buffers(rank: int, size: int) -> dict[bool, float]:
    return {keep: scale_under_ddp(rank, keep) for keep in (True, False)}


def scale_under_ddp(rank: int, keep: bool) -> float:
    model = make_model(DelayedScaling())
    if keep:
        assert keep_scaling_out_of_ddp(model) == 6 * 3
    wrapped = DistributedDataParallel(model)
    for step in range(2):
        wrapped(batch(step, rank)).sum().backward()
    return scales(model)["0.input"]


def test_ddp_leaves_scaling_state_alone_when_told() -> None:
    own = [448.0 / batch(0, rank).abs().max().item() for rank in (0, 1)]
    results = run_ranks(job_ddp_buffers, 2)
    assert [result[True] for result in results] == pytest.approx(own, rel=1e-6)
    # What it would do: rank 1 is given rank 0's scale.
    assert [result[False] for result in results] == pytest.approx([own[0], own[0]], rel=1e-6)


# --- FSDP2's checkpoints --------------------------------------------------------------------------------


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


def test_an_fsdp_checkpoint_brings_the_scaling_state_back() -> None:
    for result in run_ranks(job_fsdp_checkpoint, 2):
        assert result["losses"][0] == result["losses"][1]
        assert all(result["same"])
        assert "0.scaling.input.amax_history" in result["keys"]
        assert set(result["status"].values()) == {"restored"}
        assert list(result["status"])[:3] == ["0.input", "0.weight", "0.grad_output"]
