"""Readings of an NVIDIA GPU by its driver, and of any device from a file that a cluster writes.

| scalar                   | is                                                                          |
|--------------------------|-----------------------------------------------------------------------------|
| `gpu_utilization`        | share of time in which the GPU ran something, 0 to 1                        |
| `gpu_memory_used`        | bytes in use on the GPU, by all processes                                   |
| `gpu_power_watts`        | power draw                                                                  |
| `gpu_temperature`        | degrees Celsius                                                             |
| `gpu_sm_clock_mhz`, `gpu_memory_clock_mhz` | clocks                                                    |
| `gpu_ecc_corrected`, `gpu_ecc_uncorrected` | memory errors since the driver was loaded                 |
| `gpu_xid`                | the number of the last Xid error since the run began; absent without one    |

A reading that the driver refuses once, e.g. ECC of a GPU without it, is not asked for again.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

Reading = Callable[[], float | None]
DEVICE_SCALARS: Final = (
    "gpu_utilization", "gpu_memory_used", "gpu_power_watts", "gpu_temperature", "gpu_sm_clock_mhz",
    "gpu_memory_clock_mhz", "gpu_ecc_corrected", "gpu_ecc_uncorrected", "gpu_xid",
)  # fmt: skip
MAX_FILE_BYTES: Final = 1 << 18
MAX_FILE_AGE: Final = 60.0
"""Seconds after which a file that nobody writes says nothing of now."""


class GpuDriver:
    """The readings of one GPU."""

    def __init__(self, readings: Mapping[str, Reading], errors: type[Exception]) -> None:
        self._readings = dict(readings)
        self._errors = errors

    def sample(self) -> dict[str, float]:
        """Return the values that the driver has now."""
        sample = {}
        for name, read in tuple(self._readings.items()):
            try:
                value = read()
            except self._errors:
                del self._readings[name]
                continue
            if value is not None:
                sample[name] = value
        return sample


def driver_of(device: "torch.device") -> GpuDriver | None:
    """Return the driver of a GPU; None where it cannot be asked: only NVIDIA's is.

    The device's index counts those that this process may see, which need not be the driver's numbers.
    """
    from fp8scope_kernels import devices

    if not devices.is_nvidia(device):
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        uuid = uuid_of(device)
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        # No driver, no permission, or a MIG slice.
        return None
    return GpuDriver(_readings(pynvml, handle), pynvml.NVMLError)


def uuid_of(device: "torch.device") -> str:
    """Return the GPU's UUID as the driver writes it."""
    from fp8scope_kernels import devices

    uuid = str(devices.module_of(device).get_device_properties(device).uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


def _readings(nvml: Any, handle: Any) -> dict[str, Reading]:
    def ecc(kind: str) -> Reading:
        return lambda: float(
            nvml.nvmlDeviceGetTotalEccErrors(handle, getattr(nvml, kind), nvml.NVML_VOLATILE_ECC)
        )

    readings: dict[str, Reading] = {
        "gpu_utilization": lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100,
        "gpu_memory_used": lambda: float(nvml.nvmlDeviceGetMemoryInfo(handle).used),
        "gpu_power_watts": lambda: float(nvml.nvmlDeviceGetPowerUsage(handle)) / 1000,
        "gpu_temperature": lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        "gpu_sm_clock_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "gpu_memory_clock_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        "gpu_ecc_corrected": ecc("NVML_MEMORY_ERROR_TYPE_CORRECTED"),
        "gpu_ecc_uncorrected": ecc("NVML_MEMORY_ERROR_TYPE_UNCORRECTED"),
    }
    try:
        events = nvml.nvmlEventSetCreate()
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
    except nvml.NVMLError:
        return readings
    last: list[float] = []

    def xid() -> float | None:
        with suppress(nvml.NVMLError_Timeout):
            # Milliseconds to wait: none.
            last[:] = [float(nvml.nvmlEventSetWait_v2(events, 0).eventData)]
        return last[0] if last else None

    return readings | {"gpu_xid": xid}


def file_sample(path: Path, uuid: str, index: int) -> dict[str, float]:
    """Return what a file says of a device; empty without it, or if nobody has written it for a minute.

    The file is a JSON object whose `devices` are objects with the scalars above, and a `uuid` or an `index`
    each. Numbers that are not finite or negative, and other names, are left out. Raises ValueError if it is
    no such file, or too large.
    """
    try:
        if time.time() - path.stat().st_mtime > MAX_FILE_AGE:
            return {}
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError:
        return {}
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes.")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON.") from None
    devices = document.get("devices") if isinstance(document, dict) else None
    if not isinstance(devices, list):
        raise ValueError(f"{path} has no list of devices.")
    entries = [entry for entry in devices if isinstance(entry, dict)]
    mine = next((entry for entry in entries if uuid and entry.get("uuid") == uuid), None)
    if mine is None:
        mine = next((entry for entry in entries if "uuid" not in entry and entry.get("index") == index), {})
    return {name: float(mine[name]) for name in DEVICE_SCALARS if _is_valid(mine.get(name))}


def _is_valid(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18
        and math.isfinite(value)
    )  # fmt: skip
