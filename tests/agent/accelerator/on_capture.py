"""Training steps with counters, in a graph on the emulated accelerator. test_accelerator.py runs this file.

A captured graph, such as a CUDA graph, holds the operators that a step has launched, with the addresses of
their tensors. A replay launches them again; no code of the host runs. `Capture` does the same with torch's
operators, and refuses what a device's capture refuses.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from agent.helpers.emulated_accelerator import NAME, Module
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fp8scope_kernels import (
    MXFP4,
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipe,
    RowwiseScaling,
    StatisticsBuffer,
    convert,
    devices,
    keep_weights,
    observe,
)

RECIPES: tuple[Recipe, ...] = (
    DelayedScaling(history_length=2),
    DelayedScaling(history_length=3, interval=2, amax_compute="most_recent"),
    CurrentScaling(),
    CurrentScaling(stochastic_gradients=True),
    RowwiseScaling(),
    BlockScaling(),
    MXFP8(),
    MXFP4(stochastic_gradients=True),
    NVFP4(),
)
recipes = pytest.mark.parametrize("recipe", RECIPES, ids=str)
DATA_DEPENDENT = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique_dim",
        "_unique2", "unique_consecutive", "bincount", "repeat_interleave.Tensor", "allclose", "_pin_memory",
    )
)  # fmt: skip
"""Operators whose result the host waits for, or whose shape depends on numbers."""


class NotCapturable(RuntimeError):
    """An operator that a device's capture refuses."""


class Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators on the accelerator that are called inside of it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        before, after = _tensors((args, kwargs)), _tensors(result)
        _refuse(func, before, after, kwargs)
        if any(x.device.type == NAME for x in (*before, *after)):
            self.operators.append((func, args, kwargs, after))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, outputs in self.operators:
            for output, new in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
                if new.untyped_storage().data_ptr() != output.untyped_storage().data_ptr():
                    output.copy_(new)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _refuse(func: Any, before: list[Tensor], after: list[Tensor], kwargs: dict[str, Any]) -> None:
    name = func._schema.name
    on_device = any(x.device.type == NAME for x in before)
    if on_device and (name in DATA_DEPENDENT or (name == "aten::index" and _has_mask(before))):
        raise NotCapturable(f"{name} makes the host wait")
    if kwargs.get("pin_memory"):
        raise NotCapturable(f"{name} allocates pinned memory")
    # A number of the host, without dimensions, is a constant of the launch; torch copies it for nothing else.
    large = [x for x in (*before, *after) if x.dim() or name in ("aten::copy_", "aten::_to_copy")]
    if len({x.device.type for x in large}) > 1:
        raise NotCapturable(f"{name} copies between the host and the device")


def _has_mask(tensors: list[Tensor]) -> bool:
    return any(x.dtype == torch.bool for x in tensors[1:])


@contextmanager
def capturing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Capture]:
    """Within the block the stream is being captured, as the kernels may ask."""
    with monkeypatch.context() as patch:
        patch.setattr(Module, "is_current_stream_capturing", lambda self: True, raising=False)
        with Capture() as capture:
            assert devices.is_capturing(torch.device(NAME, 0))
            yield capture


class Training:
    """A step of a model with FP8 layers and counters, on tensors that stay where they are."""

    def __init__(self, recipe: Recipe, *, checkpointing: bool = False, passes: int = 1) -> None:
        torch.manual_seed(0)
        with torch.device("cpu"):
            self.model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        convert(self.model, recipe)
        self.model.to(NAME)
        self.rows = StatisticsBuffer(device=NAME)
        observe(self.model, self.rows)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, foreach=False)
        self.x = torch.zeros(16, 32, device=NAME)
        self.checkpointing, self.passes = checkpointing, passes

    def step(self) -> None:
        self.rows.zero_()
        self.optimizer.zero_grad(set_to_none=False)
        for _ in range(self.passes):
            y = (
                checkpoint(self.model, self.x, use_reentrant=False)
                if self.checkpointing
                else self.model(self.x)
            )
            y.square().mean().backward()
        self.optimizer.step()

    def load(self, step: int) -> None:
        """Inputs that grow, so that delayed scales saturate."""
        values = torch.randn(16, 32, generator=torch.Generator("cpu").manual_seed(step), device="cpu")
        self.x.copy_(values * 1.5**step)

    def everything(self) -> dict[str, Tensor]:
        grads = {f"{name}.grad": p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        tensors = {**self.model.state_dict(), **dict(self.model.named_buffers()), **grads}
        counters = {"counters": self.rows.data, "block counters": self.rows.block_data}
        return {name: tensor.detach().cpu() for name, tensor in (tensors | counters).items()}


def assert_replays_are_steps(
    training: Training,
    eager: Training,
    monkeypatch: pytest.MonkeyPatch,
    *,
    warm_up: int = 2,
    kept: bool = False,
) -> None:
    """`warm_up` steps, one that is captured, and four replays of it: each equals a step in eager code.

    `kept`: the step is captured within `keep_weights`.
    """
    for step in range(warm_up):
        for own in (training, eager):
            own.load(step)
            own.step()
    for own in (training, eager):
        own.load(warm_up)
    with keep_weights(training.model) if kept else nullcontext(), capturing(monkeypatch) as capture:
        training.step()
    eager.step()
    assert len(capture.operators) > 100
    for step in range(warm_up + 1, warm_up + 5):
        for own in (training, eager):
            own.load(step)
        capture.replay()
        eager.step()
        expected = eager.everything()
        for name, tensor in training.everything().items():
            assert torch.equal(tensor.nan_to_num(), expected[name].nan_to_num()), f"{name}, step {step}"
    assert bool((training.rows.data[:, 0] > 0).all())


@recipes
def test_it_works(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays are steps, bit for bit: weights, gradients, scales, histories, random words and counters."""
    assert_replays_are_steps(Training(recipe), Training(recipe), monkeypatch)


@pytest.mark.parametrize("recipe", [RECIPES[0], RowwiseScaling()], ids=str)
def test_checkpointing(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Training(recipe, checkpointing=True), Training(recipe, checkpointing=True)
    assert_replays_are_steps(*pair, monkeypatch)


@pytest.mark.parametrize("recipe", [RECIPES[0], RowwiseScaling()], ids=str)
def test_a_graph_keeps_no_weights(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replayed with other weights: each of its calls quantises its own."""
    pair = Training(recipe, passes=2), Training(recipe, passes=2)
    assert_replays_are_steps(*pair, monkeypatch, kept=True)


def test_a_first_call_is_decided_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a warm-up step nothing reads whether a delayed scale has been called."""
    pair = Training(RECIPES[0]), Training(RECIPES[0])
    for own in pair:
        # Gradients exist before a step is captured.
        for parameter in own.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    assert_replays_are_steps(*pair, monkeypatch, warm_up=0)


def test_what_a_device_refuses_is_refused_here() -> None:
    x = torch.ones(4, device=NAME)
    refused = (
        lambda: x.sum().item(),
        lambda: bool(x[0] > 0),
        lambda: x.cpu(),
        lambda: x.copy_(torch.ones(4, device="cpu")),
        lambda: torch.ones(4, device="cpu").to(NAME),
        lambda: x[x > 0],
        lambda: x.nonzero(),
        lambda: torch.equal(x, x),
        lambda: torch.empty(1, pin_memory=True, device="cpu"),
    )
    for operation in refused:
        with pytest.raises(NotCapturable), Capture():
            operation()
