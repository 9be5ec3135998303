"""The products of experts in FP8: matrices with a weight each, over tokens that are sorted by expert.

Every expert is computed as an `Fp8Linear` of its own: the same quantisation, scales and products, in the same
order, so that the bits are the same. Experts without tokens take no part.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8scope_kernels.experts.passes import Span, backward_pass, forward_pass, saved_operands
from fp8scope_kernels.experts.states import ExpertStates
from fp8scope_kernels.experts.statistics import ExpertCounts, ExpertSlots
from fp8scope_kernels.kept_weight import KeptWeight
from fp8scope_kernels.linear_product import (
    SECOND_DERIVATIVE,
    Gradients,
    Product,
    ProductSettings,
    check_products,
    names_of,
    text_of,
)
from fp8scope_kernels.matmul import Operand
from fp8scope_kernels.operands import quantize_matrix
from fp8scope_kernels.random_stream import RandomStream, ignore_stream
from fp8scope_kernels.recipes import ROLES, Recipe, Role
from fp8scope_kernels.recomputation import scales_of_call
from fp8scope_kernels.scaling_state import ScalingState
from fp8scope_kernels.statistics import Slot
from fp8scope_kernels.torch_internals import has_functorch_transforms, is_exporting, is_traced

Precision = Literal["fp8", "bf16"]

CONTAINER = "fp8_scaling"
"""The child of a converted module with its scaling states. Modules of others use `scaling` as a factor."""

IN_A_GRAPH = (
    "The products of FP8 experts read how many tokens each expert has, which no graph can hold: "
    "torch.export, torch.jit.trace and make_fx cannot record them."
)
IN_FUNCTORCH = (
    "torch.func does not differentiate the products of FP8 experts: use backward(), or set precision = "
    "'bf16'."
)


class ExpertProducts(nn.Module):
    """The FP8 products of one tensor of weights, [experts, out, in], with scaling states of each expert.

    It has no weight of its own. `state_of(role).of(expert)` is the state of one tensor of one expert.
    `precision` and `products` are as in `Fp8Linear`. Random rounding draws from one stream for all experts.

    `on_units` says of each product whether that of the last expert was computed on FP8 units.
    `slots`: the rows of the statistics of each of the three tensors, see `ExpertSlots`.
    """

    kept_weight: KeptWeight | None = None
    """The operands of the experts' weights that calls share; see `keep_weights`."""

    def __init__(
        self,
        recipe: Recipe,
        shape: Sequence[int],
        in_features: int = -1,
        out_features: int = -1,
        device: torch.device | str | None = None,
    ) -> None:
        """`shape`: of the stored weights. The features are -1 where the order of dimensions is not known."""
        super().__init__()
        self.recipe = recipe
        self.shape = tuple(shape)
        self.experts, self.in_features, self.out_features = self.shape[0], in_features, out_features
        self.slots: dict[Role, ExpertSlots] = {}
        self._precision: Precision = "fp8"
        self._products: frozenset[Product] | None = None
        self._counts: dict[Role, ExpertCounts] = {}
        self.on_units: dict[Product, bool] = {}
        device = torch.get_default_device() if device is None else torch.device(device)
        for role in ROLES:
            self.add_module(role, ExpertStates(recipe, recipe.format_of(role, device), self.experts, device))
        if recipe.stochastic_gradients:
            self.rounding = RandomStream(device=device)
        self.register_load_state_dict_pre_hook(ignore_stream)  # type: ignore[no-untyped-call]

    @property
    def precision(self) -> Precision:
        """`fp8`, or `bf16`: plain BF16 products. Going back to `fp8` resets the scaling states."""
        return self._precision

    @precision.setter
    def precision(self, value: Precision) -> None:
        if value not in ("fp8", "bf16"):
            raise ValueError(f"precision must be 'fp8' or 'bf16', got {value!r}.")
        if value == "fp8" and self._precision == "bf16":
            self.reset()
        self._precision = value

    @property
    def products(self) -> frozenset[Product] | None:
        """Return which of `fprop`, `dgrad` and `wgrad` take FP8 operands; None means all."""
        return self._products

    @products.setter
    def products(self, value: Collection[Product] | None) -> None:
        self._products = check_products(value)

    def reset(self) -> None:
        """Reset the scaling states of all experts."""
        for role in ROLES:
            self.state_of(role).reset()

    @property
    def device(self) -> torch.device:
        """The device of the scaling states."""
        return self.state_of("input").scale.device

    def state_of(self, role: Role) -> ExpertStates:
        """The scaling states of `input`, `weight` or `grad_output`."""
        return cast(ExpertStates, self._modules[role])

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        spans: Sequence[Span],
        out_dtype: torch.dtype,
    ) -> Tensor:
        """The output [tokens, out] in `out_dtype`; zeros for tokens that are in no span.

        x [tokens, in]; weight [rows, out, in]; bias [rows, out]. `spans`: those of the experts that have
        tokens, in order.
        """
        if self._precision == "bf16":
            return _multiply_in_bf16(x, weight, bias, spans, out_dtype)
        if has_functorch_transforms():
            raise RuntimeError(IN_FUNCTORCH)
        for role in ROLES:
            self.state_of(role).materialize(x.device)
        wanted = torch.is_grad_enabled()
        settings = ProductSettings(
            text_of(self.recipe),
            names_of(self._products),
            out_dtype,
            wanted and x.requires_grad,
            wanted and weight.requires_grad,
        )
        with scales_of_call(self):
            output: Tensor = _Products.apply(x, weight, bias, self, tuple(spans), settings)  # type: ignore[no-untyped-call]
        return output

    def count(self, role: Role, expert: int) -> Slot | None:
        """The rows for one expert's tensor in this pass; None if nobody observes it."""
        slots = self.slots.get(role)
        if slots is None:
            return None
        if role not in self._counts:
            self._counts[role] = ExpertCounts(slots, self.experts, self.recipe)
        return self._counts[role].slot(expert)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Add what is counted within the block, which is one pass over the experts."""
        self._counts = {}
        try:
            yield
        finally:
            counts, self._counts = self._counts, {}
            for counted in counts.values():
                counted.add()

    def __getstate__(self) -> dict[str, Any]:
        # A copy is another model: its tensors must not count in this model's rows.
        return {**self.__dict__, "slots": {}, "_counts": {}, "kept_weight": None}

    def extra_repr(self) -> str:
        return f"{self.shape}, recipe={self.recipe.kind}, precision={self._precision}"


def fp8_experts(model: nn.Module) -> Iterator[tuple[str, ExpertProducts]]:
    """The FP8 products of every tensor of experts' weights, with its path.

    That is the path of an `Fp8GroupedLinear`, or that of the parameter of a module that `convert` has found.
    """
    for name, module in model.named_modules():
        if isinstance(module, ExpertProducts):
            parent, _, own = name.rpartition(".")
            if own == "scaling":
                name = parent
            elif parent.rpartition(".")[2] == CONTAINER:
                outer = parent.rpartition(".")[0]
                name = f"{outer}.{own}" if outer else own
            yield name, module


@contextmanager
def experts_in_bf16(model: nn.Module) -> Iterator[None]:
    """Within the block, the products of FP8 experts are in BF16. Their states stay as they are."""
    before = [(products, products._precision) for _, products in fp8_experts(model)]
    try:
        for products, _ in before:
            products._precision = "bf16"
        yield
    finally:
        for products, precision in before:
            products._precision = precision


class _Expert:
    """Quantises the matrices of one expert."""

    def __init__(self, products: ExpertProducts, index: int) -> None:
        self._products, self._index = products, index

    @property
    def training(self) -> bool:
        return self._products.training

    @property
    def on_units(self) -> dict[Product, bool]:
        return self._products.on_units

    def state_of(self, role: Role) -> ScalingState:
        return self._products.state_of(role).of(self._index)

    def quantize(self, role: Role, x: Tensor, *, update: bool, transpose: bool) -> tuple[Operand, Operand]:
        """As `Fp8Linear.quantize`."""
        shared = self._products.kept_weight
        # A copy, such as one in another dtype, does not show by its version that the parameter has changed.
        if role == "weight" and shared is not None and isinstance(x._base, nn.Parameter):
            make = partial(self._quantize, role, x)
            return shared.part(self._index).operands(x, make, update=update, transpose=transpose)
        return self._quantize(role, x, update=update, transpose=transpose)

    def _quantize(self, role: Role, x: Tensor, *, update: bool, transpose: bool) -> tuple[Operand, Operand]:
        products = self._products
        at_random = role == "grad_output" and products.recipe.stochastic_gradients
        slot = products.count(role, self._index) if update else None
        return quantize_matrix(
            products.recipe, role, self.state_of(role), x, slot,
            update=update, transpose=transpose, stream=products.rounding if at_random else None,
        )  # fmt: skip


class _Products(torch.autograd.Function):
    """The products of all experts that have tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        products: ExpertProducts,
        spans: tuple[Span, ...],
        settings: ProductSettings,
    ) -> Tensor:
        quantizers = [_Expert(products, span.expert) for span in spans]
        with products.counting():
            output, operands = forward_pass(quantizers, x, weight, bias, spans, settings)
        ctx.products, ctx.spans, ctx.names = products, spans, settings.products
        ctx.sizes = x.shape, weight.shape, None if bias is None else bias.shape
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        exact_x = None if "wgrad" in settings.products else x
        exact_weight = None if "dgrad" in settings.products else weight
        ctx.save_for_backward(exact_x, exact_weight, *operands)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # See `linear_product`: grad mode is the value of create_graph.
        if torch.is_grad_enabled():
            raise RuntimeError(SECOND_DERIVATIVE)
        grad = grads[0]
        exact_x, exact_weight, *operands = ctx.saved_tensors
        dtypes = [
            dtype if needed else None
            for dtype, needed in zip(ctx.dtypes, ctx.needs_input_grad[:3], strict=True)
        ]
        results = Gradients(
            *(
                None if dtype is None else grad.new_empty(size, dtype=dtype)
                for dtype, size in zip(dtypes, ctx.sizes, strict=True)
            )
        )
        saved = saved_operands(operands, exact_x, exact_weight, ctx.spans)
        quantizers = [_Expert(ctx.products, span.expert) for span in ctx.spans]
        with ctx.products.counting():
            backward_pass(quantizers, grad, saved, ctx.spans, ctx.names, results, ctx.sizes[1][0])
        return (*results, None, None, None)


