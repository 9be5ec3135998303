"""The passes of a layer that is sharded by tensor parallelism as custom operators, `torch.ops.fp8scope.*`."""

from typing import Any

import torch
from torch import Tensor

from fp8scope_kernels.graph_objects import fake_of, operator
from fp8scope_kernels.linear_operators import (
    fake_gradients,
    fake_linear,
    gradients_by,
    layer_of,
    linear_by,
)
from fp8scope_kernels.linear_product import PartSettings, ProductSettings, operands_of
from fp8scope_kernels.tensor_parallel import LayerPart


@operator("sharded_linear", mutates_args=("turn",))
def sharded_linear_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    number: Tensor,
    turn: Tensor,
    recipe: str,
    products: str,
    out_dtype: torch.dtype,
    for_x: bool,
    for_weight: bool,
    cut: str,
    group: str,
    rank: int,
    size: int,
    before: int,
    along: int,
    after: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`torch.ops.fp8scope.linear` of this rank's part, see `PartSettings`."""
    turn.add_(1)
    settings = PartSettings(
        cut=cut, group=group, rank=rank, size=size, before=before, along=along, after=after
    )
    part = LayerPart(layer_of(number), settings)
    return linear_by(part, x, weight, bias, ProductSettings(recipe, products, out_dtype, for_x, for_weight))


@fake_of("sharded_linear")
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor, turn: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return fake_linear(x, weight, bias, ProductSettings(*settings[:5]))


@operator("sharded_linear_gradients")
def sharded_linear_gradients_op(
    grad: Tensor,
    x_t: Tensor,
    x_inverse: Tensor,
    weight_t: Tensor,
    weight_inverse: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    number: Tensor,
    recipe: str,
    products: str,
    x_dtype: torch.dtype | None,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    cut: str,
    group: str,
    rank: int,
    size: int,
    before: int,
    along: int,
    after: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`torch.ops.fp8scope.linear_gradients` of this rank's part, see `PartSettings`."""
    settings = PartSettings(
        cut=cut, group=group, rank=rank, size=size, before=before, along=along, after=after
    )
    part = LayerPart(layer_of(number), settings)
    operands = operands_of(x_t, x_inverse, weight_t, weight_inverse, x, weight)
    return gradients_by(part, grad, operands, products, (x_dtype, weight_dtype, bias_dtype))


@fake_of("sharded_linear_gradients")
def _(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(grad, *arguments[: -len(PartSettings._fields)])
