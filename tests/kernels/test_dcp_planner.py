"""Checkpoints of torch.distributed.checkpoint: the present form, the older one, and what lacks a part."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.process_group import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save as write
from torch.distributed.fsdp import fully_shard

from fp8scope_kernels import CurrentScaling, DelayedScaling, Recipe, convert, scaling_status
from fp8scope_kernels.dcp_planner import ScalingLoadPlanner

NAMES = [f"{layer}.{role}" for layer in "02" for role in ("input", "weight", "grad_output")]
OLDER_FORM = "older form, which was read without loss"


def make_model(recipe: Recipe) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    convert(model, recipe)
    return model


def batch(seed: int = 1) -> Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, steps: int = 3) -> None:
    for _ in range(steps):
        model(batch()).square().mean().backward()


def in_the_older_form(state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint from when the number of calls was extra state."""
    return {key.replace(".calls", "._extra_state"): value for key, value in state.items()}


@contextmanager
def loading() -> Iterator[list[str]]:
    """The messages of this project's warnings; torch has warnings of its own about loading on one process."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(w.message) for w in caught if "scaling state" in str(w.message)]


def load(model: nn.Module, folder: Path, planner: DefaultLoadPlanner | None, *, nested: bool = True) -> None:
    state: dict[str, Any] = get_model_state_dict(model)
    read({"model": state} if nested else state, checkpoint_id=folder, planner=planner)
    set_model_state_dict(model, state)


def save(state: dict[str, Any], folder: Path, *, nested: bool = True) -> None:
    write({"model": state, "step": 3} if nested else state, checkpoint_id=folder)


def assert_twins(twin: nn.Module, model: nn.Module) -> None:
    """The same state, and the same outputs for as long as it takes to turn the history over."""
    before, after = twin.state_dict(), model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in after)
    for seed in range(1, 6):
        assert torch.equal(twin(batch(seed)), model(batch(seed)))


@pytest.mark.parametrize("nested", [True, False])
def test_it_works(tmp_path: Path, nested: bool) -> None:
    """An older checkpoint is read in full, and one warning tells of all its tensors."""
    recipe = DelayedScaling(history_length=4, interval=2)
    model, twin = make_model(recipe), make_model(recipe)
    train(model)
    save(in_the_older_form(model.state_dict()), tmp_path, nested=nested)
    with loading() as messages:
        load(twin, tmp_path, ScalingLoadPlanner(), nested=nested)
    assert len(messages) == 1 and OLDER_FORM in messages[0]
    assert scaling_status(twin) == dict.fromkeys(NAMES, "restored")
    assert_twins(twin, model)


def test_current_checkpoints_load_with_and_without_the_planner(tmp_path: Path) -> None:
    model = make_model(DelayedScaling())
    train(model)
    save(model.state_dict(), tmp_path)
    for planner in (None, ScalingLoadPlanner()):
        twin = make_model(DelayedScaling())
        with loading() as messages:
            load(twin, tmp_path, planner)
        assert messages == []
        assert scaling_status(twin) == dict.fromkeys(NAMES, "restored")
        for name, buffer in twin.named_buffers():
            assert torch.equal(buffer, model.get_buffer(name))


def test_recipes_without_a_count_load_unchanged(tmp_path: Path) -> None:
    model, twin = make_model(CurrentScaling()), make_model(CurrentScaling())
    train(model)
    save(model.state_dict() | {"0.scaling.input._extra_state": torch.tensor(3)}, tmp_path)
    with loading() as messages:
        load(twin, tmp_path, ScalingLoadPlanner())
    assert messages == []
    assert_twins(twin, model)


def test_torchs_planner_names_what_an_older_checkpoint_lacks(tmp_path: Path) -> None:
    model = make_model(DelayedScaling())
    train(model)
    save(in_the_older_form(model.state_dict()), tmp_path)
    with pytest.raises(CheckpointException, match=r"Missing key .*scaling\.input\.calls"):
        load(make_model(DelayedScaling()), tmp_path, None)


def test_a_partially_loaded_state_is_reported_and_not_used(tmp_path: Path) -> None:
    """What torch's planner makes of an older checkpoint when it may leave out what it does not find."""
    model, twin = make_model(DelayedScaling()), make_model(DelayedScaling())
    train(model)
    save(in_the_older_form(model.state_dict()), tmp_path)
    with loading() as messages:
        load(twin, tmp_path, DefaultLoadPlanner(allow_partial_load=True))
    assert messages and all("or only part of it" in message for message in messages)
    assert scaling_status(twin) == dict.fromkeys(NAMES, "missing")
    for name, buffer in twin.named_buffers():
        assert not buffer.any(), name


def test_other_missing_keys_are_still_errors(tmp_path: Path) -> None:
    model = make_model(DelayedScaling())
    state = in_the_older_form(model.state_dict())
    del state["2.scaling.weight._extra_state"], state["0.bias"]
    for missing in ("0.bias", "2.scaling.weight.calls"):
        save(state, tmp_path / missing)
        with (
            pytest.warns(UserWarning, match=OLDER_FORM),
            pytest.raises(CheckpointException, match=rf"Missing key .*model\.{missing}"),
        ):
            load(make_model(DelayedScaling()), tmp_path / missing, ScalingLoadPlanner())
        state["0.bias"] = torch.zeros(64)


def test_a_buffer_called_calls_elsewhere_is_not_taken_for_a_count(tmp_path: Path) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

    save({"counter._extra_state": torch.ones(())}, tmp_path)
    with pytest.raises(CheckpointException, match=r"Missing key .*counter\.calls"):
        load(nn.ModuleDict({"counter": Counter()}), tmp_path, ScalingLoadPlanner())


def job_older_form(rank: int, size: int, folder: str) -> dict[str, Any]:
    models = [make_model(DelayedScaling(history_length=3)) for _ in range(2)]
    for model in models:
        fully_shard(model)
    trained, restored = models
    train(trained)
    save(in_the_older_form(get_model_state_dict(trained)), Path(folder))
    with loading() as messages:
        load(restored, Path(folder), ScalingLoadPlanner())
    outputs = [model(batch(9)) for model in models]
    return {
        "messages": messages,
        "status": scaling_status(restored),
        "equal": torch.equal(*outputs),
        "calls": [buffer.item() for name, buffer in restored.named_buffers() if name.endswith("calls")],
    }


def test_sharded_models_read_older_checkpoints(tmp_path: Path) -> None:
    for result in run_ranks(job_older_form, 2, str(tmp_path)):
        assert len(result["messages"]) == 1
        assert result["status"] == dict.fromkeys(NAMES, "restored")
        assert result["equal"]
        # The forward pass after loading counted once more.
        assert result["calls"] == [4, 4, 3] * 2
