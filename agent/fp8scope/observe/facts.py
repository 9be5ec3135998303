"""Facts about a training that `fp8scope advise` asks for: products, loader, copies, attention.

The facts are a JSON document, the entry `training` of the run's environment. They are noted where the agent
measures anyway: in the forward passes whose operations are counted, in the loader and in copies to a device.
"""

import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

import fp8scope_kernels
from fp8scope_kernels import devices, fp8_layers

MAX_PRODUCTS = 32
MAX_COPIES = 256
MAX_REASONS = 8
MAX_REASON = 300
OWN: Final = (
    "fp8scope.",
    "fp8scope_kernels.",
    str(Path(fp8scope_kernels.__file__).parent),
    str(Path(__file__).parents[1]),
)
"""Graph breaks with one of these in their reason are the agent's own."""


class CountedPass(Protocol):
    """The counts of a forward pass: `observe.timing.flops.FlopCounter`."""

    flops: int
    operations: int
    products: dict[tuple[str, int, int], int]
    attention: dict[str, int]
    unfused: dict[str, int]
    convolutions: dict[tuple[str, int, int, bool], int]


class TrainingFacts:
    """Collects the facts of one run; called by the thread that trains."""

    def __init__(self) -> None:
        self.steps = 0
        self._products: list[dict[str, Any]] = []
        self._attention: dict[str, Any] = {}
        self._convolutions: dict[str, Any] = {}
        """Operations of all, and of those in 16 bits whose channels come first."""
        self._operations = 0
        self._handed_over: _LoaderSettings | None = None
        self._loaders: Counter[_LoaderSettings] = Counter()
        """The loaders whose batches training passes took, with how many they took."""
        self._copies: dict[int, _Copy] = {}
        self._copied_bytes = 0
        self._compiled = False
        self._models: list[weakref.ref[nn.Module]] = []

    def note_model(self, model: nn.Module) -> None:
        """A model is watched."""
        self._models.append(weakref.ref(model))
        self._compiled |= any(
            module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
            for module in model.modules()
        )

    def note_products(self, model: nn.Module, counter: CountedPass) -> None:
        """A training forward pass was counted."""
        if self._products or self._attention:
            return
        products: dict[tuple[str, int, int], int] = dict(counter.products)
        for (precision, inputs, outputs, _), flops in counter.convolutions.items():
            products[precision, inputs, outputs] = products.get((precision, inputs, outputs), 0) + flops
        paths: dict[tuple[int, int], str] = {}
        for path, module in model.named_modules():
            for names in ("in_features", "out_features"), ("in_channels", "out_channels"):
                sizes = getattr(module, names[0], None), getattr(module, names[1], None)
                if isinstance(sizes[0], int) and isinstance(sizes[1], int):
                    paths.setdefault((sizes[0], sizes[1]), path)
        in_fp8 = {(layer.in_features, layer.out_features) for _, layer in fp8_layers(model)}
        whole = sum(products.values())
        rows: list[dict[str, Any]] = [
            {
                "precision": "fp8" if (inputs, outputs) in in_fp8 else precision,
                "in": inputs,
                "out": outputs,
                "layer": paths.get((inputs, outputs), ""),
                "share": round(flops / whole, 5),
            }
            for (precision, inputs, outputs), flops in products.items()
        ]
        self._products = sorted(rows, key=lambda row: -row["share"])[:MAX_PRODUCTS]
        self._attention = {**counter.attention, "of": counter.flops, "unfused": counter.unfused}
        self._operations = counter.operations
        if counter.convolutions:
            first = [
                flops
                for (precision, *_, is_last), flops in counter.convolutions.items()
                if precision in ("bf16", "fp16") and not is_last
            ]
            self._convolutions = {
                "flops": sum(counter.convolutions.values()),
                "channels_first": sum(first),
                "benchmark": bool(torch.backends.cudnn.benchmark),
            }

    def note_loader(self, batches: Any) -> None:
        """A batch comes from this iterator of a `DataLoader`: of the training's, or of an evaluation's."""
        self._handed_over = _LoaderSettings(
            workers=int(getattr(batches, "_num_workers", 0)),
            pinned=bool(getattr(batches, "_pin_memory", False)),
            persistent=bool(getattr(batches, "_persistent_workers", False)),
        )

    def note_pass(self, *, is_training: bool) -> None:
        """A forward pass takes the batch that was handed over last."""
        loader, self._handed_over = self._handed_over, None
        if loader is not None and is_training:
            self._loaders[loader] += 1

    def note_copy(self, source: Tensor, copy: Tensor) -> None:
        """A tensor of the host was copied to a device."""
        self._copied_bytes += copy.nbytes
        before = self._copies.get(id(source))
        if before is not None and before.is_of(source):
            before.times += 1
        elif len(self._copies) < MAX_COPIES:
            self._copies[id(source)] = _Copy(source, copy.nbytes)
        else:
            self._copies = {key: entry for key, entry in self._copies.items() if entry.times > 1}

    def document(self, device: "torch.device | None") -> dict[str, Any]:
        """Return the facts so far. `device`: the one that the model is on."""
        kind = device.type if device is not None else ""
        facts: dict[str, Any] = {
            "device": kind,
            "cpus": _cpus(),
            "steps": self.steps,
            "compiled": self._compiled or _compiles(),
        }
        if self._attention:
            facts["products"], facts["attention"] = self._products, self._attention
            facts["operations"] = self._operations
        if self._convolutions:
            facts["convolutions"] = self._convolutions
        if self._loaders:
            ((loader, _),) = self._loaders.most_common(1)
            facts["loader"] = asdict(loader)
        if self._copied_bytes:
            repeated = [entry for entry in self._copies.values() if entry.times > 1]
            facts["copies"] = {
                "bytes": self._copied_bytes,
                "repeated": [
                    {"times": entry.times, "bytes": entry.nbytes, "shape": entry.shape} for entry in repeated
                ][:MAX_REASONS],
            }
        if units := _fp8_units(model for ref in self._models if (model := ref()) is not None):
            facts["fp8_units"] = units
        if breaks := _graph_breaks():
            facts["graph_breaks"] = breaks
        if device is not None and kind not in ("", "cpu", "meta"):
            facts["memory"] = _memory(device)
            facts["devices"] = len(devices.accelerators())
        return facts


