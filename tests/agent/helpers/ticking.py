"""A model and an optimizer that take known times of a clock, which goes on only when it is ticked."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fp8scope.guard import Guard
from fp8scope.observe.timing import Measures
from fp8scope.observe.timing.anatomy import PARTS, scalar_of
from fp8scope.observe.timing.clock import PHASES


class Slow(torch.autograd.Function):
    """Ticks the clock by `forward` units when called, by `backward` units in the backward pass."""

    tick: Callable[[float], None]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.backward_ticks = backward
        Slow.tick(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        Slow.tick(ctx.backward_ticks)
        return grads[0], None, None


class Model(nn.Module):
    """Takes 2 units forward and 3 backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Slow.apply(self.inner(x), 2.0, 3.0)  # type: ignore[no-untyped-call]
        return y


class Sgd(torch.optim.SGD):
    """Takes 5 units a step."""

    def step(self, closure: Any = None) -> Any:
        Slow.tick(5.0)
        return super().step(closure)


class Loop:
    """A model, its optimizer, and their measures."""

    def __init__(self) -> None:
        self.model = Model()
        self.optimizer = Sgd(self.model.parameters(), lr=0.1)
        self.guard = Guard()
        self.measures = Measures(self.guard)
        self.measures.watch(self.model, self.optimizer)

    def times(self) -> dict[str, float]:
        """End the step; its parts in clock units."""
        reading = self.measures.end({})
        assert reading is not None and reading.is_ready() and self.guard.errors == 0
        scalars = reading.read()
        return {name.removeprefix("time_"): scalars[name] for name in PHASES if name in scalars}

    def anatomy(self) -> dict[str, float]:
        """End the step; the parts of its anatomy that took time, in clock units."""
        reading = self.measures.end({})
        assert reading is not None and self.guard.errors == 0
        scalars = reading.read()
        parts = {name: scalars.get(scalar_of(name), 0.0) for name in PARTS}
        assert sum(parts.values()) == sum(scalars[name] for name in PHASES)
        return {name: seconds for name, seconds in parts.items() if seconds}


def x() -> torch.Tensor:
    return torch.ones(2, 4)
