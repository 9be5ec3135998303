"""Operators of graphs, and the objects that they look up by a number: layers and observers.

No graph can hold these. It takes the number as a tensor, and not as a constant: objects of the same shape
then share one graph.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])

_numbers = itertools.count(1)
_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()


class GraphObject:
    """An object with a number: `register` gives it these tensors, int64 without dimensions on the CPU.

    `number` stands for the object. Operators change `turn` in forward passes and `turn_back` in backward
    passes, so that the compiler neither merges nor drops nor reorders the calls of one object.
    """

    number: Tensor
    turn: Tensor
    turn_back: Tensor


def register(owner: GraphObject) -> None:
    """Give `owner` a number of its own. A copy needs another one."""
    number = next(_numbers)
    with torch.inference_mode(False):
        owner.number = torch.tensor(number, device="cpu")
        owner.turn = torch.zeros((), dtype=torch.int64, device="cpu")
        owner.turn_back = torch.zeros((), dtype=torch.int64, device="cpu")
    _objects[number] = owner


def look_up(number: Tensor) -> Any:
    """The object with this number; None if it does not exist any more."""
    return _objects.get(int(number))


def operator(name: str, *, mutates_args: Iterable[str] = ()) -> Callable[[Function], Function]:
    """Make a function `torch.ops.fp8scope.<name>`. It is called without gradients, which others define.

    `torch.library.custom_op` does as much, and more for each call: it takes 20 microseconds instead of 4.
    """

    def register_operator(function: Function) -> Function:
        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        qualified = f"fp8scope::{name}"
        torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(qualified, "CompositeExplicitAutograd", function)
        return function

    return register_operator


def fake_of(name: str) -> Callable[[Function], Function]:
    """Make a function the fake of an `operator`: it gives the results their shapes, dtypes and strides."""

    def register_fake(function: Function) -> Function:
        torch.library.register_fake(f"fp8scope::{name}", function)
        return function

    return register_fake
