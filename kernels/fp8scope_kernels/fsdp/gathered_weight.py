"""The unsharded weight of a layer whose shards travel in FP8: a tensor whose memory is FP8 bytes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fp8scope_kernels.plain_tensors import check_memory

aten = torch.ops.aten

SAME_TENSOR = frozenset((aten.detach.default, aten.alias.default, aten.as_strided.default))
"""The operators by which FSDP2 makes a parameter of what it has gathered."""


@dataclass
class Gathered:
    """The memory behind a gathered weight, which FSDP2 frees and fills again.

    `data`: FP8 numbers [out, in] with `inverse_scale`, float32 without dimensions; or, where that is None,
    the weight itself in its own dtype.
    """

    data: Tensor
    inverse_scale: Tensor | None = None

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight that the memory represents. Raises RuntimeError where FSDP2 has freed it."""
        check_memory(self.data)
        if self.inverse_scale is None:
            return self.data
        return (self.data.float() * self.inverse_scale).to(dtype)


class GatheredWeight(Tensor):
    """The parameter of a layer while FSDP2 has it unsharded: the weight's shape and dtype, FP8 in memory.

    FP8 layers multiply the bytes. Any other code that reads it computes with the dequantised numbers, q / s.
    Writing to it raises TypeError: FSDP2 drops the memory, and the optimizer changes the shards.
    """

    gathered: Gathered

    @staticmethod
    def __new__(cls, gathered: Gathered, dtype: torch.dtype) -> "GatheredWeight":
        data = gathered.data
        made: GatheredWeight = Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, device=data.device)
        made.gathered = gathered
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        weight = args[0] if args else None
        if function in SAME_TENSOR and isinstance(weight, GatheredWeight) and _is_whole(weight, args[1:]):
            return GatheredWeight(weight.gathered, weight.dtype)
        if function._schema.is_mutable and isinstance(weight, GatheredWeight):
            raise TypeError(
                "A weight that FSDP2 has gathered in FP8 cannot be written to: change its shards."
            )
        args, kwargs = pytree.tree_map_only(
            GatheredWeight, lambda w: w.gathered.dequantize(w.dtype), (args, kwargs or {})
        )
        return function(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype}, memory={self.gathered.data.dtype})"


def as_plain(weight: Tensor, *, always: bool = False) -> Tensor:
    """The weight itself where it was gathered in high precision, with its gradient; others as they are.

    `always`: FP8 is dequantised, for code that cannot do without numbers.
    """
    if not isinstance(weight, GatheredWeight):
        return weight
    if weight.gathered.inverse_scale is not None and not always:
        return weight
    plain: Tensor = _Plain.apply(weight)  # type: ignore[no-untyped-call]
    return plain


class _Plain(torch.autograd.Function):
    """The numbers of a gathered weight. Its gradient is that of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: GatheredWeight) -> Tensor:
        return weight.gathered.dequantize(weight.dtype).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _is_whole(weight: Tensor, geometry: tuple[Any, ...]) -> bool:
    """Return whether `as_strided` with this size and stride is the weight itself."""
    return all(
        tuple(own) == tuple(asked)
        for own, asked in zip((weight.shape, weight.stride()), geometry, strict=False)
    )
