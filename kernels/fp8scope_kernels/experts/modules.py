"""Modules of other libraries that hold the weights of experts as 3-D parameters, with products in FP8.

Such a module keeps its object, its parameters and their names, and its own code. `make_fp8` gives it a class
of its own, derived from its class, whose forward pass watches the products: those with one of its 3-D
parameters, whole or of one expert, are computed by `ExpertProducts`. Transformers' modules compute grouped
products instead of what their configuration says, because some of its choices are kernels of their own.
"""

import copyreg
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fp8scope_kernels.experts.grouped_linear import autocast_dtype
from fp8scope_kernels.experts.passes import Span
from fp8scope_kernels.experts.products import CONTAINER, ExpertProducts, refuse_graphs, spans_of
from fp8scope_kernels.plain_tensors import PLAIN_TYPES, is_dtensor
from fp8scope_kernels.random_stream import seed_rounding
from fp8scope_kernels.recipes import Recipe
from fp8scope_kernels.torch_internals import break_graph, is_fake
from fp8scope_kernels.unit_products import ALIGNMENT

WARNED = "_fp8_warned"
"""The attribute with the uses of weights that a converted module has warned of."""
NAMES = ("expert", "moe")
"""A class or module whose name has one of these is taken for one of experts."""
REGISTRY = "transformers.integrations.moe"
"""Transformers' module with the functions that compute experts, by name."""

UNKNOWN = "3-D weights, which are not known to be those of experts: name it with include"
SHARDED = "its weight is sharded over ranks: convert before fully_shard; experts must be whole"
REPLACED = "its forward was replaced"
IN_A_LIST = "3-D weights in a list, which computes nothing itself"
LISTS = (nn.ParameterList, nn.ParameterDict)


def expert_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module that may be the weights of experts: 3-D, of at least two matrices."""
    # A convolution has weights of three dimensions; a class of FSDP2 around a module is none of torch.nn.
    own = type(module).__module__.startswith("torch.nn.") and not isinstance(module, LISTS)
    if own or isinstance(module, nn.modules.conv._ConvNd | nn.Bilinear):
        return {}
    return {
        name: parameter
        for name, parameter in module._parameters.items()
        if parameter is not None
        and parameter.dim() == 3
        and parameter.is_floating_point()
        and parameter.shape[0] > 1
        and min(parameter.shape[1:]) >= ALIGNMENT
    }


def are_known_experts(path: str, module: nn.Module) -> bool:
    """Return whether the module is one of Transformers' experts, or is called like experts."""
    names = (type(module).__name__.lower(), path.rpartition(".")[2].lower())
    return _is_of_transformers(module) or any(word in name for word in NAMES for name in names)


def reason_of_experts(module: nn.Module) -> str | None:
    """Return why the 3-D weights of this module cannot be multiplied in FP8, or None."""
    if isinstance(module, LISTS):
        return IN_A_LIST
    if "forward" in module.__dict__:
        return REPLACED
    for name, weight in expert_weights(module).items():
        if is_dtensor(weight):
            return SHARDED
        if not (type(weight) in PLAIN_TYPES or is_fake(weight)):
            return f"its weight is a {type(weight).__name__}"
        if weight.dtype.itemsize == 1:
            return f"its weight is quantised already: {str(weight.dtype).removeprefix('torch.')}"
        if any(size % ALIGNMENT for size in weight.shape[1:]):
            rows, columns = weight.shape[1:]
            return f"{name}: {rows} x {columns} is not in multiples of {ALIGNMENT}"
    return None


def make_fp8(module: nn.Module, recipe: Recipe, path: str) -> None:
    """Compute the products with the module's 3-D weights in FP8 from now on. `path`: that in the model."""
    container = nn.ModuleDict()
    for name, weight in expert_weights(module).items():
        out_features, in_features = _features(module, weight)
        container[name] = ExpertProducts(recipe, weight.shape, in_features, out_features, weight.device)
    container.train(module.training)
    module.add_module(CONTAINER, container)
    module.__class__ = fp8_class(type(module))
    seed_rounding(module, path=path)


