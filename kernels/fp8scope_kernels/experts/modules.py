"""Modules of other libraries that hold the weights of experts as 3-D parameters, with products in FP8.

Such a module keeps its object, its parameters and their names, and its own code. `make_fp8` gives it a class
of its own, derived from its class, whose forward pass watches the products: those with one of its 3-D
parameters, whole or of one expert, are computed by `ExpertProducts`. Transformers' modules compute grouped
products instead of what their configuration says, because some of its choices are kernels of their own.
"""

import copyreg
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp8scope_kernels.experts.followed_weights import (
    WITHOUT_AUTOCAST,
    FollowedWeight,
    FollowedWeights,
    WeightProduct,
)
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


def weights_named(module: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """The parameters of a module that have these names at present."""
    parameters = {name: module._parameters.get(name) for name in names}
    return {name: parameter for name, parameter in parameters.items() if parameter is not None}


def experts_in_high_precision(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules with weights of experts that an FP8 run of this model would convert, with their paths."""
    for path, module in model.named_modules():
        if isinstance(module, Fp8Experts) or not expert_weights(module):
            continue
        # FSDP2 divides the weights between forward passes only.
        if are_known_experts(path, module) and reason_of_experts(module) in (None, SHARDED):
            yield path, module


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
    with _Fp8Weights(module) as watched:
        output = forward(module, *args, **kwargs)
    watched.warn_of_others()
    return output


class _Fp8Weights(FollowedWeights):
    """Within the block, products with the weights of a converted module are in FP8."""

    def __init__(self, module: Fp8Experts) -> None:
        self._module = module
        self._products: dict[str, ExpertProducts] = dict(module.get_submodule(CONTAINER).named_children())  # type: ignore[arg-type]
        super().__init__(weights_named(module, self._products))

    def warn_of_others(self) -> None:
        """Warn once of a module that uses its weights in another way, in which they are not FP8."""
        warned: set[str] = self._module.__dict__.setdefault(WARNED, set())
        if not (self.is_used or self.others):
            # Operators and functions of autograd, written in C++ or Triton, do not show what they multiply.
            self.others.add("none of its weights in a product that torch shows")
        others = self.others - warned
        if others:
            warned |= others
            warnings.warn(
                f"{type(self._module).plain.__name__} uses {', '.join(sorted(others))}, which is not in FP8. "
                "In FP8 are torch's grouped product, and linear, matmul, mm and bmm with the weight of one "
                "expert or of all.",
                UserWarning,
                stacklevel=4,
            )

    def multiply(self, product: WeightProduct) -> Tensor | None:
        """The product in FP8; None for one of another form."""
        weight, x, given, name = product.weight, product.x, product.given, product.name
        if product.on_left:
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

    def _check_number(self, products: ExpertProducts, weight: FollowedWeight) -> None:
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
