"""The compiled kernels as other processors than this one would have them."""

import ctypes
from collections.abc import Iterator
from functools import cache

import pytest

from fp8scope_kernels import backends
from fp8scope_kernels.cpu import backend as cpu_backend
from fp8scope_kernels.cpu import levels as cpu_levels
from fp8scope_kernels.cpu import library as cpu_library


@cache
def library(level: str) -> ctypes.CDLL:
    return cpu_library.load(level)


@pytest.fixture
def automatic_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend that is chosen by default; what the test chooses or breaks ends with it."""
    monkeypatch.setattr(backends, "_cpu_failure", None)
    monkeypatch.setattr(backends, "_chosen", "auto")


@pytest.fixture(params=[level.name for level in cpu_levels.levels()])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels of each level, and so with vectors of each width, that this processor can run."""
    if request.param not in [level.name for level in cpu_library.available_levels()]:
        pytest.skip(f"this processor cannot run {request.param}")
    loaded = library(request.param)
    monkeypatch.setattr(cpu_backend, "library", lambda: loaded)
    monkeypatch.setattr(backends, "_chosen", "compiled")
    monkeypatch.setattr(backends, "_cpu_failure", None)
    yield
