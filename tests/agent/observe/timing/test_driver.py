"""What a GPU's driver says, and what a cluster writes into a file."""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8scope.guard import Guard
from fp8scope.observe.timing.driver import DEVICE_SCALARS, MAX_FILE_BYTES, driver_of, file_sample
from fp8scope.observe.timing.machine import Machine


class NvmlError(Exception):
    """As NVML's, of which the others are subclasses."""


class NvmlTimeout(NvmlError):
    """No event is waiting."""


class Nvml(SimpleNamespace):
    """A driver with the functions of nvidia-ml-py; `xids` are the errors that wait."""

    NVMLError, NVMLError_Timeout = NvmlError, NvmlTimeout
    NVML_VOLATILE_ECC, NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 0, 1
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM, nvmlEventTypeXidCriticalError = 0, 1, 2, 8
    has_ecc = True

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.xids: list[int] = []

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=40)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=123)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 412_500

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        return 61

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return {self.NVML_CLOCK_SM: 1755, self.NVML_CLOCK_MEM: 2619}[kind]

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        self.asked.append(handle)
        if not self.has_ecc:
            raise NvmlError
        return 5 if kind == self.NVML_MEMORY_ERROR_TYPE_CORRECTED else 0

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: str) -> None:
        assert kinds == self.nvmlEventTypeXidCriticalError

    def nvmlEventSetWait_v2(self, events: str, milliseconds: int) -> Any:
        assert milliseconds == 0
        if not self.xids:
            raise NvmlTimeout
        return SimpleNamespace(eventData=self.xids.pop(0))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    driver = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="ab-12"))
    return driver


def written(path: Path, *devices: object) -> Path:
    path.write_text(json.dumps({"devices": devices}))
    return path


def test_it_works(nvml: Nvml) -> None:
    driver = driver_of(torch.device("cuda", 1))
    assert driver is not None
    sample = {
        "gpu_utilization": 0.4,
        "gpu_memory_used": 123.0,
        "gpu_power_watts": 412.5,
        "gpu_temperature": 61.0,
        "gpu_sm_clock_mhz": 1755.0,
        "gpu_memory_clock_mhz": 2619.0,
        "gpu_ecc_corrected": 5.0,
        "gpu_ecc_uncorrected": 0.0,
    }
    assert driver.sample() == sample and nvml.asked == ["GPU-ab-12"] * 2
    # An error stays after the event was taken.
    nvml.xids.append(79)
    assert driver.sample() == driver.sample() == {**sample, "gpu_xid": 79.0}
    assert set(DEVICE_SCALARS) == {*sample, "gpu_xid"}


def test_what_the_driver_refuses_is_asked_once(nvml: Nvml) -> None:
    nvml.has_ecc = False
    driver = driver_of(torch.device("cuda", 1))
    assert driver is not None
    for _ in range(3):
        assert "gpu_ecc_corrected" not in driver.sample()
    assert len(nvml.asked) == 2


def test_nothing_is_known_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert driver_of(torch.device("cuda", 0)) is None


def test_a_cluster_writes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(
        tmp_path / "devices.json",
        {"uuid": "GPU-1", "index": 0, "gpu_power_watts": 300},
        {"index": 2, "gpu_power_watts": 410.5, "gpu_xid": 79, "password": "x", "gpu_temperature": -1},
        "nonsense",
    )
    assert file_sample(path, "GPU-1", 7) == {"gpu_power_watts": 300.0}
    assert file_sample(path, "", 2) == {"gpu_power_watts": 410.5, "gpu_xid": 79.0}
    # An entry with a UUID is of that device only.
    assert file_sample(path, "GPU-9", 0) == file_sample(tmp_path / "none", "", 0) == {}
    monkeypatch.setenv("LOCAL_RANK", "2")
    machine = Machine(Guard(), lambda: None, path)
    machine.sample()
    assert machine.take()["gpu_power_watts"] == 410.5
    hours_ago = time.time() - 3600
    os.utime(path, (hours_ago, hours_ago))
    machine.sample()
    assert "gpu_power_watts" not in machine.take()


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"devices": 1}', "[" * 100_000, "x" * (MAX_FILE_BYTES + 1)],
    ids=lambda text: text[:5],
)
def test_a_file_that_is_none_warns_once(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "devices.json"
    path.write_text(text)
    machine = Machine(Guard(), lambda: None, path)
    for _ in range(3):
        machine.sample()
    assert machine.take()["memory_rss"] > 0
    assert caplog.text.count(str(path)) == 1


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1", "true", '"1"', "null", "1e999"])
def test_values_that_are_no_measurement_are_left_out(value: str, tmp_path: Path) -> None:
    path = tmp_path / "devices.json"
    text = '{"devices": [{"index": 0, "gpu_temperature": 50, "gpu_power_watts": VALUE}]}'
    path.write_text(text.replace("VALUE", value))
    assert file_sample(path, "", 0) == {"gpu_temperature": 50.0}
