"""Memory and GPU utilisation, looked at once a second by a thread of its own.

Asking the allocator or the driver takes as long as a small step takes: never on the training thread.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from fp8scope.guard import Guard
from fp8scope.process.threads import Worker

SAMPLE_SECONDS = 1.0

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Machine:
    """Samples while it runs; each sample is taken once, by the step that is recorded next."""

    def __init__(self, guard: Guard, device: "Callable[[], int | None]") -> None:
        """`device`: the index of the CUDA device that the model is on, None without one."""
        self._guard = guard
        self._device = device
        self._sample: dict[str, float] | None = None
        self._utilisation: Callable[[], float] | None = None
        self._asked_driver = False
        self._worker: Worker | None = None

    def start(self) -> None:
        """Begin to sample, if it has not begun."""
        if self._worker is None:
            self._worker = Worker("sampler", self.sample, self._guard)
            self._worker.start()

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker.join(time.monotonic() + SAMPLE_SECONDS)

    def take(self) -> dict[str, float]:
        """The latest sample, if no step has taken it yet."""
        sample, self._sample = self._sample, None
        return sample or {}

    def sample(self) -> float:
        """Look once; returns the seconds until it wants to look again."""
        found = {}
        if (resident := resident_bytes()) is not None:
            found["memory_rss"] = resident
        index = self._device()
        if index is not None:
            found |= device_memory(index)
            if not self._asked_driver:
                self._asked_driver = True
                with self._guard.shield("asking the GPU's driver"):
                    self._utilisation = utilisation_of(index)
            if self._utilisation is not None:
                found["gpu_utilization"] = self._utilisation()
        self._sample = found
        return SAMPLE_SECONDS


def resident_bytes() -> float | None:
    """The process's resident memory in bytes; None where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return float(int(file.read().split()[1]) * _PAGE)
    except (OSError, ValueError, IndexError):
        pass
    try:
        import resource
    except ImportError:
        return None
    # Not what is resident now but what was at most: in KiB, on macOS in bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def device_memory(index: int) -> dict[str, float]:
    """The CUDA allocator's bytes: allocated and reserved now, and the most that was allocated."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    stats: dict[str, Any] = torch.cuda.memory_stats(index)
    return {
        "memory_allocated": float(stats.get("allocated_bytes.all.current", 0)),
        "memory_reserved": float(stats.get("reserved_bytes.all.current", 0)),
        "memory_peak": float(stats.get("allocated_bytes.all.peak", 0)),
    }


def utilisation_of(index: int) -> Callable[[], float] | None:
    """Asks the driver for the share of time, 0 to 1, in which the GPU ran a kernel; None without an answer.

    `index` counts the devices that this process may see, which need not be the driver's numbers.
    """
    try:
        import pynvml
        import torch
    except ImportError:
        return None
    try:
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        pynvml.nvmlDeviceGetUtilizationRates(handle)
    except pynvml.NVMLError:
        # No driver, no permission, a slice of a GPU: it stays unknown.
        return None
    return lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
