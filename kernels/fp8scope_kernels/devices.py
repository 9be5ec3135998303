"""Devices: their FP8 formats and units by one table, and what differs between accelerators.

Nothing else in the agent and the kernels names a kind of accelerator. The functions use the device's own
module (`torch.cuda`, `torch.xpu`, `torch.musa`, or that of another backend), and do without what it lacks.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fp8scope_kernels.formats import Encoding


class Event(Protocol):
    """A point in a device's stream, as `torch.cuda.Event` and the events of other device modules are."""

    def record(self, stream: Any = None) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


Granularity = Literal["tensor", "row", "1x128", "1x32"]
"""The scales of an operand that FP8 units apply: one; one for each row; blocks of 128, also square ones; or
powers of two for blocks of 32, as MX has them."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The FP8 formats and units of a device.

    `encoding`: the pair of formats that its units or its libraries take. `units`: the scales with which torch
    multiplies on its FP8 matrix units; empty if it has none.
    """

    encoding: Encoding
    units: frozenset[Granularity] = frozenset()


OCP = Capabilities(encoding="ocp")
OCP_UNITS = Capabilities(encoding="ocp", units=frozenset(("tensor", "row")))
FNUZ_UNITS = Capabilities(encoding="fnuz", units=frozenset(("tensor", "row")))
HOPPER = Capabilities(encoding="ocp", units=frozenset(("tensor", "row", "1x128")))
BLACKWELL = Capabilities(encoding="ocp", units=frozenset(("tensor", "row", "1x32")))

CAPABILITIES: tuple[tuple[str, str, Capabilities], ...] = (
    # AMD: CDNA 3 (MI300) has formats of its own; CDNA 4 (MI350) and RDNA 4 have those of the OCP.
    ("rocm", r"gfx94[0-2]", FNUZ_UNITS),
    ("rocm", r"gfx950|gfx120[01]", OCP_UNITS),
    ("rocm", "", OCP),
    # NVIDIA: from compute capability 8.9 (Ada) on.
    ("cuda", r"sm_90", HOPPER),
    ("cuda", r"sm_10\d", BLACKWELL),
    ("cuda", r"sm_(89|9\d|1\d\d)", OCP_UNITS),
    ("cuda", "", OCP),
    # No unit is used: products take BF16 operands, which hold every FP8 value.
    ("xpu", "", OCP),
    ("musa", "", OCP),
    ("cpu", "", OCP),
)
"""Platform, pattern of the whole architecture (empty for any), capabilities. The first match is used, and
`OCP` for other platforms. A platform is the type of torch's device, or `rocm` for AMD's, which torch calls
`cuda`."""

TRITON_DEVICES = frozenset(("cuda",))
"""Types of torch's devices, AMD's included, on which `auto` quantises by the Triton kernels."""


@cache
def capabilities_of(device: torch.device) -> Capabilities:
    """The capabilities of a device; of the meta device, those of a CPU."""
    return look_up(platform_of(device), architecture_of(device))


def look_up(platform: str, architecture: str) -> Capabilities:
    """The first row of CAPABILITIES for this platform and architecture."""
    for of_platform, pattern, capabilities in CAPABILITIES:
        if of_platform == platform and (not pattern or re.fullmatch(pattern, architecture)):
            return capabilities
    return OCP


def platform_of(device: torch.device) -> str:
    """`rocm` for AMD's devices, which torch calls `cuda`; else the device's type."""
    return "rocm" if device.type == "cuda" and torch.version.hip is not None else device.type


def is_nvidia(device: torch.device) -> bool:
    """Return whether NVIDIA's driver knows the device."""
    return platform_of(device) == "cuda"


def architecture_of(device: torch.device) -> str:
    """The architecture as its vendor writes it (`gfx942`, `sm_90`); empty where torch does not say."""
    module = module_of(device)
    if platform_of(device) == "rocm":
        # As in gfx90a:sramecc+:xnack-
        return str(module.get_device_properties(device).gcnArchName).partition(":")[0]
    if device.type not in ("cuda", "musa"):
        return ""
    major, minor = module.get_device_capability(device)
    return f"{'sm' if device.type == 'cuda' else 'mp'}_{major}{minor}"


