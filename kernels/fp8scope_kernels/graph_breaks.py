"""Functions at whose call a compiled graph breaks, so that they run in eager code."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

P = ParamSpec("P")
R = TypeVar("R")


def break_graph(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate `function` so that compiled graphs break at its call, as `torch.compiler.disable` does.

    That imports torch._dynamo at once: more than a second of CPU time, which a process that compiles nothing
    need not pay. torch's own lazy form, where this version has it, imports it when something is compiled.
    """
    lazy: Callable[[Callable[P, R]], Callable[P, R]] | None = getattr(torch, "_disable_dynamo", None)
    in_graph = lazy(function) if lazy is not None else torch.compiler.disable(function)  # type: ignore[no-untyped-call]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return in_graph(*args, **kwargs) if is_dynamo_compiling() else function(*args, **kwargs)

    return call
