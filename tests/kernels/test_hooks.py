"""Hooks of our own on optimizers, which iterate over them: they may be removed at any time."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from fp8scope_kernels.hooks import (
    HookHandle,
    register_step_post_hook,
    register_step_pre_hook,
    register_step_pre_hook_of_all,
    remove_hooks,
)


def optimizer() -> SGD:
    made = SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    for group in made.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    return made


@pytest.mark.parametrize("when", ["before", "after"])
def test_it_works(when: str) -> None:
    """A hook removes itself and another one, and the script's own hooks around it are called all the same."""
    trained = optimizer()
    calls: list[str] = []
    handles: list[HookHandle] = []

    def remove(*args: Any) -> None:
        calls.append("ours")
        for handle in handles:
            handle.remove()

    before = when == "before"
    register = register_step_pre_hook if before else register_step_post_hook
    register_own: Any = trained.register_step_pre_hook if before else trained.register_step_post_hook
    register_own(lambda *args: calls.append("first"))
    handles += [register(trained, remove), register(trained, lambda *args: calls.append("other"))]
    register_own(lambda *args: calls.append("last"))
    trained.step()
    trained.step()
    assert calls == ["first", "ours", "last", "first", "last"]
    table: Any = trained._optimizer_step_pre_hooks if before else trained._optimizer_step_post_hooks
    # What is left of them goes with the next hook that is registered.
    register(trained, lambda *args: None).remove()
    assert len(table) == 2


def test_a_hook_of_all_optimizers_may_register_others() -> None:
    trained = optimizer()
    calls: list[str] = []

    def begin(stepping: Any, *args: Any) -> None:
        if stepping is trained and not calls:
            calls.append("of all")
            register_step_pre_hook(trained, lambda *args: calls.append("own"))

    handle = register_step_pre_hook_of_all(begin)
    trained.register_step_pre_hook(lambda *args: calls.append("script"))
    trained.step()
    handle.remove()
    trained.step()
    assert calls == ["of all", "script", "own", "script", "own"]


class Hook:
    """A hook that removes all of its type."""

    def __call__(self, stepping: Any, *args: Any) -> None:
        remove_hooks(stepping._optimizer_step_pre_hooks, Hook)


def test_hooks_of_a_type_are_removed_in_a_step() -> None:
    trained = optimizer()
    calls: list[str] = []
    register_step_pre_hook(trained, Hook())
    register_step_pre_hook(trained, Hook())
    trained.register_step_pre_hook(lambda *args: calls.append("script"))
    trained.step()
    assert calls == ["script"]
