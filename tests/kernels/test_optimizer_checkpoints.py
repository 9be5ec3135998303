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
