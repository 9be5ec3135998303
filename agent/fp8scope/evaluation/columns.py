"""The precisions of the matrix: how each one packs a weight, and how a layer multiplies with it.

| precision                    | weight                                        | activations   |
|------------------------------|-----------------------------------------------|---------------|
| `bf16`                       | BF16; the reference of all others             | BF16          |
| `fp8-current`, `fp8-rowwise`,| E4M3, scaled as the recipe says               | E4M3, the same|
| `fp8-block`, `mxfp8`         |                                               |               |
| `fp8-delayed`                | E4M3 with the scales of the checkpoint        | the same      |
| `fp6`                        | E3M2, one scale per output channel (W6A16)    | BF16          |
| `int8`, `int4`, `nvfp4`      | see `fp8scope_kernels.weight_only`            | BF16          |

All columns take their inputs in BF16, and return the input's dtype (or autocast's). Weights in BF16 and below
FP8 are decoded in every call, from the packed bytes that are counted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8scope.evaluation.layers import Forward, LayerPlan
from fp8scope_kernels import (
    MXFP8,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Linear,
    Recipe,
    RowwiseScaling,
    quantize_blocks,
    quantize_fp6,
    quantize_int4,
    quantize_int8,
    quantize_nvfp4,
)

REFERENCE = "bf16"
DELAYED = "fp8-delayed"
RECIPES: Mapping[str, Callable[[], Recipe]] = {
    "fp8-current": CurrentScaling,
    "fp8-rowwise": RowwiseScaling,
    "fp8-block": BlockScaling,
    "mxfp8": MXFP8,
}
SCALE_BYTES = 4


class PackedWeight(Protocol):
    """A quantised matrix."""

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and the scales."""

    def dequantize(self, dtype: torch.dtype = ...) -> Tensor:
        """The matrix in `dtype`."""


@dataclass(frozen=True)
class Bf16Weight:
    """A matrix rounded to BF16."""

    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The matrix in `dtype`."""
        return self.values.to(dtype)


def _bf16(weight: Tensor) -> PackedWeight:
    return Bf16Weight(weight.detach().bfloat16())


PACKINGS: Mapping[str, Callable[[Tensor], PackedWeight]] = {
    REFERENCE: _bf16,
    "fp6": quantize_fp6,
    "int8": quantize_int8,
    "int4": quantize_int4,
    "nvfp4": quantize_nvfp4,
}
PRECISIONS = (REFERENCE, *RECIPES, DELAYED, "fp6", "int8", "int4", "nvfp4")


@dataclass(frozen=True)
class LayerForwards:
    """The forward passes of all layers in one precision, and the bytes of their weights."""

    forwards: Mapping[nn.Linear, Forward]
    weight_bytes: int


def checked_precisions(precisions: Sequence[str] | None, plan: LayerPlan) -> tuple[str, ...]:
    """The columns in their order, the reference first.

    By default all that the model can have: `fp8-delayed` needs layers with the scales of a training. Raises
    ValueError for another name, or for `fp8-delayed` without such layers.
    """
    can_delay = any(_has_delayed_scales(layer) for layer in plan.layers.values())
    if precisions is None:
        return tuple(name for name in PRECISIONS if can_delay or name != DELAYED)
    if isinstance(precisions, str):
        precisions = [precisions]
    unknown = [name for name in precisions if name not in PRECISIONS]
    if unknown:
        raise ValueError(f"precisions must be among {', '.join(PRECISIONS)}, got {', '.join(unknown)}.")
    if DELAYED in precisions and not can_delay:
        raise ValueError(
            f"{DELAYED} needs a model with layers that were trained under DelayedScaling: its scales come "
            "from past steps. Take fp8-current for a model without them."
        )
    return (REFERENCE, *dict.fromkeys(name for name in precisions if name != REFERENCE))


def build_column(precision: str, plan: LayerPlan) -> LayerForwards:
    """Quantise the layers' weights, each once."""
    if precision in PACKINGS:
        return _packed_column(PACKINGS[precision], plan)
    forwards: dict[nn.Linear, Forward] = {}
    sizes: dict[int, int] = {}
    for layer in plan.layers.values():
        twin = _fp8_twin(layer, precision)
        forwards[layer] = _in_bf16(twin.forward)
        sizes[id(layer.weight)] = fp8_bytes(layer.weight.detach(), twin.recipe)
    return LayerForwards(forwards, sum(sizes.values()))


def _packed_column(packing: Callable[[Tensor], PackedWeight], plan: LayerPlan) -> LayerForwards:
    packed = {id(weight): packing(weight.detach()) for weight in plan.weights}
    forwards = {
        layer: _in_bf16(_multiplication(packed[id(layer.weight)], layer.bias))
        for layer in plan.layers.values()
    }
    return LayerForwards(forwards, sum(weight.nbytes for weight in packed.values()))


def _multiplication(weight: PackedWeight, bias: Tensor | None) -> Forward:
    rounded = None if bias is None else bias.detach().bfloat16()

    def forward(input: Tensor) -> Tensor:
        return functional.linear(input, weight.dequantize(torch.bfloat16), rounded)

    return forward


def _in_bf16(product: Forward) -> Forward:
    """The product of inputs in BF16; the output has the dtype that the layer itself would return."""

    def forward(input: Tensor) -> Tensor:
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        with torch.autocast(kind, enabled=False):
            return product(input.bfloat16()).to(dtype)

    return forward


def _fp8_twin(layer: nn.Linear, precision: str) -> Fp8Linear:
    """A layer with the same parameters that computes in FP8 and keeps its state."""
    if precision == DELAYED and isinstance(layer, Fp8Linear) and _has_delayed_scales(layer):
        twin = Fp8Linear.from_linear(layer, layer.recipe)
        twin.scaling.load_state_dict(layer.scaling.state_dict())
    else:
        twin = Fp8Linear.from_linear(layer, RECIPES.get(precision, CurrentScaling)())
    twin.products = None
    twin.training = False
    return twin


def _has_delayed_scales(layer: nn.Module) -> bool:
    return isinstance(layer, Fp8Linear) and isinstance(layer.recipe, DelayedScaling)


def fp8_bytes(weight: Tensor, recipe: Recipe) -> int:
    """Bytes of an FP8 weight: one for each element, and the scales that the recipe has.

    A scale takes four bytes, in MXFP8 one (E8M0).
    """
    grid = recipe.block_of("weight")
    if grid is None:
        return weight.numel() + SCALE_BYTES
    format = recipe.format_of("weight", weight.device)
    assert format.dtype is not None
    packed = quantize_blocks(weight, format, grid, recipe, dtype=format.dtype)
    scale = 1 if isinstance(recipe, MXFP8) else SCALE_BYTES
    return packed.values.nbytes + scale * packed.scale.numel()


def model_bytes(model: nn.Module, plan: LayerPlan, weight_bytes: int) -> int:
    """Bytes of all parameters and buffers with the layers' weights packed.

    A weight that another module uses too, such as a tied embedding, stays there as it is.
    """
    chosen = set(plan.layers.values())
    tensors: dict[int, Tensor] = {}
    for module in model.modules():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if not (module in chosen and name == "weight"):
                tensors[id(tensor)] = tensor
    return weight_bytes + sum(tensor.nbytes for tensor in tensors.values())