def is_accelerator(device: torch.device) -> bool:
    """Return whether work on the device runs beside the host, and its memory is not the host's."""
    return device.type not in ("cpu", "meta")


def module_of(device: torch.device) -> Any:
    """torch's module of a kind of device, such as `torch.cuda`; None where it has none."""
    return _module(device.type)


@cache
def _module(kind: str) -> Any:
    try:
        return torch.get_device_module(kind)
    except RuntimeError:
        return None


def _function(device: torch.device, *names: str) -> Callable[..., Any] | None:
    """The first of these functions that the device's module has."""
    module = module_of(device)
    return next((function for name in names if callable(function := getattr(module, name, None))), None)


def accelerators() -> list[torch.device]:
    """All devices of the accelerator that this torch is built for, or that is registered with it."""
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if current is None:
        return []
    return [torch.device(current.type, index) for index in range(torch.accelerator.device_count())]


def is_initialized() -> bool:
    """Return whether this process has begun to use an accelerator: a fork of it cannot use one."""
    # Not `is_available`, which for some backends begins to use the device.
    current = torch.accelerator.current_accelerator()
    if current is None:
        return False
    function = _function(current, "is_initialized")
    return function is None or bool(function())


def name_of(device: torch.device) -> str:
    """The name that the vendor gave the device, or its type where torch does not say."""
    function = _function(device, "get_device_name")
    return str(function(device)) if function is not None else device.type


def is_capturing(device: torch.device) -> bool:
    """Return whether the device's current stream is being captured into a graph."""
    if not is_accelerator(device):
        return False
    function = _function(device, "is_current_stream_capturing")
    return function is not None and bool(function())


def has_events(device: torch.device) -> bool:
    """Return whether times on the device can be measured by events in its streams."""
    return is_accelerator(device) and _function(device, "Event") is not None


def new_event(device: torch.device, *, timing: bool) -> Event | None:
    """An event of the device that a thread can wait for without spinning; None where it has no events."""
    make = _function(device, "Event")
    if make is None:
        return None
    try:
        event: Event = make(enable_timing=timing, blocking=True)
    except TypeError:
        event = make(enable_timing=timing)
    return event


def record(event: Event, device: torch.device) -> None:
    """Record the event in the device's current stream."""
    current = _function(device, "current_stream")
    event.record(current(device)) if current is not None else event.record()


def has_finished(device: torch.device) -> bool | None:
    """Return whether the device has finished all work of its current stream; None if it does not say."""
    current = _function(device, "current_stream")
    query = getattr(current(device), "query", None) if current is not None else None
    return bool(query()) if callable(query) else None


def activated(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which this device is the current one of its kind."""
    context = _function(device, "device") if is_accelerator(device) else None
    return context(device) if context is not None else nullcontext()


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`, without waiting for the device where its host memory can be pinned."""
    if values.device == device:
        return values
    can_be_pinned = values.is_cpu and can_pin(device)
    return (values.pin_memory() if can_be_pinned else values).to(device, non_blocking=True)


def can_pin(device: torch.device) -> bool:
    """Return whether copies between this device and pinned host memory run beside the host."""
    return is_accelerator(device) and _can_pin(device.type)


@cache
def _can_pin(kind: str) -> bool:
    current = torch.accelerator.current_accelerator()
    if current is None or current.type != kind:
        return False
    try:
        return bool(torch.empty(1, device="cpu", pin_memory=True).is_pinned())
    except (RuntimeError, NotImplementedError):
        return False


def memory_stats(device: torch.device) -> Mapping[str, Any]:
    """The counters of the device's allocator, named as in `torch.cuda.memory_stats`; empty without one."""
    initialized, stats = _function(device, "is_initialized"), _function(device, "memory_stats")
    if stats is None or (initialized is not None and not initialized()):
        return {}
    counters: Mapping[str, Any] = stats(device)
    return counters


def random_state(device: torch.device) -> Tensor | None:
    """The state of the device's random number generator; None where it has none that can be read."""
    function = _function(device, "get_rng_state")
    state: Tensor | None = None if function is None else function(device)
    return state


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Restore what `random_state` returned."""
    function = _function(device, "set_rng_state")
    if function is None:
        raise RuntimeError(f"The random state of {device} cannot be set.")
    function(state, device)