@dataclass(frozen=True, kw_only=True)
class _LoaderSettings:
    """The settings of a `DataLoader`."""

    workers: int
    pinned: bool
    persistent: bool


class _Copy:
    """A tensor that was copied, by its identity: an equal address may be another batch."""

    __slots__ = ("_source", "_version", "nbytes", "shape", "times")

    def __init__(self, source: Tensor, nbytes: int) -> None:
        self._source, self._version = weakref.ref(source), source._version
        self.nbytes, self.shape, self.times = nbytes, list(source.shape), 1

    def is_of(self, source: Tensor) -> bool:
        return self._source() is source and self._version == source._version


def _fp8_units(models: Iterable[nn.Module]) -> dict[str, Any]:
    """The products of FP8 layers, those that ran on FP8 units, and layers with others; empty without any."""
    layers = {layer: name for model in models for name, layer in fp8_layers(model)}
    ran = [on_unit for layer in layers for on_unit in layer.on_units.values()]
    others = [name for layer, name in layers.items() if not all(layer.on_units.values())]
    if not ran:
        return {}
    return {"products": len(ran), "on_units": sum(ran), "other_layers": others[:MAX_REASONS]}


def _cpus() -> int:
    """Return the number of CPUs that this process may use: a launcher can bind it to some."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _memory(device: torch.device) -> dict[str, float]:
    stats = devices.memory_stats(device)
    names = {
        "allocated_peak": "allocated_bytes.all.peak",
        "reserved_peak": "reserved_bytes.all.peak",
        "inactive": "inactive_split_bytes.all.current",
        "reserved": "reserved_bytes.all.current",
        "retries": "num_alloc_retries",
    }
    memory = {name: float(stats[key]) for name, key in names.items() if key in stats}
    properties = getattr(devices.module_of(device), "get_device_properties", None)
    total = getattr(properties(device), "total_memory", 0) if properties is not None else 0
    return memory | ({"total": float(total)} if total else {})


def _counters() -> Any:
    # Importing the compiler takes seconds, and it has counted nothing unless the script has loaded it.
    module: Any = sys.modules.get("torch._dynamo.utils")
    return None if module is None else module.counters


def _compiles() -> bool:
    counters = _counters()
    return counters is not None and counters["stats"].get("unique_graphs", 0) > 0


def _graph_breaks() -> dict[str, int]:
    """Return how often a compiled graph broke in this process, by reason; without our own breaks.

    `fp8scope run` begins after the first step, which has compiled the graph, so earlier breaks count.
    """
    counters = _counters()
    breaks: dict[str, int] = {}
    # A break in a loop gives up the whole function, and stands in the second table only.
    for table in () if counters is None else (counters["graph_break"], counters["unimplemented"]):
        for text, count in table.items():
            reason = break_reason(str(text))
            if reason:
                breaks[reason] = max(breaks.get(reason, 0), count)
    return dict(sorted(breaks.items(), key=lambda item: -item[1])[:MAX_REASONS])


def break_reason(text: str) -> str:
    """Return the reason in torch's text on a graph break, in one line; empty if the agent is the reason."""
    # The traceback has our command, too; and lines after the first ones name the code.
    head = text.partition("User code traceback")[0]
    if any(word in head for word in OWN):
        return ""
    return head.partition("\n  Explanation:")[0].strip().rpartition("\n")[2][:MAX_REASON]
