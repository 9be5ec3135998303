"""Scaling state over process groups: equal scales where that is asked for, in one collective."""

import warnings
from typing import Any

import pytest
import torch
from helpers.process_group import run_ranks
from kernels.helpers.scaling_ranks import batch, make_model, scales, train
from torch import Tensor
from torch import distributed as dist

from fp8scope_kernels import E4M3, DelayedScaling, ExpertStates, ScalingState
from fp8scope_kernels.distributed import sync_amaxes, sync_amaxes_after
from fp8scope_kernels.recipes import recipe_from_dict

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
    return [taken, calls, scales(model), sync_amaxes(model, alone), expert(rank), experts(rank)]


def expert(rank: int) -> list[Any]:
    """The state of an expert that only rank 0 has tokens for, after the first step."""
    state = ScalingState(DelayedScaling(history_length=2, reduce_amax=True), E4M3)
    for step, amax in enumerate((64.0, 1.0, 2.0, 4.0)):
        state.next_scale(torch.tensor(0.0 if rank and step else amax))
        sync_amaxes(state)
    return [state.amax_history.tolist(), state.calls.item(), state.scale.item()]


def experts(rank: int) -> list[Any]:
    """The same of the second of three experts, whose states are in common buffers."""
    states = ExpertStates(DelayedScaling(history_length=2, reduce_amax=True), E4M3, 3)
    for step, amax in enumerate((64.0, 1.0, 2.0, 4.0)):
        states.of(1).next_scale(torch.tensor(0.0 if rank and step else amax))
        assert sync_amaxes(states) == 3
    return [states.amax_history.tolist(), states.calls.tolist(), states.scale.tolist()]


def test_one_all_reduce_takes_all_tensors() -> None:
    for taken, calls, synced, alone, tokens, of_experts in run_ranks(job_collectives, 2):
        assert taken == 6
        assert calls == [6 * (5 + 1)]
        assert synced["0.input"] == pytest.approx(448.0 / batch(0, 0).abs().max().item(), rel=1e-6)
        assert all(0 < scale < torch.inf for scale in synced.values())
        assert alone == 0
        # What both have seen at first leaves the history also where nothing follows it.
        assert tokens == [[4.0, 2.0], 4, 448.0 / 2]
        assert [values[1] for values in of_experts] == tokens
        assert not any(torch.tensor(values)[[0, 2]].any() for values in of_experts)


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


def test_warns_about_an_option_without_effect() -> None:
    for messages in run_ranks(job_unreduced, 2):
        assert len(messages) == 4  # the inputs and weights of two layers, each once
        assert all("never reduced: call sync_amaxes(model)" in message for message in messages)
