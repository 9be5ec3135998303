"""`Fp8Linear`: a linear layer whose three matrix products take FP8 operands."""

from collections.abc import Collection
from contextlib import nullcontext
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8scope_kernels import backends
from fp8scope_kernels.matmul import (
    Operand,
    can_multiply,
    exact_operand,
    has_fp8_units,
    multiply,
    to_block_operand,
    to_operand,
    to_operands_in_one_pass,
)
from fp8scope_kernels.plain_tensors import PLAIN_TYPES
from fp8scope_kernels.quantization import measure_now
from fp8scope_kernels.recipes import ROLES, Recipe, Role
from fp8scope_kernels.sampling import accumulate_sample
from fp8scope_kernels.scaling_state import NO_DTENSORS, ScalingState
from fp8scope_kernels.statistics import Slot
from fp8scope_kernels.torch_internals import break_graph, current_graph_task_id

Precision = Literal["fp8", "bf16"]

Product = Literal["fprop", "dgrad", "wgrad"]
PRODUCTS: tuple[Product, ...] = ("fprop", "dgrad", "wgrad")
"""Output (input times weight), gradient of the input (grad_output times weight), gradient of the weight
(grad_output times input)."""
ALL_PRODUCTS = frozenset(PRODUCTS)

SECOND_DERIVATIVE = (
    "An FP8 layer cannot be differentiated twice, as create_graph=True requires: its gradients are products "
    "of rounded tensors. For a gradient penalty or a Hessian, set layer.precision = 'bf16' on the layers "
    "that it goes through, or leave them out with convert(..., exclude=...)."
)