def make_plain(module: nn.Module) -> bool:
    """Undo `make_fp8`. False for a subclass of another kind, which is left as it is."""
    kind: Any = type(module)
    plain = plain_class(kind)
    if plain is None:
        return False
    for products in module.get_submodule(CONTAINER).children():
        assert isinstance(products, ExpertProducts)
        products.slots.clear()
    delattr(module, CONTAINER)
    module.__dict__.pop(WARNED, None)
    module.__class__ = plain
    return True


def _features(module: nn.Module, weight: Tensor) -> tuple[int, int]:
    """The outputs and inputs of an expert; -1 where only the module's code says which is which."""
    is_transposed = getattr(module, "is_transposed", None)
    if not _is_of_transformers(module) or not isinstance(is_transposed, bool):
        return -1, -1
    first, second = weight.shape[1:]
    return (second, first) if is_transposed else (first, second)


def _is_of_transformers(module: nn.Module) -> bool:
    """Return whether Transformers' registry decides how these experts are computed."""
    return (
        _grouped_forward() is not None
        and hasattr(module, "_is_expert_parallel")
        and hasattr(module, "has_gate")
    )


def _grouped_forward() -> Callable[..., Any] | None:
    # Transformers is loaded by the time that there is such a module; importing it takes long.
    functions: Any = getattr(sys.modules.get(REGISTRY), "ALL_EXPERTS_FUNCTIONS", None)
    return None if functions is None else functions.get("grouped_mm", None)


