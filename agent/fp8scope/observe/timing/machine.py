"""Memory and what the GPU's driver says, sampled once a second by a background thread.

Asking the allocator or the driver takes as long as a small step takes: never on the training thread.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fp8scope.guard import Guard
from fp8scope.metadata.launchers import ranks
from fp8scope.observe.timing.driver import GpuDriver, driver_of, file_sample, uuid_of
from fp8scope.process.threads import Worker

if TYPE_CHECKING:
    import torch

SAMPLE_SECONDS = 1.0

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Machine:
    """Samples in the background. Each sample belongs to the step that is recorded next."""

    def __init__(
        self,
        guard: Guard,
        device: "Callable[[], torch.device | None]",
        device_file: Path | None = None,
    ) -> None:
        """`device`: the accelerator that the model is on, or None. `device_file`: for `file_sample`."""
        self._guard = guard
        self._device = device
        self._sample: dict[str, float] | None = None
        self._device_file = device_file
        self._driver: GpuDriver | None = None
        self._asked_driver = False
        self._worker: Worker | None = None

    def start(self) -> None:
        """Start the thread, if it is not running."""
        if self._worker is None:
            self._worker = Worker("sampler", self.sample, self._guard)
            self._worker.start()

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker.join(time.monotonic() + SAMPLE_SECONDS)

    def take(self) -> dict[str, float]:
        """Return the latest sample, if no step has taken it yet."""
        sample, self._sample = self._sample, None
        return sample or {}

    def sample(self) -> float:
        """Take a sample; returns the seconds until the next one."""
        sample = {}
        if (resident := resident_bytes()) is not None:
            sample["memory_rss"] = resident
        if (anonymous := anonymous_bytes()) is not None:
            sample["memory_anonymous"] = anonymous
        device = self._device()
        if device is not None:
            sample |= device_memory(device)
            if not self._asked_driver:
                self._asked_driver = True
                with self._guard.shield("asking the GPU's driver"):
                    self._driver = driver_of(device)
            if self._driver is not None:
                sample |= self._driver.sample()
        if self._device_file is not None:
            try:
                sample |= file_sample(self._device_file, *_identity(device))
            except ValueError as error:
                self._guard.warn_once("device file", "%s", error)
        self._sample = sample
        return SAMPLE_SECONDS


def resident_bytes() -> float | None:
    """Return the resident memory of this process in bytes, or None if it is unknown."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return float(int(file.read().split()[1]) * _PAGE)
    except (OSError, ValueError, IndexError):
        pass
    try:
        import resource
    except ImportError:
        return None
    # This is the peak, not the current value: in KiB, on macOS in bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def anonymous_bytes() -> float | None:
    """Return the resident memory in bytes that belongs to no file, or None where the system does not say.

    Pages of mapped files count as resident while the system keeps them cached: a data set that is read
    through `mmap` makes the resident memory grow, and is no leak.
    """
    try:
        with open("/proc/self/status", "rb") as file:
            for line in file:
                if line.startswith(b"RssAnon:"):
                    return float(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    return None


def device_memory(device: "torch.device") -> dict[str, float]:
    """Return the bytes of the device's allocator: allocated, reserved, and the peak of allocated."""
    from fp8scope_kernels import devices

    stats = devices.memory_stats(device)
    if not stats:
        return {}
    return {
        "memory_allocated": float(stats.get("allocated_bytes.all.current", 0)),
        "memory_reserved": float(stats.get("reserved_bytes.all.current", 0)),
        "memory_peak": float(stats.get("allocated_bytes.all.peak", 0)),
    }


def _identity(device: "torch.device | None") -> tuple[str, int]:
    """Return the UUID and the index of the device; without one, the index of the process on its host."""
    if device is None:
        rank = ranks(os.environ).get("local_rank", "")
        return "", int(rank) if rank.isdecimal() else 0
    from fp8scope_kernels import devices

    return uuid_of(device) if devices.is_nvidia(device) else "", device.index or 0
