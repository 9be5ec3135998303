"""The parts of torch that are not public API and that the kernels use, in one place.

A new version of torch may change any of it. Each name says what happens where torch does not have it.
"""

import functools
import inspect
import platform
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as has_functorch_transforms
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.compiler import is_dynamo_compiling

__all__ = [
    "break_graph",
    "call_before_compiling",
    "checkpointed_regions",
    "current_graph_task_id",
    "forget_gathered",
    "fsdp_parameters",
    "has_bf16_units",
    "has_functorch_transforms",
    "has_saved_tensors_hooks",
    "is_dynamo_compiling",
    "is_exporting",
    "is_fake",
    "is_fsdp_module",
    "is_functional",
    "is_functorch_wrapped_tensor",
    "is_traced",
    "process_group",
    "scaled_grouped_mm",
    "scaled_mm",
    "settle_fsdp",
    "torch_library_path",
]

P = ParamSpec("P")
R = TypeVar("R")

# `current_graph_task_id()` is -1 outside of a backward pass. A forward call inside of one recomputes what
# activation checkpointing has dropped.

scaled_mm = torch._scaled_mm
"""The product of two FP8 matrices. There is no public function for it before torch 2.10."""

scaled_grouped_mm: Callable[..., Any] | None = getattr(torch, "_scaled_grouped_mm", None)
"""The product of FP8 matrices of many groups, with scales of rows and columns. torch before 2.8 has none."""

torch_library_path: str = torch._C.__file__
"""The library that Python loads torch from. It is linked with torch's OpenMP runtime."""


def break_graph(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate `function` so that compiled graphs break at its call, as `torch.compiler.disable` does.

    `torch.compiler.disable` imports torch._dynamo immediately, which costs more than a second of CPU time.
    torch's lazy form imports it only when something is compiled; it is used where this version has it.
    """
    lazy: Callable[[Callable[P, R]], Callable[P, R]] | None = getattr(torch, "_disable_dynamo", None)
    in_graph = lazy(function) if lazy is not None else torch.compiler.disable(function)  # type: ignore[no-untyped-call]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return in_graph(*args, **kwargs) if is_dynamo_compiling() else function(*args, **kwargs)

    return call


def is_exporting() -> bool:
    """Return whether `torch.export`, `torch.jit.trace` or `torch.onnx` record what a model does.

    A hook that counts must then do nothing: what it computes would become part of what is recorded.
    """
    if is_dynamo_compiling():
        # `torch.jit.trace` cannot record here, and torch 2.13 breaks a compiled graph at the question.
        return _is_exporting()
    return _is_exporting() or bool(torch._C._is_tracing())


_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)
"""torch before 2.7 does not tell `torch.export` from `torch.compile`."""


def is_traced() -> bool:
    """Return whether torch records what is called into a graph: torch.compile, AOT autograd, make_fx."""
    return torch.compiler.is_compiling() or torch._C._get_dispatch_mode(_PROXY) is not None


_PROXY = torch._C._TorchDispatchModeKey.PROXY


def call_before_compiling(callback: Callable[..., None]) -> bool:
    """Arrange that torch calls `callback` whenever it is about to compile a graph. It must not raise.

    Returns False if torch has not loaded its compiler yet (torch.optim does, in its first step), has no such
    call, or guards its graphs on the hooks of modules. May be called again with the same callback.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    handler = getattr(dynamo, "callback_handler", None)
    if handler is None or not getattr(dynamo.config, "skip_nnmodule_hook_guards", False):
        return False
    if callback not in handler.start_callbacks:
        handler.register_start_callback(callback)
    return True


def is_fake(x: Tensor) -> bool:
    """Return whether x is a tensor of FakeTensorMode: it has a shape and a device, but no memory."""
    # torch's module is loaded by the time that there is such a tensor; importing it takes long.
    fake: Any = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is not None and isinstance(x, fake.FakeTensor)


def process_group(name: str) -> Any:
    """The process group of this name."""
    from torch.distributed import distributed_c10d

    groups: Any = distributed_c10d
    return groups._resolve_process_group(name)


def is_fsdp_module(module: Any) -> bool:
    """Return whether `fully_shard` was applied to the module."""
    # torch's module is loaded by the time that there is such a module; importing it takes long.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def fsdp_parameters(model: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield FSDP2's objects for each parameter that it shards inside of `model`.

    They are the FSDP module, the group of parameters that are gathered together, and the parameter.
    """
    for module in model.modules():
        if not is_fsdp_module(module):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            # `fully_shard` of a list of modules has one state for all of them.
            if module in group.modules[:1]:
                for parameter in group.fsdp_params:
                    yield module, group, parameter


def settle_fsdp(root: Any) -> None:
    """Have FSDP2 do what it does before the first forward pass: it may replace parameters and their parts."""
    root._get_fsdp_state()._lazy_init()


def forget_gathered(parameter: Any) -> None:
    """Have FSDP2 make the unsharded parameter again at its next all-gather, in whatever dtype that has."""
    parameter.all_gather_outputs = []
    parameter._unsharded_inner_tensors = []
    vars(parameter).pop("_unsharded_param", None)


is_functional: Callable[[Tensor], bool] = getattr(torch, "_is_functional_tensor", lambda x: False)
"""True if x is a wrapper that torch makes to functionalise a graph. It is of type Tensor, without memory."""


@cache
def has_bf16_units() -> bool:
    """Return whether this CPU multiplies BF16 in hardware: AVX512-BF16 or AMX on x86, else what oneDNN
    reports.

    Without such units a BF16 product takes torch 1.2 to 1.5 times (AVX-512) or 35 to 88 times (AVX2) as long
    as a float32 product. If torch cannot tell, the answer is False: multiplying in float32 is always right.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return supported
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in names)


def has_saved_tensors_hooks() -> bool:
    """Return whether hooks change what autograd saves, as those of `torch.utils.checkpoint` do."""
    top: Callable[..., Any] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


def checkpointed_regions() -> tuple[list[Any], Any]:
    """Return the regions of `torch.utils.checkpoint` around the calling code: those that run for the first
    time, and the one that is being recomputed, or None.

    A region is an object that torch keeps until the region's backward pass is over. Neither is visible where
    torch has renamed its functions.
    """
    codes = _checkpoint_codes()
    first: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        kind = codes.get(frame.f_code)
        if kind == "checkpoint":
            generator = frame.f_locals.get("gen")
            inner = None if generator is None else generator.gi_frame
            region = None if inner is None else inner.f_locals.get("new_frame")
            if region is not None:
                first.append(region)
        elif kind == "first":
            first.append(frame.f_locals["ctx"])
        elif kind is not None:
            return first, frame.f_locals.get(kind)
        frame = frame.f_back
    return first, None


@cache
def _checkpoint_codes() -> dict[CodeType, str]:
    """The functions of torch.utils.checkpoint that call a region's code, and their variables with regions."""
    module: Any = sys.modules.get("torch.utils.checkpoint")
    reentrant = getattr(module, "CheckpointFunction", None)
    hook = getattr(module, "_checkpoint_hook", None)
    if reentrant is None or hook is None:
        return {}
    codes = {
        inspect.unwrap(module.checkpoint).__code__: "checkpoint",
        reentrant.forward.__code__: "first",
        reentrant.backward.__code__: "ctx",
    }
    for constant in hook.__init__.__code__.co_consts:
        if isinstance(constant, CodeType) and constant.co_name == "unpack_hook":
            codes[constant] = "frame"
    return codes
