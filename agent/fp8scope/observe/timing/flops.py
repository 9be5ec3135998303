"""Counts the floating-point operations of a model's training step, and tells the precision that they have.

Counted are the products of the forward pass (matrix products, convolutions, attention) as they are
dispatched, by torch's own formulas (`torch.utils.flop_counter`), in the first forward call of each input
shape. A training step is three forward passes: the gradients of input and weight cost as much again each.

* Model FLOPs utilisation: `mfu` = model operations / (seconds * peak), with the dense BF16 peak of `peaks`.
* Hardware FLOPs utilisation: `hfu` = (model operations + recomputed operations) / (seconds * peak).

Recomputed are the forward products that activation checkpointing repeats in the backward pass. With every
layer checkpointed, hfu is 4/3 of mfu. Source: Chowdhery et al. 2022 (PaLM), appendix B; Korthikanti et al.
2022.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8scope.observe import attention_calls
from fp8scope.observe.tensors.layers import is_foreign
from fp8scope.observe.timing.unfused_attention import obstacles
from fp8scope_kernels import fp8_experts, fp8_layers
from fp8scope_kernels.torch_internals import break_graph

MAX_COUNTED = 8
"""Input shapes that are counted; for others the count is scaled by the number of elements."""
MAX_KNOWN = 1024

ATTENTION_WITHOUT_FORMULA = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable,
)

RECURRENT_LAYERS = tuple(
    getattr(torch.ops.aten, name)
    for name in ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")
    if hasattr(torch.ops.aten, name)
)
CONVOLUTIONS = (torch.ops.aten.convolution, torch.ops.aten._convolution)
BATCHED_PRODUCTS = (torch.ops.aten.bmm, torch.ops.aten.baddbmm)
SOFTMAX = (torch.ops.aten._softmax, torch.ops.aten._safe_softmax)
AFTER_SOFTMAX = (
    torch.ops.aten.native_dropout,
    torch.ops.aten._to_copy,
    torch.ops.aten.clone,
    torch.ops.aten.mul,
)
MIN_ATTENTION = 64
"""A matrix of attention has so many queries and keys at least; a router's probabilities have fewer."""

Signature = tuple[torch.Size, ...]

