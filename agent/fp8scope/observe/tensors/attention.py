"""A bound of the attention logits of sampled steps, for calls of torch's `scaled_dot_product_attention`.

Fused attention never shows its logits. The norms of queries and keys bound them, take one pass over both, and
grow as the logits do.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8scope.observe import attention_calls
from fp8scope.observe.tensors.activations import Trail
from fp8scope.observe.tensors.base import OnError, inside_backward, local
from fp8scope.observe.tensors.buffers import StatisticsTables

ROLE = "logits"


@torch.no_grad()
def logit_bound(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    """Return the largest ‖q‖·‖k‖·`scale` of a sequence and head: float32 [], at least every |logit|.

    Masks are not considered. With fewer heads in `key` than in `query` (grouped queries), each key head
    belongs to as many successive query heads.

    Args:
        query: floating point [..., heads, queries, features].
        key: [..., key heads, keys, features].
        scale: of the products; by default 1 / sqrt(features).
    """
    query, key = local(query.detach()), local(key.detach())
    factor = query.shape[-1] ** -0.5 if scale is None else abs(float(scale))
    largest = [
        torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float32).amax(-1) for tensor in (query, key)
    ]
    if query.dim() > 2 and query.shape[-3] != key.shape[-3]:
        largest[1] = largest[1].repeat_interleave(query.shape[-3] // key.shape[-3], -1)
    bound: Tensor = (largest[0] * largest[1]).amax() * factor
    return bound


class AttentionLogits:
    """Notes `logit_bound` in rows `<module>.logits`, which appear with the first call.

    The module is that of the linear layer that was called last, which computes queries, keys or values.
    """

    every_step = False
    recipe: Mapping[str, Any] = {}
    tensors = 0

    def __init__(self, tables: StatisticsTables, trail: Trail, on_error: OnError) -> None:
        self._tables, self._trail, self._on_error = tables, trail, on_error
        attention_calls.listen(self)

    def close(self) -> None:
        """Observe no further calls."""
        attention_calls.leave(self)

    def finish(self, sampled: bool) -> None:
        self._trail.path = ""

    def called(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Attention is about to be computed of these arguments. Never raises."""
        if not self._tables.sampling or not self._trail.path or inside_backward():
            return
        query = args[0] if args else kwargs.get("query")
        key, scale = args[1] if len(args) > 1 else kwargs.get("key"), kwargs.get("scale")
        try:
            if isinstance(query, Tensor) and isinstance(key, Tensor):
                note_logits(self._tables, self._trail.module, query, key, scale)
        except Exception as error:
            self._on_error(error)


def note_logits(
    tables: StatisticsTables, path: str, query: Tensor, key: Tensor, scale: float | None = None
) -> None:
    """Note the bound of the logits of the module `path`; of several calls in a step, the largest."""
    bound = logit_bound(query, key, scale)
    logits = query.numel() // max(query.shape[-1], 1) * key.shape[-2]
    tables.note_derived(f"{path}.{ROLE}" if path else ROLE, ROLE, bound.device, logits, logit_bound=bound)
