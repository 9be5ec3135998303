"""AdamW in 8 and 16 bits through checkpoints."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels.helpers.optimizer_training import make_model, train

from fp8scope_kernels.optimizer import LEVELS, Fp8AdamW, Level

levels = pytest.mark.parametrize("level", LEVELS)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@levels
@pytest.mark.parametrize("way", [copy.deepcopy, through_a_file])
def test_it_works(level: Level, way: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
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


def test_a_state_with_one_scale_for_a_first_moment_is_loaded() -> None:
    """As versions before block scales have saved it."""
    model = make_model()
    optimizer = Fp8AdamW(model.parameters())
    train(model, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["exp_avg_scale"] = state["exp_avg_scale"].min().clone()
    values = [s["exp_avg"].float() / s["exp_avg_scale"] for s in saved["state"].values()]
    again = Fp8AdamW(model.parameters())
    again.load_state_dict(through_a_file(saved))
    for parameter, value in zip(model.parameters(), values, strict=True):
        state = again.state[parameter]
        of_elements = state["exp_avg_scale"].repeat_interleave(256)[: value.numel()].view_as(value)
        assert torch.equal(state["exp_avg"].float() / of_elements, value)
    assert all(loss < 5 for loss in train(model, again, 3, first=3))
    assert all(state["exp_avg_scale"].dim() == 1 for state in again.state.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", ["AdamW", "O1", "O2"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_states_of_other_levels_and_of_adamw_are_loaded(
    before: str, level: Level, dtype: torch.dtype
) -> None:
    model = make_model(dtype)
    first: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters())
        if before == "AdamW"
        else Fp8AdamW(model.parameters(), level="O1" if before == "O1" else "O2")
    )
    train(model, first, 4)
    again = Fp8AdamW(model.parameters(), level=level)
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    low = level == "O2"
    for parameter in model.parameters():
        state = again.state[parameter]
        assert state["step"] == 4
        assert state["exp_avg"].dtype == (torch.float8_e4m3fn if low else torch.float32)
        assert state["exp_avg"].shape == parameter.shape
        assert ("exp_avg_scale" in state) == low
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    loss = train(model, again, 1, first=4)[0]
    assert loss < 3
    # One step changes a weight by about the learning rate, whatever the state was stored in.
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        assert (parameter - weight).abs().max() < 5e-3


@levels
def test_a_copy_goes_on_alike(level: Level) -> None:
    model = make_model()
    optimizer = Fp8AdamW(model.parameters(), level=level)
    train(model, optimizer, 2)
    twin, again = copy.deepcopy((model, optimizer))
    assert train(twin, again, 3, first=2) == train(model, optimizer, 3, first=2)
