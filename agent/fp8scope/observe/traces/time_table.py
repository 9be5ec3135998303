"""The table of where the time of a traced step went: by layer, and by kind of operator.

Times are those of the accelerator's kernels where there are any, otherwise of the host. An operator of the
forward pass belongs to the innermost module that was running. One of the backward pass belongs to the module
whose forward operator has the same sequence number, which is how torch numbers both.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch._C._autograd import DeviceType

from fp8scope.observe.traces.layer_ranges import FP8_LIBRARIES, PREFIX, SEPARATOR

KINDS: Final = ("products", "attention", "casts", "other")
"""Of operators: matrix products and convolutions, fused attention, the rest of FP8 layers (casts, scales,
counters), and all others."""
PASSES: Final = ("forward", "backward", "recomputed")
MAX_ROWS: Final = 64
OPTIMIZER: Final = "optimizer"
REST: Final = ""
"""The row of what belongs to no module: the loss, the script's own operators, compiled code."""

_PRODUCT: Final = re.compile(
    r"aten::(_scaled_|_grouped_|_scaled_grouped_)?(mm|addmm|bmm|baddbmm|mv|addmv|dot)(_v2)?$|conv|grouped_mm|scaled_mm"
)
_PRODUCT_KERNEL: Final = re.compile(r"gemm|cutlass|cublas|nvjet|xmma|matmul|conv\w*(fprop|dgrad|wgrad)", re.I)
_ATTENTION: Final = re.compile(r"scaled_dot_product|flash|efficient_attention|fmha", re.I)
_OPTIMIZER: Final = "Optimizer.step#"
_BACKWARD_NODE: Final = "autograd::engine::evaluate_function: "
_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(kw_only=True)
class LayerTimes:
    """Seconds of one layer, or of all whose paths differ by numbers only."""

    layers: set[str] = field(default_factory=set)
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    """By pass and kind."""
    launches: int = 0

    def add(self, where: str, kind: str, seconds: float, launches: int) -> None:
        """Add an operator's own time, without that of the operators that it calls."""
        self.seconds[where, kind] = self.seconds.get((where, kind), 0.0) + seconds
        self.launches += launches

    def total(self, *, where: str = "", kind: str = "") -> float:
        """Return the seconds of a pass, of a kind, or of all."""
        return sum(
            seconds
            for (its_pass, its_kind), seconds in self.seconds.items()
            if where in ("", its_pass) and kind in ("", its_kind)
        )


def time_table(events: Iterable[Any], held: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Return the table of a step as a document.

    `events`: the `FunctionEvent`s of torch's profiler. `held`: `LayerRanges.held`. The rows have the layers'
    path (numbers replaced by `*`), class and count, seconds by pass and by kind, and launches of kernels; at
    most MAX_ROWS rows, those with the most time. `held` has the bytes of all FP8 layers.
    """
    host = [event for event in events if event.device_type == DeviceType.CPU]
    on_device = any(event.kernels for event in host)
    owners = _owners(host)
    functions = _fp8_functions()
    table: dict[str, LayerTimes] = {}
    for event in host:
        seconds = event.self_device_time_total if on_device else event.self_cpu_time_total
        if seconds <= 0 and not event.kernels:
            continue
        path, where = owners.get(id(event), (REST, "forward"))
        row = table.setdefault(_pattern_of(path), LayerTimes())
        row.layers.add(path)
        row.add(where, _kind(event, functions), seconds / 1e6, len(event.kernels))
    rows = sorted(table.items(), key=lambda item: -item[1].total())[:MAX_ROWS]
    return {
        "device": "accelerator" if on_device else "host",
        "seconds": sum(row.total() for row in table.values()),
        "layers": [_row(path, row) for path, row in rows],
        "held": _sum_of(held.values()),
    }


def _pattern_of(name: str) -> str:
    path, separator, module = name.rpartition(SEPARATOR)
    return _NUMBER.sub("*", path) + separator + module


def _row(name: str, row: LayerTimes) -> dict[str, Any]:
    path, _, module = name.rpartition(SEPARATOR)
    document = {
        "path": path[:512],
        "module": module[:128],
        "count": len(row.layers),
        "launches": row.launches,
    }
    passes = {where: round(row.total(where=where), 9) for where in PASSES}
    return document | passes | {kind: round(row.total(kind=kind), 9) for kind in KINDS}


def _sum_of(held: Iterable[Mapping[str, int]]) -> dict[str, int]:
    whole: dict[str, int] = {}
    for layer in held:
        for name, size in layer.items():
            whole[name] = whole.get(name, 0) + size
    return whole


def _owners(events: Iterable[Any]) -> dict[int, tuple[str, str]]:
    """Return the layer's path and class, and the pass, of each event, by its `id`."""
    owners: dict[int, tuple[str, str]] = {}
    forward: dict[int, str] = {}
    backward: list[Any] = []
    for event in sorted(events, key=lambda event: event.time_range.start):
        node = _node_of(event)
        path = _range_of(event)
        if node is None:
            owners[id(event)] = path or REST, "forward"
            if event.sequence_nr >= 0:
                # The last operator with a number is the one that made the node of the graph.
                forward[event.sequence_nr] = path or REST
        else:
            backward.append((event, node, path))
    for event, node, path in backward:
        # A module that runs inside of the backward pass computes its activations again.
        owners[id(event)] = (path, "recomputed") if path else (forward.get(node, REST), "backward")
    return owners


def _ancestors(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


def _node_of(event: Any) -> int | None:
    """Return the sequence number of the node of the backward pass that an event belongs to."""
    for ancestor in _ancestors(event):
        if ancestor.name.startswith(_BACKWARD_NODE):
            return int(ancestor.sequence_nr)
    return None


def _range_of(event: Any) -> str:
    """Return path and class of the innermost module, or `optimizer`; empty outside of both."""
    for ancestor in _ancestors(event):
        if ancestor.name.startswith(PREFIX):
            return str(ancestor.name.removeprefix(PREFIX))
        if ancestor.name.startswith(_OPTIMIZER):
            return OPTIMIZER + SEPARATOR
        if ancestor.name.startswith(_BACKWARD_NODE):
            # Ranges around it are those of the thread that called `backward`.
            return ""
    return ""


def _fp8_functions() -> frozenset[str]:
    """Return the names in a trace of the autograd functions of FP8 libraries."""
    names: set[str] = set()
    pending: list[type] = [torch.autograd.Function]
    while pending:
        derived: list[type] = type.__subclasses__(pending.pop())
        for function in derived:
            pending.append(function)
            if function.__module__.startswith(FP8_LIBRARIES):
                names |= {function.__name__, f"{function.__name__}Backward"}
    return frozenset(names)


def _kind(event: Any, functions: frozenset[str]) -> str:
    kernels = " ".join(kernel.name for kernel in event.kernels)
    if _PRODUCT.search(event.name) or _PRODUCT_KERNEL.search(kernels):
        return "products"
    if _ATTENTION.search(event.name) or _ATTENTION.search(kernels):
        return "attention"
    is_fp8 = any(
        ancestor.name in functions or ancestor.name.startswith("fp8scope::") for ancestor in _ancestors(event)
    )
    return "casts" if is_fp8 else "other"