class Fp8Linear(nn.Linear):
    """`nn.Linear` whose fprop, dgrad and wgrad multiply FP8 operands.

    Takes any leading shape and floating dtype; the output has the input's dtype, or autocast's. Weight and
    bias keep theirs. Three tensors are quantised, each with its own scaling state under `scaling`: `input`,
    `weight` and `grad_output`.

    State and statistics advance once per call in training mode. Evaluation mode quantises with the current
    scales and counts nothing; neither does the recomputation of activation checkpointing. With delayed
    scaling, checkpointing assumes that a layer's backward follows its own forward: if several forward calls
    precede one backward, all are recomputed with the scale of the last.

    `precision` switches the whole layer between `fp8` and `bf16` at run time; `products` does so for each
    product. A backward pass with `create_graph` (a gradient penalty) raises RuntimeError, unless `precision`
    is `bf16`.
    """

    _products: frozenset[Product] | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._set_recipe(recipe)

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: Recipe) -> "Fp8Linear":
        """An `Fp8Linear` that replaces `linear`, with the same parameters, hooks and mode."""
        layer = cls.__new__(cls)
        layer.__dict__.update(linear.__dict__)
        for own in ("_parameters", "_buffers", "_modules"):
            layer.__dict__[own] = dict(linear.__dict__[own])
        layer._set_recipe(recipe)
        return layer

    def _set_recipe(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.slots: dict[Role, Slot] = {}
        self._precision: Precision = "fp8"
        device = self.weight.device
        self.scaling = nn.ModuleDict(
            {role: ScalingState(recipe, recipe.format_of(role, device), device) for role in ROLES}
        )
        # In evaluation nn.TransformerEncoderLayer reads the weights of its layers instead of calling them,
        # unless a module in it has a hook. This container is never called, so that its hook costs nothing.
        self.scaling.register_forward_pre_hook(_do_nothing)

    def reset_parameters(self) -> None:
        """As in `nn.Linear`; the scaling state, which is that of other weights, is reset too."""
        super().reset_parameters()
        # nn.Linear calls this while it is made, before there is any state.
        if "scaling" in self._modules:
            for role in ROLES:
                self.state_of(role).reset()

    @property
    def precision(self) -> Precision:
        """`fp8`, or `bf16`: plain BF16 products, with nothing quantised and nothing counted.

        Going back to `fp8` resets the scaling state, which is stale by then.
        """
        return self._precision

    @precision.setter
    def precision(self, value: Precision) -> None:
        if value not in ("fp8", "bf16"):
            raise ValueError(f"precision must be 'fp8' or 'bf16', got {value!r}.")
        if value == "fp8" and self._precision == "bf16":
            for role in ROLES:
                self.state_of(role).reset()
        self._precision = value

    @property
    def products(self) -> frozenset[Product] | None:
        """Return which of `fprop`, `dgrad` and `wgrad` take FP8 operands while `precision` is `fp8`; None
        means all.

        The other products multiply BF16 operands. Set it to any collection of these names.
        """
        return self._products

    @products.setter
    def products(self, value: Collection[Product] | None) -> None:
        self._products = _check_products(value)

    def state_of(self, role: Role) -> ScalingState:
        """The scaling state of `input`, `weight` or `grad_output`."""
        return cast(ScalingState, self.scaling[role])

    def forward(self, input: Tensor) -> Tensor:
        self._check_input(input)
        device_type = input.device.type
        out_dtype = input.dtype
        # torch has no autocast for the meta device.
        if device_type != "meta" and torch.is_autocast_enabled(device_type):
            out_dtype = torch.get_autocast_dtype(device_type)
        if self._precision == "bf16":
            return self._forward_bf16(input).to(out_dtype)
        bias: Tensor | None = self.bias
        x = input.reshape(-1, self.in_features)
        output: Tensor = _apply(x, self.weight, bias, self, out_dtype)
        return output.view(*input.shape[:-1], self.out_features)

    def _check_input(self, input: Tensor) -> None:
        """Refuse an input before it changes the scaling state."""
        if input.is_nested:
            raise TypeError(
                "Fp8Linear does not support nested tensors; pass padded ones. For nn.TransformerEncoder, set "
                "use_nested_tensor = False on it, or call convert on the whole encoder."
            )
        if not input.dim() or input.shape[-1] != self.in_features:
            raise RuntimeError(
                f"Fp8Linear takes inputs with {self.in_features} features in the last dimension, got shape "
                f"{tuple(input.shape)}."
            )
        if not input.is_floating_point():
            raise RuntimeError(f"Fp8Linear takes floating-point inputs, got {input.dtype}.")
        if input.device != self.weight.device:
            raise RuntimeError(f"The input is on {input.device}, and the weight on {self.weight.device}.")

    def _forward_bf16(self, input: Tensor) -> Tensor:
        bias: Tensor | None = self.bias
        abstract = input.device.type == "meta"
        with nullcontext() if abstract else torch.autocast(input.device.type, enabled=False):
            return functional.linear(
                input.bfloat16(), self.weight.bfloat16(), None if bias is None else bias.bfloat16()
            )

    def quantize(self, role: Role, x: Tensor, *, update: bool, transpose: bool) -> tuple[Operand, Operand]:
        """Quantise one of the three matrices: its operand, and the transpose for its other product.

        With one scale per tensor they are views of each other. Blocks lie along the dimension that a product
        sums over, so that the transpose is quantised separately, and only with `transpose`. Statistics count
        the first operand. With `update`, state and statistics advance.
        """
        state = self.state_of(role)
        state.materialize(x.device)
        slot = self.slots.get(role) if update else None
        row = None if slot is None else slot.row
        grid = self.recipe.block_of(role)
        if grid is not None:
            block_row = None if slot is None else slot.block_row
            operand = to_block_operand(x, state.format, grid, self.recipe, row, block_row)
            _sample(slot, x, operand)
            if not transpose:
                return operand, operand
            return operand, to_block_operand(x.t(), state.format, grid, self.recipe)
        operand, turned = self._quantize_whole(role, x, row, update=update, transpose=transpose)
        _sample(slot, x, operand)
        return operand, turned

    def _quantize_whole(
        self, role: Role, x: Tensor, row: Tensor | None, *, update: bool, transpose: bool
    ) -> tuple[Operand, Operand]:
        """`quantize` with one scale. One pass suffices if the scale is known first (not in eager torch)."""
        state, saturate, fp8 = self.state_of(role), self.recipe.saturate, self._has_units(x.device)
        stochastic = self.recipe.stochastic_gradients and role == "grad_output"
        nonfinite = self.recipe.nonfinite
        fused = not stochastic and (
            backends.use_triton(x, "quantize") or (saturate and backends.use_compiled(x))
        )
        extent, scale = None, state.past_scale(update=update) if fused else None
        measuring = scale is not None and update
        if scale is None:
            extent = measure_now(x)
            scale = state.next_scale(extent.amax, update=update)
        passed = None
        if fused:
            passed = to_operands_in_one_pass(
                x, scale, state.format, row,
                saturate=saturate, extent=extent, fp8=fp8, measure=measuring, transpose=transpose,
                nonfinite=nonfinite,
            )  # fmt: skip
        if passed is None:
            extent = extent or measure_now(x)
            operand = to_operand(
                x, scale, state.format, row,
                saturate=saturate, extent=extent, fp8=fp8, stochastic=stochastic,
                nonfinite=nonfinite,
            )  # fmt: skip
            passed = operand, operand.t(), extent
        operand, turned, extent = passed
        if measuring and extent is not None:
            state.remember(extent.amax)
        return operand, turned

    def _has_units(self, device: torch.device) -> bool:
        forward, backward = self.state_of("input").format, self.state_of("grad_output").format
        return has_fp8_units(device) and can_multiply(forward, forward) and can_multiply(forward, backward)

    def __getstate__(self) -> dict[str, Any]:
        # A copy is another model: its tensors must not count in this model's rows.
        return {**self.__dict__, "slots": {}}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.kind}, precision={self._precision}"


