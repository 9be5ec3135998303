"""One layer's three matrix products, each in FP8 or in BF16 for itself: what isolates the one that hurts."""

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fp8scope_kernels.matmul import Operand, multiply
from fp8scope_kernels.second_derivative import once_differentiable

if TYPE_CHECKING:
    from fp8scope_kernels.linear import Fp8Linear

Product = Literal["fprop", "dgrad", "wgrad"]
PRODUCTS: tuple[Product, ...] = ("fprop", "dgrad", "wgrad")
"""Output (input times weight), gradient of the input (grad_output times weight), gradient of the weight
(grad_output times input)."""


def check_products(products: Any) -> frozenset[Product] | None:
    """The products to compute in FP8, or None for all. Raises ValueError on a name that is none."""
    if products is None:
        return None
    names = frozenset((products,) if isinstance(products, str) else products)
    if not names <= frozenset(PRODUCTS):
        unknown = ", ".join(sorted(repr(name) for name in names - frozenset(PRODUCTS)))
        raise ValueError(f"products must be among {', '.join(PRODUCTS)}, got {unknown}.")
    return names


class MixedProduct(torch.autograd.Function):
    """x [tokens, in] times weight [out, in] transposed, plus bias: `layer.products` in FP8, the rest in BF16.

    A tensor is quantised, and its scaling state advances, when at least one of its two products is in FP8.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: "Fp8Linear", out_dtype: torch.dtype
    ) -> Tensor:
        products = layer.products if layer.products is not None else frozenset(PRODUCTS)
        # As in the layer's own product: recomputation of activation checkpointing counts nothing.
        update = layer.training and torch._C._current_graph_task_id() == -1
        exact_x, exact_weight = _exact(x), _exact(weight)
        qx, qx_t = exact_x, exact_x.t()
        qw, qw_t = exact_weight, exact_weight.t()
        if products & {"fprop", "wgrad"}:
            qx, qx_t = layer.quantize("input", x, update=update, transpose=True)
        if products & {"fprop", "dgrad"}:
            qw, qw_t = layer.quantize("weight", weight, update=update, transpose=True)
        for_wgrad = qx_t if "wgrad" in products else exact_x.t()
        for_dgrad = qw_t if "dgrad" in products else exact_weight.t()
        ctx.layer, ctx.products, ctx.x_dtype, ctx.weight_dtype = layer, products, x.dtype, weight.dtype
        ctx.save_for_backward(*for_wgrad, *for_dgrad)
        operands = (qx, qw.t()) if "fprop" in products else (exact_x, exact_weight.t())
        output = multiply(*operands, out_dtype)
        return output if bias is None else output.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        (grad,) = grads
        layer: Fp8Linear = ctx.layer
        products: frozenset[Product] = ctx.products
        x_values, x_inverse, w_values, w_inverse = ctx.saved_tensors
        x_t, w_t = Operand(x_values, x_inverse), Operand(w_values, w_inverse)
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        exact = _exact(grad)
        qg, qg_t = exact, exact.t()
        if (for_x and "dgrad" in products) or (for_weight and "wgrad" in products):
            qg, qg_t = layer.quantize("grad_output", grad, update=layer.training, transpose=for_weight)
        if for_x:
            grad_x = multiply(qg if "dgrad" in products else exact, w_t.t(), ctx.x_dtype)
        if for_weight:
            grad_weight = multiply(qg_t if "wgrad" in products else exact.t(), x_t.t(), ctx.weight_dtype)
        if for_bias:
            grad_bias = grad.sum(0, dtype=layer.bias.dtype)
        return grad_x, grad_weight, grad_bias, None, None


def _exact(x: Tensor) -> Operand:
    return Operand(x.bfloat16(), torch.ones((), device=x.device))
