"""The passes of `Fp8Linear` as custom operators, `torch.ops.fp8scope.*`: what a graph holds of a layer.

A fake computes shapes, dtypes and strides with the functions of the operator, on tensors without numbers.
"""

import json
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fp8scope_kernels.graph_objects import fake_of, look_up, operator
from fp8scope_kernels.linear_product import (
    FrozenQuantizer,
    Gradients,
    Passed,
    ProductSettings,
    operands_of,
    run_backward,
    run_forward,
)
from fp8scope_kernels.matmul import Operand
from fp8scope_kernels.operands import takes_fp8_operands
from fp8scope_kernels.recipes import Recipe, recipe_from_dict


@operator("linear", mutates_args=("turn",))
def linear_op(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`run_forward` of the layer with this number, which counts. Returns a `Passed`."""
    turn.add_(1)
    settings = ProductSettings(recipe, products, out_dtype, for_x, for_weight)
    return linear_by(layer_of(number), x, weight, bias, settings)


@fake_of("linear")
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor, turn: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return fake_linear(x, weight, bias, ProductSettings(*settings))


@operator("linear_gradients")
def linear_gradients_op(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """`run_backward` of the layer with this number, which counts. Returns `Gradients`, empty for None."""
    operands = operands_of(x_t, x_inverse, weight_t, weight_inverse, x, weight)
    return gradients_by(layer_of(number), grad, operands, products, (x_dtype, weight_dtype, bias_dtype))


@fake_of("linear_gradients")
def _(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(grad, *arguments)


@operator("frozen_linear")
def frozen_linear_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_scale: Tensor,
    weight_scale: Tensor,
    recipe: str,
    products: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """The output of a layer in evaluation mode, from its tensors alone: for exported programs."""
    quantizer = FrozenQuantizer(_recipe_of(recipe), {"input": input_scale, "weight": weight_scale})
    return run_forward(
        quantizer, x, weight, bias, ProductSettings(recipe, products, out_dtype, False, False)
    ).output


@fake_of("frozen_linear")
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_scale: Tensor,
    weight_scale: Tensor,
    recipe: str,
    products: str,
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


def linear_by(
    quantizer: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: ProductSettings
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`run_forward` of a layer, or of the part of one that this rank has. Returns a `Passed`."""
    passed = run_forward(quantizer, x, weight, bias, settings)
    if quantizer.kept_weight is not None:
        # A compiled backward pass may write into what it has saved.
        passed = passed._replace(
            weight_t=passed.weight_t.clone(), weight_inverse=passed.weight_inverse.clone()
        )
    return _in_layout(passed, x, settings.recipe)


def fake_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, settings: ProductSettings
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fake of `linear_by`."""
    quantizer = FrozenQuantizer(_recipe_of(settings.recipe))
    return _in_layout(run_forward(quantizer, x, weight, bias, settings), x, settings.recipe)


def gradients_by(
    quantizer: Any,
    grad: Tensor,
    operands: tuple[Operand, Operand],
    products: str,
    dtypes: tuple[torch.dtype | None, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """`run_backward` of a layer, or of a part of one. Returns `Gradients`, empty for None."""
    return _filled(run_backward(quantizer, grad, *operands, products, dtypes), grad)


def fake_gradients(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The fake of `gradients_by`, of an operator's arguments."""
    *saved, _, recipe, products, x_dtype, weight_dtype, bias_dtype = arguments
    quantizer, dtypes = FrozenQuantizer(_recipe_of(recipe)), (x_dtype, weight_dtype, bias_dtype)
    return gradients_by(quantizer, grad, operands_of(*saved), products, dtypes)


def layer_of(number: Tensor) -> Any:
    """The layer with this number. Raises RuntimeError if it does not exist any more."""
    layer = look_up(number)
    if layer is None:
        raise RuntimeError("The FP8 layer of this graph does not exist any more: compile the model again.")
    return layer


def _in_layout(passed: Passed, x: Tensor, recipe: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The outputs of an operator, in memory as its fake says, for each backend and order of x's memory."""
    parsed = _recipe_of(recipe)
    # On a CPU transposes are views of what lies in the order of the matrix.
    views = x.is_cpu or (parsed.block_of("input") is None and not takes_fp8_operands(parsed, x))
    x_t, weight_t = (
        values.t().contiguous().t() if views and values.dim() == 2 else values.contiguous()
        for values in (passed.x_t, passed.weight_t)
    )
    return (
        passed.output.contiguous(),
        x_t,
        passed.x_inverse.contiguous(),
        weight_t,
        passed.weight_inverse.contiguous(),
    )


def _filled(gradients: Gradients, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = (
        grad.new_empty(0) if gradient is None else gradient.contiguous() for gradient in gradients
    )
    return x, weight, bias


@lru_cache(maxsize=64)
def _recipe_of(text: str) -> Recipe:
    return recipe_from_dict(json.loads(text))