def _check_products(products: Any) -> frozenset[Product] | None:
    """The products to compute in FP8, or None for all. Raises ValueError for an unknown name."""
    if products is None:
        return None
    names = frozenset((products,) if isinstance(products, str) else products)
    if not names <= ALL_PRODUCTS:
        unknown = ", ".join(sorted(repr(name) for name in names - ALL_PRODUCTS))
        raise ValueError(f"products must be among {', '.join(PRODUCTS)}, got {unknown}.")
    return names


def _do_nothing(module: nn.Module, args: Any) -> None:
    """A hook that only has to exist."""


def _sample(slot: Slot | None, x: Tensor, operand: Operand) -> None:
    sample = None if slot is None else slot.sample_row
    if sample is not None:
        accumulate_sample(sample, x, operand.values, operand.inverse_scale)


# Scaling state advances with every call; a trace would be valid for one call. Compiled graphs break here.
@break_graph
def _apply(
    x: Tensor, weight: Tensor, bias: Tensor | None, layer: Fp8Linear, out_dtype: torch.dtype
) -> Tensor:
    for tensor in (x, weight):
        if type(tensor) not in PLAIN_TYPES and hasattr(tensor, "to_local"):
            raise TypeError(NO_DTENSORS)
    products = layer.products
    output: Tensor = _Fp8Product.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, layer, ALL_PRODUCTS if products is None else products, out_dtype
    )
    return output


class _Fp8Product(torch.autograd.Function):
    """x [tokens, in] times weight [out, in] transposed, plus bias: `products` in FP8, the others in BF16.

    A tensor is quantised, and its scaling state advances, if at least one of its two products is in FP8.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: Fp8Linear,
        products: frozenset[Product],
        out_dtype: torch.dtype,
    ) -> Tensor:
        fprop, dgrad, wgrad = "fprop" in products, "dgrad" in products, "wgrad" in products
        # A forward call inside a backward pass recomputes what activation checkpointing has dropped.
        update = layer.training and current_graph_task_id() == -1
        for_x, for_weight = ctx.needs_input_grad[:2]
        if fprop or wgrad:
            qx, qx_t = layer.quantize("input", x, update=update, transpose=wgrad and for_weight)
        if fprop or dgrad:
            qw, qw_t = layer.quantize("weight", weight, update=update, transpose=dgrad and for_x)
        saved_x = qx_t if wgrad else exact_operand(x).t()
        saved_weight = qw_t if dgrad else exact_operand(weight).t()
        ctx.layer, ctx.dgrad, ctx.wgrad = layer, dgrad, wgrad
        ctx.x_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        ctx.save_for_backward(*saved_x, *saved_weight)
        if fprop:
            output = multiply(qx, qw.t(), out_dtype)
        else:
            output = multiply(exact_operand(x), exact_operand(weight).t(), out_dtype)
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        # In a backward pass, grad mode is the value of create_graph. torch's once_differentiable would raise
        # only when the second derivative is taken, and would pass a layer over, as zero, that is not on the
        # path to the tensors being differentiated.
        if torch.is_grad_enabled():
            raise RuntimeError(SECOND_DERIVATIVE)
        (grad,) = grads
        layer: Fp8Linear = ctx.layer
        x_values, x_inverse, weight_values, weight_inverse = ctx.saved_tensors
        x_t, weight_t = Operand(x_values, x_inverse), Operand(weight_values, weight_inverse)
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        dgrad, wgrad = for_x and ctx.dgrad, for_weight and ctx.wgrad
        grad_x = grad_weight = grad_bias = None
        if dgrad or wgrad:
            qg, qg_t = layer.quantize("grad_output", grad, update=layer.training, transpose=wgrad)
        if for_x:
            grad_x = multiply(qg if dgrad else exact_operand(grad), weight_t.t(), ctx.x_dtype)
        if for_weight:
            grad_weight = multiply(qg_t if wgrad else exact_operand(grad).t(), x_t.t(), ctx.weight_dtype)
        if for_bias:
            grad_bias = grad.sum(0, dtype=layer.bias.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None
