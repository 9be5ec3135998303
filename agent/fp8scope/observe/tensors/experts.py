"""The shares of tokens that the router of a mixture of experts gives to each, in sampled steps."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8scope.observe.tensors.base import OnError, inside_backward, is_traced, local, path_of
from fp8scope.observe.tensors.buffers import StatisticsTables
from fp8scope_kernels.hooks import register_forward_hook, remove_hooks

ROLE = "load"
ROUTER_NAMES = ("router", "gate")
"""Names of a linear layer beside `experts` whose output is taken for a router's."""
CHOSEN_NAMES = ("top_k", "num_experts_per_tok", "k")
"""Attributes of its module with the number of experts for each token."""
MAX_EXPERTS = 65_536


@torch.no_grad()
def load_shares(chosen: Tensor, experts: int) -> Tensor:
    """Return the share of the choices that each expert got: float64 [experts].

    `chosen` has the index of an expert for each choice, integers of any shape; others are ignored. The shares
    are NaN if there are none. Nothing here waits for a device.
    """
    flat = local(chosen.detach()).reshape(-1).long()
    valid = (flat >= 0) & (flat < experts)
    counts = torch.zeros(experts, dtype=torch.float64, device=flat.device)
    counts.scatter_add_(0, flat.clamp(0, experts - 1), valid.double())
    return counts / counts.sum()


def note_load(tables: StatisticsTables, path: str, chosen: Tensor, experts: int) -> None:
    """Note how even the load of the experts of `path` is, in the row `<path>.load`.

    `load_max` is the largest share, of several calls in a step the largest, and `load_imbalance` is 1 minus
    the entropy of the shares over that of equal ones: 0 if all are equal, 1 if one expert gets all.

    Raises ValueError unless there are 2 to MAX_EXPERTS experts and `chosen` has integers.
    """
    if not 2 <= experts <= MAX_EXPERTS:
        raise ValueError(f"a router needs 2 to {MAX_EXPERTS:,} experts, got {experts}")
    if chosen.is_floating_point() or chosen.is_complex():
        raise ValueError(f"the chosen experts must be integers, got {chosen.dtype}")
    shares = load_shares(chosen, experts)
    entropy = torch.special.entr(shares).sum() / math.log(experts)
    tables.note_derived(
        f"{path}.{ROLE}" if path else ROLE, ROLE, shares.device, chosen.numel(),
        load_max=shares.amax(), load_imbalance=1.0 - entropy,
    )  # fmt: skip


class Routers:
    """Observes the routers that a model shows by its names.

    That is a linear layer named `router` or `gate` in a module that also has `experts`, with as many outputs
    as that has elements, if it tells. The experts chosen are those with the largest outputs; as many as the
    module's `top_k`, `num_experts_per_tok` or `k` says, else one.
    """

    every_step = False
    recipe: Mapping[str, Any] = {}
    tensors = 0

    def __init__(self, model: nn.Module, tables: StatisticsTables, on_error: OnError) -> None:
        self._handles = []
        for path, module in model.named_modules():
            for name in ROUTER_NAMES:
                router = getattr(module, name, None)
                if isinstance(router, nn.Linear) and _routes(router, module):
                    remove_hooks(router._forward_hooks, RouterHook)
                    hook = RouterHook(path_of(path), tables, _choices(module), on_error)
                    self._handles.append(register_forward_hook(router, hook))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def finish(self, sampled: bool) -> None:
        pass


def _routes(router: nn.Linear, module: nn.Module) -> bool:
    experts = getattr(module, "experts", None)
    if not isinstance(experts, nn.Module) or not 2 <= router.out_features <= MAX_EXPERTS:
        return False
    return not isinstance(experts, nn.ModuleList) or len(experts) == router.out_features


def _choices(module: nn.Module) -> int:
    for name in CHOSEN_NAMES:
        value = getattr(module, name, None)
        if isinstance(value, int) and value >= 1:
            return value
    return 1


class RouterHook:
    """Notes the load that follows from a router's output [..., experts]. Never raises."""

    def __init__(self, path: str, tables: StatisticsTables, choices: int, on_error: OnError) -> None:
        self._tables: StatisticsTables | None = tables
        self._path, self._choices, self._on_error = path, choices, on_error

    def __call__(self, router: nn.Linear, inputs: Any, output: Any) -> None:
        if is_traced():
            return
        tables = self._tables
        if tables is None or not tables.sampling or not router.training or inside_backward():
            return
        try:
            if isinstance(output, Tensor):
                scores = local(output.detach())
                chosen = scores.topk(min(self._choices, scores.shape[-1]), sorted=False).indices
                note_load(tables, self._path, chosen, scores.shape[-1])
        except Exception as error:
            self._on_error(error)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model is another model.
        return {"_tables": None}