_FP8: Final = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
PRECISIONS: Final[Mapping[torch.dtype, str]] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    **dict.fromkeys(_FP8, "fp8"),
}


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, adds up the operations of dispatched functions, without changing their results."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import its compiler, which takes seconds, with the first function that is dispatched.
        # `break_graph` does the same for scripts that compile.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Otherwise torch never compiles a function whose first call comes while a mode is active.
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self._by_precision: dict[str, int] = {}
        self.products: dict[tuple[str, int, int], int] = {}
        """Operations of products with a matrix, by precision, inputs and outputs of that."""
        self.attention = {"fused": 0, "written_out": 0, "dropped_out": 0, "bytes": 0, "flops": 0}
        """Calls of fused attention; products with a matrix of attention, those of them after dropout, and the
        bytes and operations of all."""
        self.unfused: dict[str, int] = {}
        """Calls of `scaled_dot_product_attention` that are not fused, by what rules that out."""
        self._weights: dict[int, tuple[torch.Size, bool]] = {}
        """Matrices of attention in memory, by their addresses: the shape, and whether after dropout."""
        self.convolutions: dict[tuple[str, int, int, bool], int] = {}
        """Operations of convolutions, by precision, channels in and out, and whether channels come last."""
        self.operations = 0
        """Dispatched functions that compute something, and are no views."""

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        attention_calls.join(self)
        return self

    def __exit__(self, *error: Any) -> None:
        attention_calls.leave(self)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def called(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Attention is about to be computed of these arguments. Never raises."""
        for name in obstacles(args, kwargs):
            self.unfused[name] = self.unfused.get(name, 0) + 1

    @break_graph
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.utils.flop_counter import flop_registry, sdpa_flop_count

        out = func(*args, **(kwargs or {}))
        self.operations += not getattr(func, "is_view", False)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            flops = int(formula(*args, **(kwargs or {}), out_val=out))
            if func._overloadpacket in CONVOLUTIONS:
                self._add_convolution(flops, args)
            else:
                self._add(flops, args)
                self._note_attention(func._overloadpacket, args, flops)
        elif func._overloadpacket in ATTENTION_WITHOUT_FORMULA:
            query, key, value = args[:3]
            count = sdpa_flop_count(query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]
            self._add(int(count), args)
            self.attention["fused"] += 1
        elif func._overloadpacket in RECURRENT_LAYERS:
            self._add_recurrent_layer(args)
        else:
            self._follow_attention(func._overloadpacket, args, out)
        return out

    def _add_convolution(self, flops: int, args: Sequence[Any]) -> None:
        self.flops += flops
        x, weight = args[:2]
        precision = _precision_of(weight)
        self._by_precision[precision] = self._by_precision.get(precision, 0) + flops
        # A grouped convolution multiplies narrow matrices, which its channels do not show.
        if weight.shape[0] and x.dim() > 2 and weight.shape[1] == x.shape[1]:
            key = precision, weight.shape[1], weight.shape[0], _has_channels_last(x)
            self.convolutions[key] = self.convolutions.get(key, 0) + flops

    def _add_recurrent_layer(self, args: Sequence[Any]) -> None:
        """Add a fused recurrent layer: each row of its input meets each of its matrices.

        `args`: its input, [..., features], and its weights, in a list or one after the other. An upper
        layer's input has other features, but as many rows.
        """
        weights = args[1] if isinstance(args[1], list | tuple) else args[1:3]
        matrices = [weight for weight in weights if weight.dim() == 2]
        rows = args[0].numel() // max(args[0].shape[-1], 1)
        flops = 2 * rows * sum(matrix.numel() for matrix in matrices)
        self.flops += flops
        precision = _precision_of(matrices[0] if matrices else None)
        self._by_precision[precision] = self._by_precision.get(precision, 0) + flops

    def _note_attention(self, function: Any, args: Sequence[Any], flops: int) -> None:
        if "scaled_dot_product" in str(function):
            self.attention["fused"] += 1
        elif function in BATCHED_PRODUCTS and isinstance(args[0], Tensor):
            matrix = args[0]
            shape, is_dropped_out = self._weights.get(matrix.data_ptr(), (None, False))
            if shape is not None and shape[-2:] == matrix.shape[-2:]:
                self.attention["written_out"] += 1
                self.attention["dropped_out"] += is_dropped_out
                self.attention["bytes"] += matrix.nbytes
                # The product of queries and keys, which made the matrix, has as many operations.
                self.attention["flops"] += 2 * flops

    def _follow_attention(self, function: Any, args: Sequence[Any], out: Any) -> None:
        """Remember the results of softmax over matrices, and what dropout and conversions make of them."""
        source = None
        if function in AFTER_SOFTMAX and isinstance(args[0], Tensor):
            source = self._weights.get(args[0].data_ptr())
        if function in SOFTMAX or source is not None:
            result = out[0] if isinstance(out, tuple) else out
            if result.dim() > 2 and min(result.shape[-2:]) >= MIN_ATTENTION:
                is_dropped_out = source is not None and (source[1] or _drops_out(function, args))
                self._weights[result.data_ptr()] = result.shape, is_dropped_out

    def _add(self, flops: int, args: Sequence[Any]) -> None:
        self.flops += flops
        # The last factor: `addmm` and `baddbmm` begin with the bias.
        factor = next((x for x in reversed(args) if isinstance(x, Tensor)), None)
        precision = _precision_of(factor)
        if factor is not None and factor.dim() == 2:
            key = precision, factor.shape[0], factor.shape[1]
            self.products[key] = self.products.get(key, 0) + flops
        self._by_precision[precision] = self._by_precision.get(precision, 0) + flops

    @property
    def precision(self) -> str:
        """The precision of most operations: "bf16", "fp16", "fp32" or "fp8"; empty if it is unknown."""
        return max(self._by_precision, key=lambda name: self._by_precision[name], default="")


def _drops_out(function: Any, args: Sequence[Any]) -> bool:
    """Return whether a function of a matrix is dropout: on a CPU, the product with noise of its shape."""
    if function is torch.ops.aten.native_dropout:
        return True
    return function is torch.ops.aten.mul and isinstance(args[1], Tensor) and args[1].shape == args[0].shape


def _has_channels_last(x: Tensor) -> bool:
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in layouts and x.is_contiguous(memory_format=layouts[x.dim()])


def _precision_of(x: Tensor | None) -> str:
    # Other subclasses may hide a narrower format behind the dtype that they show.
    is_plain = type(x) in (Tensor, nn.Parameter) or type(x).__name__ == "DTensor"
    return PRECISIONS.get(x.dtype, "") if x is not None and is_plain else ""


def training_precision(model: nn.Module, counter: FlopCounter | None) -> str:
    """The precision of a training forward pass that has just ended, as `FlopCounter.precision` names it.

    Without a `counter` the products are hidden in compiled graphs. Then it is what autocast says around the
    model, else the dtype of weights that are all narrower than float32; empty if neither tells it.
    """
    if any(True for layers in (fp8_layers(model), fp8_experts(model)) for _ in layers):
        return "fp8"
    if counter is not None:
        return counter.precision
    if any(is_foreign(module) for module in model.modules()):
        return ""
    weights = {p.dtype for p in model.parameters() if p.dim() > 1}
    device = next((p.device.type for p in model.parameters()), "cpu")
    if torch.is_autocast_enabled(device):
        weights = {torch.get_autocast_dtype(device)}
    return PRECISIONS.get(weights.pop(), "") if len(weights) == 1 and torch.float32 not in weights else ""


def shapes_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
    """Return the shapes of the tensor arguments of a forward call."""
    return tuple(value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


class FlopModel:
    """The operations of a training step of one model, by input shapes."""

    def __init__(self, model: nn.Module) -> None:
        weights = _matrices(model)
        size = sum(weight.numel() for weight in weights)
        trained = sum(weight.numel() for weight in weights if weight.requires_grad)
        self._size = size
        # Frozen weights need no gradient, but pass on the gradient of their input.
        self._factor = 2 + trained / size if size else 3.0
        self._known: dict[Signature, float] = {}
        self._counted = 0
        self._visible = not _is_hidden(model)
        self._repeated = 0.0
        """Recomputed operations, as a share of the step's."""

    def begin(self, shapes: Signature) -> FlopCounter | None:
        """Return a counter to enter around a forward call; None if the count for these shapes is known."""
        if not self._visible or shapes in self._known or self._counted >= MAX_COUNTED:
            return None
        return FlopCounter()

    def end(self, shapes: Signature, counter: FlopCounter) -> None:
        """Store the count of a forward call that has ended."""
        self._counted += 1
        if counter.flops:
            self._known[shapes] = counter.flops * self._factor
        else:
            self._visible = False

    def note_recomputation(self, shapes: Signature, operations: float) -> None:
        """A backward pass of a counted forward call with these shapes has repeated so many operations."""
        step = self._known.get(shapes, 0.0)
        self._repeated = operations / step if step else 0.0

    def recomputed(self, operations: float) -> float:
        """Return what is recomputed in a step with so many operations; NaN if products are hidden."""
        return operations * self._repeated if self._visible else math.nan

    def step_flops(self, shapes: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        """Return the operations of forward and backward for these input shapes; 0 if unknown."""
        operations = self._known.get(shapes)
        if operations is None:
            operations = self._scaled(shapes) or self._from_weights(args, kwargs)
            if len(self._known) < MAX_KNOWN:
                self._known[shapes] = operations
        return operations

    def _scaled(self, shapes: Signature) -> float:
        """Scale a known count by the number of elements of the first input."""
        if not self._known or not shapes:
            return 0.0
        like, flops = next(iter(self._known.items()))
        return flops * shapes[0].numel() / max(like[0].numel(), 1) if like else 0.0

    def _from_weights(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        """Estimate 2 operations per weight and token, without attention: used for compiled models."""
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if first is None:
            return 0.0
        tokens = first.numel() // max(first.shape[-1], 1) if first.is_floating_point() else first.numel()
        return 2.0 * self._size * tokens * self._factor


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights of matrix products: two-dimensional, and not only used as embeddings."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tied = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Linear) and id(module.weight) in tables
    }
    return [p for p in model.parameters() if p.dim() == 2 and (id(p) not in tables or id(p) in tied)]


def _is_hidden(model: nn.Module) -> bool:
    """Return whether products bypass torch's dispatcher: compiled graphs, Transformer Engine."""
    # Importing it takes seconds, and there is no such module unless the script has loaded it.
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    compiled: tuple[type, ...] = () if dynamo is None else (dynamo.OptimizedModule,)
    return any(
        isinstance(module, compiled)
        or module._compiled_call_impl is not None
        or type(module).__module__.startswith("transformer_engine")
        for module in model.modules()
    )
