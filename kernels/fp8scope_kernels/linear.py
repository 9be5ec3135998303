"""`Fp8Linear`: a linear layer whose three matrix products take FP8 operands."""

from collections.abc import Collection
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8scope_kernels import backends
from fp8scope_kernels.graph_breaks import break_graph
from fp8scope_kernels.matmul import (
    Operand,
    can_multiply,
    has_fp8_units,
    multiply,
    to_block_operand,
    to_operand,
    to_operands_in_one_pass,
)
from fp8scope_kernels.quantization import measure
from fp8scope_kernels.recipes import ROLES, Recipe, Role
from fp8scope_kernels.sampling import accumulate_sample
from fp8scope_kernels.scaling_state import ScalingState
from fp8scope_kernels.second_derivative import once_differentiable
from fp8scope_kernels.statistics import Slot
from fp8scope_kernels.triton import availability as triton_availability

Precision = Literal["fp8", "bf16"]

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


class Fp8Linear(nn.Linear):
    """`nn.Linear` whose fprop, dgrad and wgrad multiply FP8 operands.

    Takes any leading shape and floating dtype; the output has the input's dtype, or autocast's. Weight and
    bias keep theirs. Three tensors are quantised, each with its own scaling state under `scaling`: `input`,
    `weight` and `grad_output`.

    State and statistics advance once per call in training mode. Evaluation mode quantises with the scales
    there are and counts nothing; neither does the recomputation of activation checkpointing. With delayed
    scaling, checkpointing assumes that a layer's backward follows its own forward: of several forward calls
    before one backward, all are recomputed with the scale of the last.

    A backward pass with `create_graph` (a gradient penalty) raises RuntimeError, except while `precision` is
    `bf16`.

    `precision` switches the layer between `fp8` and `bf16` at run time, `products` its three products one by
    one.
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
        """An `Fp8Linear` in the place of `linear`: the same parameters, hooks and mode."""
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
            {role: ScalingState(recipe, recipe.format_of(role), device) for role in ROLES}
        )
        # In evaluation nn.TransformerEncoderLayer reads its layers' weights and does not call them, unless a
        # module in it has a hook. This container is never called, so that its hook costs nothing.
        self.scaling.register_forward_pre_hook(_keep_being_called)

    @property
    def precision(self) -> Precision:
        """`fp8`, or `bf16`: plain BF16 products, nothing quantised and nothing counted.

        Going back to `fp8` forgets the scaling state, which has gone stale meanwhile.
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
        """Which of `fprop`, `dgrad` and `wgrad` take FP8 operands while `precision` is `fp8`; None is all.

        The others multiply BF16 operands. Set it to any collection of these names.
        """
        return self._products

    @products.setter
    def products(self, value: Collection[Product] | None) -> None:
        self._products = check_products(value)

    def state_of(self, role: Role) -> ScalingState:
        """The scaling state of `input`, `weight` or `grad_output`."""
        return cast(ScalingState, self.scaling[role])

    def forward(self, input: Tensor) -> Tensor:
        if input.is_nested:
            raise TypeError(
                "Fp8Linear takes no nested tensors: pass padded ones. For nn.TransformerEncoder, set its "
                "use_nested_tensor = False, or call convert on the whole of it."
            )
        device_type = input.device.type
        out_dtype = input.dtype
        if torch.is_autocast_enabled(device_type):
            out_dtype = torch.get_autocast_dtype(device_type)
        if self._precision == "bf16":
            return self._forward_bf16(input).to(out_dtype)
        bias: Tensor | None = self.bias
        x = input.reshape(-1, self.in_features)
        output: Tensor = _apply(x, self.weight, bias, self, out_dtype)
        return output.view(*input.shape[:-1], self.out_features)

    def _forward_bf16(self, input: Tensor) -> Tensor:
        bias: Tensor | None = self.bias
        with torch.autocast(input.device.type, enabled=False):
            return functional.linear(
                input.bfloat16(), self.weight.bfloat16(), None if bias is None else bias.bfloat16()
            )

    def quantize(self, role: Role, x: Tensor, *, update: bool, transpose: bool) -> tuple[Operand, Operand]:
        """The operand for one of the three matrices, and its transpose for the other product it goes into.

        A scale per tensor makes them views of each other. Blocks lie along the dimension that a product sums
        over, so that there the transpose is quantised anew, if `transpose` says that it is wanted. Counted is
        the first. With `update`, state and statistics advance.
        """
        state = self.state_of(role)
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
        """`quantize` with one scale: in one pass (not in eager torch) where that is known beforehand."""
        state, saturate, fp8 = self.state_of(role), self.recipe.saturate, self._has_units(x.device)
        stochastic = self.recipe.stochastic_gradients and role == "grad_output"
        nonfinite = self.recipe.nonfinite
        fused = not stochastic and (triton_availability.wants(x) or (saturate and backends.use_compiled(x)))
        extent, scale = None, state.past_scale(update=update) if fused else None
        measuring = scale is not None and update
        if scale is None:
            extent = measure(x)
            scale = state.next_scale(extent.amax, update=update)
        passed = None
        if fused:
            passed = to_operands_in_one_pass(
                x, scale, state.format, row,
                saturate=saturate, extent=extent, fp8=fp8, measure=measuring, transpose=transpose,
                nonfinite=nonfinite,
            )  # fmt: skip
        if passed is None:
            extent = extent or measure(x)
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
        forward, backward = self.recipe.format_of("input"), self.recipe.format_of("grad_output")
        return has_fp8_units(device) and can_multiply(forward, forward) and can_multiply(forward, backward)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model is another model: its tensors must not be counted in this one's rows.
        return {**self.__dict__, "slots": {}}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.kind}, precision={self._precision}"