class Fp8Experts(nn.Module):
    """Base of the classes that `make_fp8` makes of those of other libraries.

    `plain`: the class that the module had. Its forward pass computes what that class does, but for the
    products. Second derivatives, torch.compile and torch.export are as in `Fp8GroupedLinear`.
    """

    plain: ClassVar[type[nn.Module]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        # The class does not exist in the module that its name says.
        if isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            return _new, (self.plain,), *reduced[2:]
        return reduced


_classes: dict[Any, type[Fp8Experts]] = {}


def fp8_class(plain: type[nn.Module]) -> type[Fp8Experts]:
    """The class of converted modules of a class; there is one for each."""
    if plain not in _classes:
        own = {"plain": plain, "__module__": __name__, "__doc__": f"{plain.__name__} with products in FP8."}
        _classes[plain] = type(f"Fp8{plain.__name__}", (Fp8Experts, plain), own)
    return _classes[plain]


def plain_class(kind: type[Fp8Experts]) -> type[nn.Module] | None:
    """The class of a module before `make_fp8`, also of one that FSDP2 has wrapped; None if unknown."""
    if kind is fp8_class(kind.plain):
        return kind.plain
    # fully_shard gives a module a class made of FSDPModule and the module's own.
    bases = kind.__bases__
    if len(bases) == 2 and bases[0].__name__ == "FSDPModule" and bases[1] is fp8_class(kind.plain):
        own = {key: value for key, value in kind.__dict__.items() if key == "__deepcopy__"}
        return type(f"FSDP{kind.plain.__name__}", (bases[0], kind.plain), own)
    return None


def _new(plain: type[nn.Module]) -> nn.Module:
    kind = fp8_class(plain)
    return kind.__new__(kind)


@break_graph
def _forward(module: Fp8Experts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    refuse_graphs()
    forward: Any = _grouped_forward() if _is_of_transformers(module) else type(module).plain.forward
    with _WatchedProducts(module) as watched:
        output = forward(module, *args, **kwargs)
    watched.warn_of_others()
    return output


@dataclass(frozen=True)
class _Weight:
    """A tensor that is made of a parameter: 3-D, or the matrix of one expert.

    `name`: of the parameter. `tensor` is kept, so that its id stays its own. `expert`: its number; -1: all.
    """

    tensor: Tensor
    name: str
    expert: int = -1


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


class _WatchedProducts(TorchFunctionMode):
    """Within the block, products with the weights of a converted module are in FP8."""

    def __init__(self, module: Fp8Experts) -> None:
        super().__init__()
        self._module = module
        self._products: dict[str, ExpertProducts] = dict(module.get_submodule(CONTAINER).named_children())  # type: ignore[arg-type]
        self._weights: dict[int, _Weight] = {}
        for name, parameter in module._parameters.items():
            if name in self._products and parameter is not None:
                self._follow(_Weight(parameter, name))
        self._others: set[str] = set()
        self._is_used = False

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
            product = self._product(name, args, kwargs)
            if product is not None:
                self._is_used = True
                return product
        result = func(*args, **kwargs)
        source = self._weight_of(args[0]) if args else None
        is_followed = name in LIKE if source is None else self._derive(source, name, args, kwargs, result)
        if not is_followed:
            self._others |= {f"{weight.name} by {name}" for weight in weights}
        return result

    def warn_of_others(self) -> None:
        """Warn once of a module that uses its weights in another way, in which they are not FP8."""
        warned: set[str] = self._module.__dict__.setdefault(WARNED, set())
        if not (self._is_used or self._others):
            # Operators and functions of autograd, written in C++ or Triton, do not show what they multiply.
            self._others.add("none of its weights in a product that torch shows")
        others = self._others - warned
        if others:
            warned |= others
            warnings.warn(
                f"{type(self._module).plain.__name__} uses {', '.join(sorted(others))}, which is not in FP8. "
                "In FP8 are torch's grouped product, and linear, matmul, mm and bmm with the weight of one "
                "expert or of all.",
                UserWarning,
                stacklevel=4,
            )

    def _weight_of(self, value: Any) -> _Weight | None:
        return self._weights.get(id(value)) if isinstance(value, Tensor) else None

    def _follow(self, weight: _Weight) -> None:
        self._weights[id(weight.tensor)] = weight

    def _derive(
        self, weight: _Weight, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> bool:
        """Follow what a function makes of a weight. False if it is something else."""
        if not isinstance(result, Tensor):
            if name == "unbind" and weight.expert < 0 and not any(_dims(args, kwargs)):
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
        index = _expert_of(name, args, kwargs) if weight.expert < 0 else None
        if index is not None and result.dim() == 2:
            self._follow(replace(weight, tensor=result, expert=index % weight.tensor.shape[0]))
            return True
        return False

    def _product(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
        """The product in FP8; None for one of another form."""
        names = ("input", "weight", "bias" if name == "linear" else "offs")
        given: dict[str, Any] = {**kwargs, **dict(zip(names, args, strict=False))}
        x = given.get("input", given.get("mat_a", given.get("mat1")))
        right = given.get("weight", given.get("mat_b", given.get("mat2", given.get("other"))))
        weight = self._weight_of(right)
        if weight is None or not isinstance(x, Tensor) or self._weight_of(x) is not None:
            return None
        # The matrix on the right of a product is [in, out], but that of `linear`.
        matrices = weight.tensor if name == "linear" else weight.tensor.mT
        dtype = x.dtype if name in WITHOUT_AUTOCAST else autocast_dtype(x)
        products = self._products[weight.name]
        if weight.expert >= 0:
            return _of_one(products, weight.expert, x, matrices, given.get("bias"), dtype)
        self._check_number(products, weight)
        offsets, count = given.get("offs"), products.experts
        if isinstance(offsets, Tensor) and x.dim() == 2:
            output: Tensor = products(x, matrices, None, spans_of(offsets, count, x.shape[0]), dtype)
        elif x.dim() == 3 and name != "linear" and x.shape[0] == count:
            # The same number of tokens for each.
            size = x.shape[1]
            spans = [Span(expert, expert, expert * size, (expert + 1) * size) for expert in range(count)]
            flat = products(x.flatten(0, 1), matrices, None, spans if size else [], dtype)
            output = flat.unflatten(0, (count, size))
        else:
            return None
        bias, out_dtype = given.get("bias"), given.get("out_dtype")
        output = output if bias is None else output + bias
        return output if out_dtype is None else output.to(out_dtype)

    def _check_number(self, products: ExpertProducts, weight: _Weight) -> None:
        if weight.tensor.shape[0] != products.experts:
            raise RuntimeError(
                f"{weight.name} had {products.experts} experts when it was converted, and has "
                f"{weight.tensor.shape[0]}. Experts that are divided among ranks cannot be FP8: leave them "
                "out with convert(..., exclude=...)."
            )


def _of_one(
    products: ExpertProducts, expert: int, x: Tensor, matrix: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    spans = [Span(expert, 0, 0, flat.shape[0])] if flat.shape[0] else []
    biases = None if bias is None else bias.unsqueeze(0)
    output: Tensor = products(flat, matrix.unsqueeze(0), biases, spans, dtype)
    return output.view(*x.shape[:-1], matrix.shape[0])


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
