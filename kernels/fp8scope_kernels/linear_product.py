"""The product of `Fp8Linear`, with autograd in eager code, under torch.func and in graphs.

Eager code computes both passes directly. In a graph (torch.compile, make_fx) each pass is one operator of
linear_operators.py, `linear` and `linear_gradients`: the graph does not break, and its bits and counts are
those of eager code, because the operator runs the same functions. It looks its layer up by a number. What the
layer keeps between calls stays out of the graph, and layers of the same shape share one. `torch.export`
records `frozen_linear`, which reads the scales of the last call and changes nothing.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fp8scope_kernels.matmul import Operand, exact_operand, multiply, ran_on_units
from fp8scope_kernels.operands import quantize_matrix
from fp8scope_kernels.plain_tensors import check_memory
from fp8scope_kernels.recipes import Recipe, Role
from fp8scope_kernels.recomputation import scales_of_call
from fp8scope_kernels.scaling_state import ScalingState
from fp8scope_kernels.torch_internals import (
    current_graph_task_id,
    has_functorch_transforms,
    is_exporting,
    is_traced,
)

Product = Literal["fprop", "dgrad", "wgrad"]
PRODUCTS: tuple[Product, ...] = ("fprop", "dgrad", "wgrad")
"""Output (input times weight), gradient of the input (grad_output times weight), gradient of the weight
(grad_output times input)."""

SECOND_DERIVATIVE = (
    "An FP8 layer cannot be differentiated twice, as create_graph=True requires: its gradients are products "
    "of rounded tensors. For a gradient penalty or a Hessian, set layer.precision = 'bf16' on the layers "
    "that it goes through, or leave them out with convert(..., exclude=...)."
)

BATCHED_WEIGHTS = (
    "torch.vmap over the weights of an FP8 layer is not supported, because each of them needs scales of its "
    "own: call the models one by one, or set layer.precision = 'bf16'."
)

PER_SAMPLE = (
    "torch.vmap over the gradients of an FP8 layer is not supported: a gradient for each sample needs scales "
    "of its own. Compute them one by one, or set layer.precision = 'bf16'."
)


class Passed(NamedTuple):
    """The output, and the transposed operands of the backward pass; empty where it needs none."""

    output: Tensor
    x_t: Tensor
    x_inverse: Tensor
    weight_t: Tensor
    weight_inverse: Tensor


class Gradients(NamedTuple):
    """The gradients of input, weight and bias; None where it is not wanted."""

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Quantizer(Protocol):
    """The quantiser of a layer's matrices: the layer itself, or scales that do not change.

    `on_units`: for each product of FP8 operands, whether the last call computed it on FP8 units.
    """

    @property
    def training(self) -> bool: ...

    @property
    def on_units(self) -> dict[Product, bool]: ...

    def quantize(
        self, role: Role, x: Tensor, *, update: bool, transpose: bool
    ) -> tuple[Operand, Operand]: ...


class FrozenQuantizer:
    """Quantises with given scales, float32 without dimensions, and keeps nothing.

    Only delayed scaling reads them. Without scales, or where one is 0 because its layer was never called, a
    tensor takes the scale of its own amax.
    """

    training = False

    def __init__(self, recipe: Recipe, scales: dict[Role, Tensor] | None = None) -> None:
        self._recipe = recipe
        self._scales = scales or {}
        self.on_units: dict[Product, bool] = {}

    def quantize(self, role: Role, x: Tensor, *, update: bool, transpose: bool) -> tuple[Operand, Operand]:
        state = ScalingState(self._recipe, self._recipe.format_of(role, x.device), x.device)
        if role in self._scales:
            state.freeze(self._scales[role])
        return quantize_matrix(self._recipe, role, state, x, transpose=transpose)


class ProductSettings(NamedTuple):
    """Settings of a layer's product that operators take as arguments.

    `recipe`: JSON. `products`: the names of those in FP8. `for_x`, `for_weight`: whether their gradients may
    be wanted.
    """

    recipe: str
    products: str
    out_dtype: torch.dtype
    for_x: bool
    for_weight: bool


class PartSettings(NamedTuple):
    """The part that a rank has of one call, as operators take it.

    `cut`: for input, weight and grad_output one character each: the dimension of the matrix that is cut over
    the ranks, or `-` for a matrix that all ranks have. `group`: the name of the process group. `before`,
    `along` and `after`: elements of the whole input's leading dimensions, before the one that is cut, along
    it, and after it without the features. Without values: the tensors are whole.
    """

    cut: str = ""
    group: str = ""
    rank: int = 0
    size: int = 1
    before: int = 1
    along: int = 1
    after: int = 1


WHOLE = PartSettings()


def names_of(products: frozenset[Product] | None) -> str:
    """The products in FP8 (None: all) as an argument of an operator."""
    return ",".join(PRODUCTS if products is None else [name for name in PRODUCTS if name in products])


def check_products(products: Any) -> frozenset[Product] | None:
    """The products to compute in FP8, or None for all. Raises ValueError for an unknown name."""
    if products is None:
        return None
    names = frozenset((products,) if isinstance(products, str) else products)
    unknown = ", ".join(sorted(repr(name) for name in names.difference(PRODUCTS)))
    if unknown:
        raise ValueError(f"products must be among {', '.join(PRODUCTS)}, got {unknown}.")
    return names


@lru_cache(maxsize=64)
def text_of(recipe: Recipe) -> str:
    """The recipe as an argument of an operator."""
    return json.dumps(recipe.to_dict())


def run_forward(
    quantizer: Quantizer, x: Tensor, weight: Tensor, bias: Tensor | None, settings: ProductSettings
) -> Passed:
    """The forward pass.

    A tensor is quantised, and its state advances, if one of its two products is in FP8.
    """
    fprop, dgrad, wgrad = (name in settings.products for name in PRODUCTS)
    for_x, for_weight = settings.for_x, settings.for_weight
    # A forward call inside a backward pass recomputes what activation checkpointing has dropped.
    update = quantizer.training and current_graph_task_id() == -1
    x_t, weight_t = _no_operand(x), _no_operand(weight)
    if fprop or wgrad:
        qx, qx_t = quantizer.quantize("input", x, update=update, transpose=wgrad and for_weight)
        x_t = qx_t if wgrad and for_weight else x_t
    if fprop or dgrad:
        qw, qw_t = quantizer.quantize("weight", weight, update=update, transpose=dgrad and for_x)
        weight_t = qw_t if dgrad and for_x else weight_t
    if fprop:
        output = _multiply(quantizer, "fprop", qx, qw.t(), settings.out_dtype)
    else:
        output = multiply(exact_operand(x), exact_operand(weight).t(), settings.out_dtype)
    return Passed(output if bias is None else output.add_(bias), *x_t, *weight_t)


def run_backward(
    quantizer: Quantizer,
    grad: Tensor,
    x_t: Operand,
    weight_t: Operand,
    products: str,
    dtypes: Sequence[torch.dtype | None],
) -> Gradients:
    """The backward pass: gradients of input, weight and bias in `dtypes`; None says that it is not wanted."""
    for_x, for_weight, for_bias = dtypes
    if weight_t.is_fp8:
        # FSDP2 frees the memory of a weight that it has gathered in FP8.
        check_memory(weight_t.values)
    dgrad, wgrad = for_x is not None and "dgrad" in products, for_weight is not None and "wgrad" in products
    grad_x = grad_weight = grad_bias = None
    if dgrad or wgrad:
        qg, qg_t = quantizer.quantize("grad_output", grad, update=quantizer.training, transpose=wgrad)
    if for_x is not None:
        left = qg if dgrad else exact_operand(grad)
        grad_x = _multiply(quantizer, "dgrad", left, weight_t.t(), for_x)
    if for_weight is not None:
        left = qg_t if wgrad else exact_operand(grad).t()
        grad_weight = _multiply(quantizer, "wgrad", left, x_t.t(), for_weight)
    if for_bias is not None:
        grad_bias = grad.sum(0, dtype=for_bias)
    return Gradients(grad_x, grad_weight, grad_bias)


def _multiply(quantizer: Quantizer, name: Product, a: Operand, b: Operand, out_dtype: torch.dtype) -> Tensor:
    product = multiply(a, b, out_dtype)
    quantizer.on_units[name] = ran_on_units(a, b, out_dtype)
    return product


def linear_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer: Any,
    out_dtype: torch.dtype,
    *,
    quantizer: Quantizer | None = None,
    part: PartSettings = WHOLE,
) -> Tensor:
    """x [tokens, in] times weight [out, in] transposed, plus bias, in `out_dtype`.

    `layer`: an `Fp8Linear`, which says what of its three products is in FP8. The others are in BF16.
    `quantizer`: what quantises in place of the layer. `part`: what operators need to make it, where x, weight
    and bias are the shards of this rank.
    """
    quantizer = layer if quantizer is None else quantizer
    recipe, products = layer.operator_settings
    if is_exporting():
        scales = [layer.state_of(role).scale for role in ("input", "weight")]
        frozen: Tensor = torch.ops.fp8scope.frozen_linear(
            x, weight, bias, *scales, recipe, products, out_dtype
        )
        return frozen
    wanted = torch.is_grad_enabled()
    settings = ProductSettings(
        recipe, products, out_dtype, wanted and x.requires_grad, wanted and weight.requires_grad
    )
    output: Tensor
    if is_traced():
        output, *_ = _GraphProduct.apply(x, weight, bias, layer.number, layer.turn, *settings, *part)  # type: ignore[no-untyped-call]
    elif has_functorch_transforms():
        # The wrappers of torch.func do not say whether a gradient is wanted of what they wrap.
        settings = settings._replace(for_x=True, for_weight=True)
        output, *_ = _FunctionalProduct.apply(x, weight, bias, quantizer, *settings)  # type: ignore[no-untyped-call]
    else:
        with scales_of_call(layer):
            output = _EagerProduct.apply(x, weight, bias, quantizer, settings)  # type: ignore[no-untyped-call]
    return output


class _EagerProduct(torch.autograd.Function):
    """`linear_product` in eager code."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Any, settings: ProductSettings
    ) -> Tensor:
        output, *transposed = run_forward(layer, x, weight, bias, settings)
        _save(ctx, x, weight, bias, settings.products, transposed)
        ctx.layer = layer
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # In a backward pass, grad mode is the value of create_graph. torch's once_differentiable would raise
        # only when the second derivative is taken, and would pass a layer over, as zero, that is not on the
        # path to the tensors being differentiated.
        if torch.is_grad_enabled():
            raise RuntimeError(SECOND_DERIVATIVE)
        operands = operands_of(*ctx.saved_tensors)
        return (*run_backward(ctx.layer, grads[0], *operands, ctx.products, _dtypes_of(ctx)), None, None)