def refuse_graphs() -> None:
    """Raise RuntimeError where torch records a graph: the numbers of tokens would become constants."""
    if is_exporting() or is_traced():
        raise RuntimeError(IN_A_GRAPH)


def spans_of(offsets: Tensor, experts: int, tokens: int) -> list[Span]:
    """The spans of the experts that have tokens.

    offsets, integers [experts]: where the tokens of each expert end, as in torch's grouped product. It is
    read, which waits on a GPU. Raises ValueError if it does not fit.
    """
    if offsets.dim() != 1 or offsets.is_floating_point() or len(offsets) != experts:
        raise ValueError(
            f"offsets are integers [{experts}], the ends of the experts' tokens, got {offsets.dtype} "
            f"{list(offsets.shape)}."
        )
    ends = offsets.tolist()
    starts = [0, *ends[:-1]]
    if any(start > end for start, end in zip(starts, ends, strict=True)) or (ends and ends[-1] > tokens):
        raise ValueError(f"offsets must not decrease, and end at {tokens}, the number of tokens, at most.")
    return [
        Span(expert, expert, start, end)
        for expert, (start, end) in enumerate(zip(starts, ends, strict=True))
        if end > start
    ]


def _multiply_in_bf16(
    x: Tensor, weight: Tensor, bias: Tensor | None, spans: Sequence[Span], out_dtype: torch.dtype
) -> Tensor:
    weights = weight.unbind()
    biases = (None,) * len(weights) if bias is None else bias.unbind()
    with torch.autocast(x.device.type, enabled=False):
        parts = [
            functional.linear(x[start:end].bfloat16(), weights[row].bfloat16(), _in_bf16(biases[row]))
            for _, row, start, end in spans
        ]
        end = spans[-1].end if spans else 0
        # Also without tokens the output depends on its operands, whose gradients are then zeros.
        empty = functional.linear(x[:0].bfloat16(), weights[0].bfloat16(), _in_bf16(biases[0]))
        rest = empty.new_zeros(x.shape[0] - end, weight.shape[1])
        return torch.cat((*parts, empty, rest)).to(out_dtype)


def _in_bf16(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.bfloat16()
