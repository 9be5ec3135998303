"""The floating-point operations of a model's training step, counted once.

Counted are the products of the forward pass (matrix products, convolutions, attention) as they are
dispatched, by torch's own formulas (`torch.utils.flop_counter`), in the first forward call of each input
shape. A training step is three forward passes: the gradients of input and weight cost as much again each.
Recomputation is not counted: these are the model's operations, not the hardware's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

MAX_COUNTED = 8
"""Input shapes that are counted; of others the operations are scaled by the number of elements."""
MAX_KNOWN = 1024

ATTENTION_WITHOUT_FORMULA = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable,
)

Signature = tuple[torch.Size, ...]


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active adds up the operations of what is dispatched, and changes none of it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.utils.flop_counter import flop_registry, sdpa_flop_count

        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += int(formula(*args, **(kwargs or {}), out_val=out))
        elif func._overloadpacket in ATTENTION_WITHOUT_FORMULA:
            query, key, value = args[:3]
            count = sdpa_flop_count(query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]
            self.flops += int(count)
        return out


def shapes_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
    """The shapes of the tensors that a forward call is given."""
    return tuple(value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


class FlopModel:
    """What one training step of one model costs, by the shapes of its inputs."""

    def __init__(self, model: nn.Module) -> None:
        weights = _matrices(model)
        size = sum(weight.numel() for weight in weights)
        trained = sum(weight.numel() for weight in weights if weight.requires_grad)
        self._size = size
        # Weights that are frozen need no gradient of their own, but pass that of their input on.
        self._factor = 2 + trained / size if size else 3.0
        self._known: dict[Signature, float] = {}
        self._counted = 0
        self._visible = not _is_hidden(model)

    def begin(self, shapes: Signature) -> FlopCounter | None:
        """A counter for a forward call with such inputs, to be entered; None when its cost is known."""
        if not self._visible or shapes in self._known or self._counted >= MAX_COUNTED:
            return None
        return FlopCounter()

    def end(self, shapes: Signature, counter: FlopCounter) -> None:
        """The forward call is over."""
        self._counted += 1
        if counter.flops:
            self._known[shapes] = counter.flops * self._factor
        else:
            self._visible = False

    def step_flops(self, shapes: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        """Operations of forward and backward with inputs of these shapes; 0 when that cannot be told."""
        found = self._known.get(shapes)
        if found is None:
            found = self._scaled(shapes) or self._from_weights(args, kwargs)
            if len(self._known) < MAX_KNOWN:
                self._known[shapes] = found
        return found

    def _scaled(self, shapes: Signature) -> float:
        """From the counted shapes, by the number of the first input's elements."""
        if not self._known or not shapes:
            return 0.0
        like, flops = next(iter(self._known.items()))
        return flops * shapes[0].numel() / max(like[0].numel(), 1) if like else 0.0

    def _from_weights(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        """2 operations for each weight and token: what can be said of compiled models, without attention."""
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if first is None:
            return 0.0
        tokens = first.numel() // max(first.shape[-1], 1) if first.is_floating_point() else first.numel()
        return 2.0 * self._size * tokens * self._factor


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights that are multiplied: those of two dimensions that are no table to look up in."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tied = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Linear) and id(module.weight) in tables
    }
    return [p for p in model.parameters() if p.dim() == 2 and (id(p) not in tables or id(p) in tied)]


def _is_hidden(model: nn.Module) -> bool:
    """Whether products happen where torch's dispatcher does not pass: compiled graphs, Transformer Engine."""
    from torch._dynamo.eval_frame import OptimizedModule

    return any(
        isinstance(module, OptimizedModule)
        or module._compiled_call_impl is not None
        or type(module).__module__.startswith("transformer_engine")
        for module in model.modules()
    )