class _GraphProduct(torch.autograd.Function):
    """`linear_product` in a graph, by operators."""

    @staticmethod
    def forward(
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
    ) -> tuple[Tensor, ...]:
        # torch takes functions with *args for ones with a context.
        tensors, settings = (x, weight, bias, number, turn), (recipe, products, out_dtype, for_x, for_weight)
        passed: tuple[Tensor, ...]
        if cut:
            part = cut, group, rank, size, before, along, after
            passed = torch.ops.fp8scope.sharded_linear(*tensors, *settings, *part)
        else:
            passed = torch.ops.fp8scope.linear(*tensors, *settings)
        return passed

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, number, _, recipe, products = inputs[:7]
        ctx.recipe, ctx.part = recipe, inputs[10:]
        _save(ctx, x, weight, bias, products, output[1:], number)
        _mark_saved(ctx, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dtypes = _dtypes_of(ctx)
        arguments = grads[0], *ctx.saved_tensors, ctx.recipe, ctx.products, *dtypes
        if ctx.part[0]:
            results = torch.ops.fp8scope.sharded_linear_gradients(*arguments, *ctx.part)
        else:
            results = torch.ops.fp8scope.linear_gradients(*arguments)
        gradients = [None if dtype is None else made for made, dtype in zip(results, dtypes, strict=True)]
        return (*gradients, *(None,) * 14)


class _FunctionalProduct(torch.autograd.Function):
    """`linear_product` under the transforms of torch.func."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, layer: Any, *settings: Any
    ) -> tuple[Tensor, ...]:
        return tuple(run_forward(layer, x, weight, bias, ProductSettings(*settings)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, layer, _, products = inputs[:6]
        ctx.layer = layer
        _save(ctx, x, weight, bias, products, output[1:])
        _mark_saved(ctx, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dtypes = _dtypes_of(ctx)
        made = _FunctionalGradients.apply(grads[0], *ctx.saved_tensors, ctx.layer, ctx.products, dtypes)  # type: ignore[no-untyped-call]
        wanted = iter(made)
        return (*(None if dtype is None else next(wanted) for dtype in dtypes), *(None,) * 6)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, *others: Any) -> tuple[Any, Any]:
        """Inputs of all examples are one matrix, with one scale where the recipe has one for a tensor."""
        if in_dims[0] is None or any(dim is not None for dim in in_dims[1:3]):
            raise NotImplementedError(BATCHED_WEIGHTS)
        x = x.movedim(in_dims[0], 0)
        output, x_t, *rest = _FunctionalProduct.apply(x.reshape(-1, x.shape[-1]), *others)  # type: ignore[no-untyped-call]
        is_saved = x_t.dim() == 2
        x_t = x_t.unflatten(1, x.shape[:2]) if is_saved else x_t
        dims = 0, 1 if is_saved else None, None, None, None
        return (output.unflatten(0, x.shape[:2]), x_t, *rest), dims


def _save(
    ctx: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    products: str,
    transposed: Sequence[Tensor],
    *others: Tensor,
) -> None:
    """Keep what the backward pass needs: transposed operands, and x and weight for its products in BF16."""
    ctx.products = products
    ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
    exact_x = None if "wgrad" in products else x
    exact_weight = None if "dgrad" in products else weight
    ctx.save_for_backward(*transposed, exact_x, exact_weight, *others)


def _mark_saved(ctx: Any, output: tuple[Tensor, ...]) -> None:
    """The outputs behind the first are only there to be saved: no zeros of their size for their gradients."""
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])


def _dtypes_of(ctx: Any) -> list[torch.dtype | None]:
    """The dtypes of the gradients of input, weight and bias; None where one is not wanted."""
    return [
        dtype if needed else None for dtype, needed in zip(ctx.dtypes, ctx.needs_input_grad[:3], strict=True)
    ]


class _FunctionalGradients(torch.autograd.Function):
    """The backward pass under torch.func, which always records it, to differentiate it again."""

    @staticmethod
    def forward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        *saved, layer, products, dtypes = arguments
        gradients = run_backward(layer, grad, *operands_of(*saved), products, dtypes)
        return tuple(gradient for gradient in gradients if gradient is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is needed to refuse."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(SECOND_DERIVATIVE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        raise NotImplementedError(PER_SAMPLE)


def _no_operand(x: Tensor) -> Operand:
    return Operand(x.new_empty(0), x.new_empty(0, dtype=torch.float32))


def operands_of(
    x_t: Tensor,
    x_inverse: Tensor,
    weight_t: Tensor,
    weight_inverse: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
) -> tuple[Operand, Operand]:
    """The transposed operands of the backward pass: of the forward pass, or BF16 of `x` and `weight`."""
    return (
        Operand(x_t, x_inverse) if x is None else exact_operand(x).t(),
        Operand(weight_t, weight_inverse) if weight is None else exact_operand(weight).t(),
    )
