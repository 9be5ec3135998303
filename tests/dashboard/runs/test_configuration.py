"""What of a configuration identifies a training: equal for an FP8 run, its BF16 baseline and their seeds."""

from __future__ import annotations

from typing import Any

import pytest

from fp8scope_dashboard.runs.configuration import comparable, config_digest, recipe_name

BASE = {"lr": 1e-3, "model": {"width": 256, "depth": 4}, "optimizer_name": "adamw", "betas": [0.9, 0.95]}


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "fp8"},
        {"use_fp8": True},
        {"torch_dtype": "torch.bfloat16"},
        {"fp8": {"recipe": "delayed", "margin": 2}},
        {"amaxHistoryLen": 16},
        {"seed": 3},
        {"data_seed": 3},
        {"run_name": "a", "name": "b", "experimentName": "c", "tags": ["x"]},
        {"output_dir": "/scratch/a", "log_file": "./logs/x.txt", "cache": "~/cache"},
        {"started_at": "2026-01-01", "stamp": "2026-01-01T10:00:00Z"},
        {"wandb_project": "x", "tensorboard": {"every": 10}},
        {"linear": "bf16"},
    ],
)
def test_comparable_runs_may_differ_in(change: dict[str, Any]) -> None:
    assert config_digest({**BASE, **change}) == config_digest(BASE) != ""


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 2e-3},
        {"model": {"width": 256, "depth": 5}},
        {"optimizer_name": "lion"},
        {"betas": [0.95, 0.9]},
        {"data_path": "/data/c4"},
        {"dataset_name": "c4"},
        {"model_name": "gpt2"},
        {"weight_decay": None},
        {"group_size": 128},
        {"runs": 2},
    ],
)
def test_other_entries_tell_apart(change: dict[str, Any]) -> None:
    assert config_digest({**BASE, **change}) != config_digest(BASE)


def test_equal_values_are_equal() -> None:
    assert config_digest({"a": 1, "b": 0.5}) == config_digest({"b": 0.50, "a": 1.0})
    assert config_digest({"data_path": "/x/c4/"}) == config_digest({"data_path": "/mnt/y/c4"})
    assert config_digest({"data_path": "/x/c4"}) != config_digest({"data_path": "/x/pile"})
    # 2^53 + 1 is no float64.
    assert config_digest({"n": 2**53 + 1}) != config_digest({"n": 2**53})


def test_without_comparable_entries_there_is_no_digest() -> None:
    assert config_digest({}) == config_digest({"seed": 1, "precision": "fp8"}) == ""


def test_names_are_dotted_and_lists_indexed() -> None:
    assert comparable(BASE) == {
        "lr": "0.001",
        "model.width": "256.0",
        "model.depth": "4.0",
        "optimizer_name": "adamw",
        "betas[0]": "0.9",
        "betas[1]": "0.95",
    }


def test_deep_configurations_end() -> None:
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"a": deep, "b": 1}
    assert len(comparable(deep)) == 20


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ({"recipe": "DelayedScaling", "margin": 2}, "DelayedScaling"),
        ({"shadow": {"recipe": "MXFP8"}}, "shadow:MXFP8"),
        ({}, ""),
        ({"recipe": 3}, ""),
        ({"recipe": "x" * 100}, "x" * 64),
    ],
)
def test_recipe_names(recipe: dict[str, Any], name: str) -> None:
    assert recipe_name(recipe) == name
