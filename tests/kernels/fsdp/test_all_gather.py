"""`gather_weights_in_fp8`: training under FSDP2 has the same bits and counters when weights travel in FP8."""

from typing import Any

import pytest
import torch
from helpers.process_group import run_ranks
from kernels.helpers.fsdp_training import Setup, differences
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fp8scope_kernels import CurrentScaling, DelayedScaling, Recipe, fp8_layers
from fp8scope_kernels.recipes import recipe_from_dict

RECIPES: tuple[Recipe, ...] = (
    DelayedScaling(history_length=2),
    CurrentScaling(),
    DelayedScaling(history_length=3, amax_compute="most_recent", interval=2, margin=1),
    CurrentScaling(power_of_two=True, fp8_format="E4M3", stochastic_gradients=True),
)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def freeze(model: nn.Sequential) -> None:
    for path, layer in fp8_layers(model):
        layer.weight.requires_grad_(not path.startswith("0."))


def choose_products(model: nn.Sequential) -> None:
    for (_, layer), products in zip(
        fp8_layers(model), (("fprop", "dgrad"), ("wgrad",), (), ("fprop",), None), strict=True
    ):
        layer.products = products  # type: ignore[assignment]


def evaluate(model: nn.Sequential) -> float:
    """Losses in FP8 and in BF16, of which the second needs the weights as they are."""
    x = torch.ones(4, 32)
    total = 0.0
    model.eval()
    for precision in ("fp8", "bf16", "fp8"):
        for _, layer in fp8_layers(model):
            if layer.precision != precision:
                # Not the setter: it resets delayed scales.
                layer._precision = precision
        with torch.no_grad():
            total += model(x).float().square().mean().item()
    model.train()
    return total


def setups(recipe: Recipe) -> dict[str, Setup]:
    return {
        "blocks": Setup(recipe=recipe),
        "BF16 and float32": Setup(recipe=recipe, policy=MIXED),
        "BF16": Setup(recipe=recipe, dtype=torch.bfloat16),
        "one group": Setup(recipe=recipe, root_only=True),
        "not resharded": Setup(recipe=recipe, reshard_after_forward=False),
        "checkpointing": Setup(recipe=recipe, checkpointing="hooks"),
        "reentrant checkpointing": Setup(recipe=recipe, checkpointing="reentrant", policy=MIXED),
        "micro-batches": Setup(recipe=recipe, micro_batches=3),
        "kept weights": Setup(recipe=recipe, micro_batches=3, keep=True, checkpointing="hooks"),
        "kept weights, unsharded": Setup(recipe=recipe, micro_batches=3, keep=True, stay_unsharded=True),
        "from the meta device": Setup(recipe=recipe, meta=True, policy=MIXED),
        "shards of columns": Setup(recipe=recipe, by_columns=True, policy=MIXED),
        "switched on later": Setup(recipe=recipe, late=True, reshard_after_forward=False),
        "frozen weights": Setup(recipe=recipe, prepare=freeze),
        "some products": Setup(recipe=recipe, prepare=choose_products),
        "evaluation between steps": Setup(recipe=recipe, between=evaluate),
        "evaluation, one group": Setup(recipe=recipe, between=evaluate, root_only=True, keep=True),
    }


FEW = ("blocks", "BF16 and float32", "micro-batches", "kept weights", "evaluation between steps")
"""The setups of the other recipes."""


def job_all(rank: int, size: int, values: dict[str, Any]) -> list[str]:
    failures = []
    recipe = recipe_from_dict(values)
    for name, setup in setups(recipe).items():
        if recipe not in RECIPES[:2] and name not in FEW:
            continue
        failures += [f"{name}: {difference}" for difference in differences(rank, setup)]
    return failures


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_it_works(recipe: Recipe) -> None:
    for failures in run_ranks(job_all, 2, recipe.to_dict()):
        assert failures == []


def job_meshes(rank: int, size: int) -> list[str]:
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
    failures = []
    for recipe in RECIPES[:2]:
        for mesh in (None, hybrid):
            for policy in (MixedPrecisionPolicy(), MIXED):
                setup = Setup(recipe=recipe, mesh=mesh, policy=policy, micro_batches=2)
                failures += [f"{recipe.kind}, {mesh}: {line}" for line in differences(rank, setup)]
    return failures


def test_four_ranks_and_hybrid_sharding() -> None:
    for failures in run_ranks(job_meshes, 4):
        assert failures == []


def job_uneven(rank: int, size: int) -> list[str]:
    """Five ranks: weights with 7 rows on four of them and 4 on the last, and others with none there."""
    setup_of = {
        hidden: Setup(recipe=RECIPES[0], hidden=hidden, policy=MIXED, meta=hidden == 16)
        for hidden in (32, 16)
    }
    return [f"{hidden}: {line}" for hidden, setup in setup_of.items() for line in differences(rank, setup)]


def test_shards_of_different_sizes() -> None:
    for failures in run_ranks(job_uneven, 5):
        assert failures == []
