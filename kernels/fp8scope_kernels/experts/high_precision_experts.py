"""Counts the tensors of experts in high precision, so that a BF16 run has the rows of its FP8 run.

Two hooks of a module follow its 3-D weights to the products that they take part in, in the steps in which the
buffer's `Pace` reads tensors. What the module computes stays as it is. In a graph nothing is counted.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fp8scope_kernels.experts.followed_weights import (
    ALL,
    SOME,
    FollowedWeight,
    FollowedWeights,
    WeightProduct,
)
from fp8scope_kernels.experts.modules import expert_weights, weights_named
from fp8scope_kernels.high_precision import HighPrecisionObserver, OnError
from fp8scope_kernels.hooks import register_forward_hook, register_forward_pre_hook, remove_hooks
from fp8scope_kernels.recipes import ROLES, Role
from fp8scope_kernels.statistics import StatisticsBuffer
from fp8scope_kernels.torch_internals import is_exporting, is_functorch_wrapped_tensor, is_traced

CHOICES = frozenset(("__getitem__", "index_select"))
"""Functions that take some of the experts."""


def observe_plain_experts(
    path: str, module: nn.Module, buffer: StatisticsBuffer, on_error: OnError | None = None
) -> int:
    """Bind three rows for each of the weights of `experts_in_high_precision`; returns their number.

    Names are `<path>.<parameter>.<input|weight|grad_output>`, as those of the FP8 run's rows for all experts.
    `on_error` is called with exceptions of the hooks; without it, they propagate to the forward call.
    """
    unobserve_plain_experts(module)
    observers = {
        name: _observer(path, name, weight, buffer, on_error)
        for name, weight in expert_weights(module).items()
    }
    begin = ExpertsBeginHook(observers)
    register_forward_pre_hook(module, begin)
    register_forward_hook(module, ExpertsEndHook(begin), always_call=True)
    return len(ROLES) * len(observers)


def unobserve_plain_experts(module: nn.Module) -> None:
    """Undo `observe_plain_experts`."""
    remove_hooks(module._forward_pre_hooks, ExpertsBeginHook)
    remove_hooks(module._forward_hooks, ExpertsEndHook, module._forward_hooks_always_called)


class ExpertsBeginHook:
    """Begins to follow the weights of a module before its forward pass."""

    def __init__(self, observers: Mapping[str, HighPrecisionObserver]) -> None:
        self.observers = observers
        # By thread: DataParallel calls the hooks of its replicas at the same time.
        self.running: dict[int, list[ObservedWeights]] = {}

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if is_traced() or is_exporting() or not module.training:
            return
        if not any(observer.is_reading for observer in self.observers.values()):
            return
        followed = ObservedWeights(weights_named(module, self.observers), self.observers)
        self.running.setdefault(threading.get_ident(), []).append(followed)
        followed.__enter__()  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        # A copy is another model: its tensors must not count in this model's rows.
        return {"observers": {}, "running": {}}


class ExpertsEndHook:
    """Ends what the other hook began, also after an exception."""

    def __init__(self, begin: ExpertsBeginHook) -> None:
        self._begin: ExpertsBeginHook | None = begin

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        begin = self._begin
        if begin is None or not begin.running or is_traced():
            return
        followed = begin.running.get(threading.get_ident())
        if followed:
            followed.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        return {"_begin": None}


class ObservedWeights(FollowedWeights):
    """Within the block, the factors of products with the weights are counted."""

    def __init__(self, weights: Mapping[str, Tensor], observers: Mapping[str, HighPrecisionObserver]) -> None:
        super().__init__(weights)
        self._observers = observers
        self._parameters = weights

    def multiply(self, product: WeightProduct) -> Any:
        """The product as the module computes it, with its factors counted."""
        output = product.call()
        weight, observer = product.weight, self._observers[product.weight.name]
        if is_functorch_wrapped_tensor(product.x):
            return output
        # Some of the experts may be copies for each token: the parameter itself has each once.
        counted = weight.tensor if weight.expert >= 0 else self._parameters[weight.name]
        observer.read(product.x, counted, output)
        return output

    def derive(
        self, weight: FollowedWeight, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> bool:
        """Follow also some of the experts, such as the one of each token."""
        if super().derive(weight, name, args, kwargs, result):
            return True
        if name not in CHOICES or weight.expert != ALL or not isinstance(result, Tensor):
            return False
        self._follow(FollowedWeight(result, weight.name, SOME))
        return True


def _observer(
    path: str, name: str, weight: Tensor, buffer: StatisticsBuffer, on_error: OnError | None
) -> HighPrecisionObserver:
    observer = HighPrecisionObserver()
    observer.on_error = on_error
    name = f"{path}.{name}" if path else name
    # Only the module's code says which dimension is which.
    shapes: dict[Role, tuple[int, ...]] = {
        "input": (-1, -1),
        "weight": tuple(weight.shape),
        "grad_output": (-1, -1),
    }
    for role in ROLES:
        observer.slots[role] = buffer.register(f"{name}.{role}", format=None, shape=shapes[role], role=role)
    return observer
