"""Follows the weights of experts through a forward pass, to the products that they take part in.

torch shows a `TorchFunctionMode` each function that a module calls. So the casts, transposes and choices of
one expert that a module makes of a 3-D parameter are known, and with them the products with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

ALL, SOME = -1, -2
"""In place of an expert's number: all experts, in their order; some of them, or in another order."""


@dataclass(frozen=True)
class FollowedWeight:
    """A tensor that is made of a parameter: 3-D, or the matrix of one expert.

    `name`: of the parameter. `tensor` is kept, so that its id stays its own. `expert`: its number, ALL or
    SOME.
    """

    tensor: Tensor
    name: str
    expert: int = ALL


CASTS = frozenset(
    ("to", "type", "bfloat16", "half", "float", "double", "contiguous", "clone", "detach", "data", "to_local")
)
TURNS = frozenset(("transpose", "swapaxes", "swapdims"))
MATRIX_TURNS = frozenset(("t", "mT", "T"))
PRODUCTS = frozenset(("_grouped_mm", "grouped_mm", "grouped_mm_fallback", "linear", "matmul", "mm", "bmm"))
WITHOUT_AUTOCAST = frozenset(("_grouped_mm", "grouped_mm", "grouped_mm_fallback"))
NO_USE = frozenset(("grad", "requires_grad_"))
"""Functions whose result is a tensor, and that are no use of the weight."""
LIKE = frozenset(("to", "type_as"))
"""Functions that read only the dtype and the device of a further argument."""


@dataclass(frozen=True, kw_only=True)
class WeightProduct:
    """A call of a product with a followed weight.

    `x`: the other factor. `given`: the arguments by name. `on_left`: whether the weight is the first factor.
    """

    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    name: str
    weight: FollowedWeight
    x: Tensor
    given: Mapping[str, Any]
    on_left: bool

    def call(self) -> Any:
        """The product as the module computes it."""
        return self.function(*self.args, **self.kwargs)


class FollowedWeights(TorchFunctionMode):
    """Within the block, products with the weights are passed to `multiply`, which subclasses override.

    `others`: other uses of the weights, in words. `is_used`: whether `multiply` computed a product.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._weights: dict[int, FollowedWeight] = {}
        for name, tensor in weights.items():
            self._follow(FollowedWeight(tensor, name))
        self.others: set[str] = set()
        self.is_used = False

    def multiply(self, product: WeightProduct) -> Any:
        """The product; None for one of a form that is not known."""
        raise NotImplementedError

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        weights = [
            weight for value in _flat((args, kwargs)) if (weight := self._weight_of(value)) is not None
        ]
        if not weights:
            return func(*args, **kwargs)
        name = _name_of(func)
        if name in PRODUCTS:
            product = self._product(func, name, args, kwargs)
            result = None if product is None else self.multiply(product)
            if result is not None:
                self.is_used = True
                return result
        result = func(*args, **kwargs)
        source = self._weight_of(args[0]) if args else None
        is_followed = name in LIKE if source is None else self.derive(source, name, args, kwargs, result)
        if not is_followed:
            self.others |= {f"{weight.name} by {name}" for weight in weights}
        return result

    def _weight_of(self, value: Any) -> FollowedWeight | None:
        return self._weights.get(id(value)) if isinstance(value, Tensor) else None

    def _follow(self, weight: FollowedWeight) -> None:
        self._weights[id(weight.tensor)] = weight

    def derive(
        self, weight: FollowedWeight, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> bool:
        """Follow what a function makes of a weight. False if it is something else."""
        if not isinstance(result, Tensor):
            if name == "unbind" and weight.expert == ALL and not any(_dims(args, kwargs)):
                for expert, matrix in enumerate(result):
                    self._follow(replace(weight, tensor=matrix, expert=expert))
                return True
            # A size, a dtype, a device.
            return not any(isinstance(value, Tensor) for value in _flat(result))
        if name in NO_USE:
            return True
        if name in CASTS:
            self._follow(replace(weight, tensor=result))
            return True
        dimensions = weight.tensor.dim()
        turned = {dim % dimensions for dim in _dims(args, kwargs)} if name in TURNS else set()
        if turned == {dimensions - 2, dimensions - 1} or (
            name in MATRIX_TURNS and (dimensions == 2 or name == "mT")
        ):
            self._follow(replace(weight, tensor=result))
            return True
        index = _expert_of(name, args, kwargs) if weight.expert == ALL else None
        if index is not None and result.dim() == 2:
            self._follow(replace(weight, tensor=result, expert=index % weight.tensor.shape[0]))
            return True
        return False

    def _product(
        self, function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> WeightProduct | None:
        names = ("input", "weight", "bias" if name == "linear" else "offs")
        given: dict[str, Any] = {**kwargs, **dict(zip(names, args, strict=False))}
        left = given.get("input", given.get("mat_a", given.get("mat1")))
        right = given.get("weight", given.get("mat_b", given.get("mat2", given.get("other"))))
        weights = self._weight_of(left), self._weight_of(right)
        weight, x = (weights[1], left) if weights[1] is not None else (weights[0], right)
        if weight is None or not isinstance(x, Tensor) or None not in weights:
            return None
        return WeightProduct(
            function=function,
            args=args,
            kwargs=kwargs,
            name=name,
            weight=weight,
            x=x,
            given=given,
            on_left=weights[0] is not None,
        )


def _name_of(func: Any) -> str:
    """The name of a function, a method or a property of torch."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(func.__self__, "__name__", "")
    return {"__matmul__": "matmul", "__rmatmul__": "matmul"}.get(name, name)


def _dims(args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
    return [value for value in (*args[1:], *kwargs.values()) if isinstance(value, int)]


def _expert_of(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
    """The expert that an index chooses; None for another index."""
    index: Any = None
    if name == "__getitem__":
        index = args[1]
        index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    elif name == "select" and _dims(args, kwargs)[0] == 0:
        index = _dims(args, kwargs)[1]
    if isinstance(index, Tensor):
        is_number = not (index.dim() or index.is_floating_point() or index.dtype == torch.bool)
        return int(index) if is_number else None
    return index if isinstance(index, int) and not isinstance(index, bool) else None


def _flat(values: Any) -> list[Any]:
    """The values in nested lists, tuples and dicts."""
    if isinstance(values, dict):
        values = tuple(values.values())
    if not isinstance(values, list | tuple):
        return [values]
    return [inner for value in values for inner in _flat(value)]
