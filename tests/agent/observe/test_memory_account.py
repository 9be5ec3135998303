"""The account of memory: exact bytes of our layers, of torchao's, and of each level of the optimizer."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8scope.observe.memory_account import bytes_of, memory_account, optimizer_account
from fp8scope_kernels import CurrentScaling, DelayedScaling, Fp8AdamW, convert

ELEMENTS = 32 * 48 + 48 + 48 * 16


def model_of(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 48, dtype=dtype), nn.GELU(), nn.Linear(48, 16, bias=False, dtype=dtype)
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 32, dtype=next(model.parameters()).dtype)).float().square().mean().backward()
    optimizer.step()


def test_it_works() -> None:
    model = model_of()
    convert(model, DelayedScaling(history_length=16), exclude=())
    model.register_buffer("mask", torch.zeros(10, dtype=torch.bool))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    account = memory_account([model], [optimizer])
    assert account["weights"] == account["gradients"] == {"bfloat16": 2 * ELEMENTS}
    assert account["optimizer"] == {
        "step": {"float32": 3 * 4},
        "exp_avg": {"bfloat16": 2 * ELEMENTS},
        "exp_avg_sq": {"bfloat16": 2 * ELEMENTS},
    }
    # Two layers of three tensors: a scale, a history of 16 and a counter of 8 bytes.
    assert account["scaling"] == 2 * 3 * (4 + 16 * 4 + 8) and account["buffers"] == 10
    json.dumps(account)


def test_a_recipe_without_a_history_has_scales_only() -> None:
    model = model_of()
    convert(model, CurrentScaling(), exclude=())
    assert memory_account([model], [])["scaling"] == 2 * 3 * 4


@pytest.mark.parametrize(
    ("level", "dtype", "first", "second", "master"),
    [
        ("O1", torch.float32, {"float32": 4}, {"float32": 4}, None),
        ("O1", torch.bfloat16, {"float32": 4}, {"float32": 4}, {"float32": 4}),
        ("O2", torch.bfloat16, {"float8_e4m3fn": 1}, {"float16": 2}, {"float16": 2}),
        ("O3", torch.bfloat16, {"float8_e4m3fn": 1}, {"float16": 2}, {"float16": 2}),
    ],
)
def test_the_bytes_of_each_level(
    level: Any, dtype: torch.dtype, first: Any, second: Any, master: Any
) -> None:
    model = model_of(dtype)
    optimizer = Fp8AdamW(model.parameters(), level=level)
    train(model, optimizer)
    account = optimizer_account([optimizer])
    expected = {"exp_avg": first, "exp_avg_sq": second, **({} if master is None else {"master": master})}
    per_element = {name: {kind: size / ELEMENTS for kind, size in account[name].items()} for name in expected}
    assert per_element == expected
    scales = [name for name in account if name.endswith("_scale")]
    # A float32 scale for each of the blocks of three first moments, and for each other tensor.
    blocks = sum(-(-parameter.numel() // 256) for parameter in model.parameters())
    assert sum(account[name]["float32"] for name in scales) == (0 if level == "O1" else 4 * (blocks + 2 * 3))
    stored = [
        value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)
    ]
    assert sum(sum(sizes.values()) for sizes in account.values()) == sum(value.nbytes for value in stored)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_layers_of_torchao(recipe: Any) -> None:
    """They hold no cast from step to step: their weights are as large as before."""
    model = model_of()
    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    convert_to_float8_training(model, config=config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer)
    account = memory_account([model], [optimizer])
    assert account["weights"] == account["gradients"] == {"bfloat16": 2 * ELEMENTS}
    assert account["optimizer"] == {"momentum_buffer": {"bfloat16": 2 * ELEMENTS}}
    held = [*model.parameters(), *model.buffers()]
    assert sum(account["weights"].values()) + account["buffers"] == sum(tensor.nbytes for tensor in held)


def test_weights_that_torchao_stores_in_fp8_are_counted_as_stored() -> None:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    model = model_of()
    quantize_(model, Float8WeightOnlyConfig())
    account = memory_account([model], [])["weights"]
    # A byte for each element of a matrix, and a scale of 4 bytes a row; the bias stays.
    assert account == {"float8_e4m3fn": 32 * 48 + 48 * 16 + 4 * (48 + 16), "bfloat16": 2 * 48}


def test_what_is_shared_counts_once() -> None:
    model = model_of()
    tied = nn.Sequential(model[0], model[0])
    assert memory_account([tied, model[0]], [])["weights"] == {"bfloat16": 2 * (32 * 48 + 48)}
    frozen = model_of().requires_grad_(False)
    assert memory_account([frozen], [])["gradients"] == {}


def test_a_sharded_tensor_counts_with_its_part() -> None:
    class Sharded:
        def to_local(self) -> Tensor:
            return torch.zeros(5, dtype=torch.float32)

    sharded: Any = Sharded()
    assert bytes_of(sharded) == 20