def _keep_being_called(module: nn.Module, args: Any) -> None:
    """A hook that has only to be there."""


def _sample(slot: Slot | None, x: Tensor, operand: Operand) -> None:
    sample = None if slot is None else slot.sample_row
    if sample is not None:
        accumulate_sample(sample, x, operand.values, operand.inverse_scale)


# Scaling state advances with every call, so that a trace would be good for one: compiled graphs break here.
@break_graph
def _apply(
    x: Tensor, weight: Tensor, bias: Tensor | None, layer: Fp8Linear, out_dtype: torch.dtype
) -> Tensor:
    product = _Fp8Product if layer.products is None else MixedProduct
    output: Tensor = product.apply(x, weight, bias, layer, out_dtype)  # type: ignore[no-untyped-call]
    return output


class _Fp8Product(torch.autograd.Function):
    """x [tokens, in] times weight [out, in] transposed, plus bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Fp8Linear, out_dtype: torch.dtype
    ) -> Tensor:
        # A forward call inside a backward pass recomputes what activation checkpointing dropped.
        recomputing = torch._C._current_graph_task_id() != -1
        update = layer.training and not recomputing
        for_x, for_weight = ctx.needs_input_grad[:2]
        qx, qx_t = layer.quantize("input", x, update=update, transpose=for_weight)
        qw, qw_t = layer.quantize("weight", weight, update=update, transpose=for_x)
        ctx.layer, ctx.x_dtype, ctx.weight_dtype = layer, x.dtype, weight.dtype
        ctx.save_for_backward(*qx_t, *qw_t)
        output = multiply(qx, qw.t(), out_dtype)
        return output if bias is None else output.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        (grad,) = grads
        layer: Fp8Linear = ctx.layer
        x_values, x_inverse, w_values, w_inverse = ctx.saved_tensors
        qx_t, qw_t = Operand(x_values, x_inverse), Operand(w_values, w_inverse)
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        if for_x or for_weight:
            qg, qg_t = layer.quantize("grad_output", grad, update=layer.training, transpose=for_weight)
            if for_x:
                grad_x = multiply(qg, qw_t.t(), ctx.x_dtype)
            if for_weight:
                grad_weight = multiply(qg_t, qx_t.t(), ctx.weight_dtype)
        if for_bias:
            grad_bias = grad.sum(0, dtype=layer.bias.dtype)
        return grad_x, grad_weight, grad_bias, None, None


class MixedProduct(torch.autograd.Function):
    """x [tokens, in] times weight [out, in] transposed, plus bias: `layer.products` in FP8, the rest in BF16.

    A tensor is quantised, and its scaling state advances, when at least one of its two products is in FP8.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Fp8Linear, out_dtype: torch.dtype
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
