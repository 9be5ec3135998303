"""A pytest plugin that makes an emulated accelerator torch's default device.

`build` compiles the backend, which LIBRARY names to the process that loads it. A process that has loaded it
has an accelerator for the rest of its life, so the tests that use it run in a process of their own. What the
agent or the kernels take from `torch.cuda` there is noted, and fails the test.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

LIBRARY = "EMULATED_ACCELERATOR"
"""The environment variable with the path of the compiled backend."""
NAME = "emulated"
SOURCE = Path(__file__).parents[1] / "accelerator" / "accelerator.cpp"
OWN = (f"{os.sep}fp8scope{os.sep}", f"{os.sep}fp8scope_kernels{os.sep}")
EVENT_SECONDS = 0.002
ALLOCATED = {("allocated", "current"): 10, ("reserved", "current"): 20, ("allocated", "peak"): 15}

taken_from_cuda: list[str] = []


def build(path: Path) -> None:
    """Compile the backend into a library at `path`."""
    root = Path(torch.__file__).parent
    include, lib = root / "include", root / "lib"
    subprocess.run(
        [
            *(os.environ.get("CXX", "g++"), "-O0", "-std=c++20", "-shared", "-fPIC"),
            *(f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", str(SOURCE), "-o", str(path)),
            *(f"-L{lib}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{lib}"),
        ],
        check=True,
    )


class Stream(str):
    """The stream. Its work is done a while after an event was recorded in it."""

    last = float("-inf")

    def query(self) -> bool:
        return time.perf_counter() >= Stream.last + EVENT_SECONDS


class Event:
    """An event that has completed a while after it was recorded, as on a device that is behind the host."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.has_timing = enable_timing
        self.at = float("inf")

    def record(self, stream: Any = None) -> None:
        assert stream == "the stream"
        self.at = Stream.last = time.perf_counter()

    def query(self) -> bool:
        return time.perf_counter() >= self.at + EVENT_SECONDS

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(EVENT_SECONDS / 4)

    def elapsed_time(self, end_event: "Event") -> float:
        assert self.has_timing and end_event.has_timing and self.query() and end_event.query()
        return 1000 * (end_event.at - self.at)


class Module(ModuleType):
    """torch.emulated: what torch asks of a backend's module, and what torch.cuda and its siblings offer."""

    Event = Event
    random_state = torch.zeros(4, dtype=torch.uint8)

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        self.random_state.fill_(seed % 256)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self.random_state.clone()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self.random_state.copy_(state)

    def device(self, device: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def current_stream(self, device: Any = None) -> str:
        return Stream("the stream")

    def get_device_name(self, device: Any = None) -> str:
        return "Emulated Accelerator"

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {f"{kind}_bytes.all.{when}": size for (kind, when), size in ALLOCATED.items()}

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


class Watched(ModuleType):
    """torch.cuda, which notes what the agent and the kernels take from it. torch itself may ask it."""

    def __getattribute__(self, name: str) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        if any(part in caller for part in OWN) and not caller.endswith("devices.py"):
            taken_from_cuda.append(f"torch.cuda.{name} in {caller}")
        return super().__getattribute__(name)


def load(path: str) -> None:
    """Register the backend with torch."""
    with torch.device("cpu"):
        Module.random_state = torch.zeros(4, dtype=torch.uint8)
    rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, Module(NAME))  # type: ignore[no-untyped-call]
    torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    generate_methods_for_privateuse1_backend()
    torch.cuda.__class__ = Watched


if LIBRARY in os.environ:
    load(os.environ[LIBRARY])

    @pytest.fixture(autouse=True)
    def on_accelerator() -> Iterator[None]:
        """Each tensor that a test makes is on the accelerator, unless it says where."""
        taken_from_cuda.clear()
        torch.set_default_device(NAME)
        yield
        torch.set_default_device("cpu")
        assert taken_from_cuda == []
