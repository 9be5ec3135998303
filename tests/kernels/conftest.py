"""The compiled kernels as other processors than this one would have them."""

import ctypes
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fp8scope_kernels import backends, native, native_library


def has_avx2() -> bool:
    known = Path("/proc/cpuinfo")
    return known.exists() and " avx2 " in known.read_text()


WIDTHS = [
    pytest.param((), id="any processor's"),
    pytest.param(("-mavx2",), id="AVX2", marks=pytest.mark.skipif(not has_avx2(), reason="no AVX2 here")),
    pytest.param(("-march=native",), id="this one's"),
]


@cache
def library(vectors: tuple[str, ...]) -> ctypes.CDLL:
    flags = tuple(flag for flag in native_library.FLAGS if flag != "-march=native")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_library, "FLAGS", flags + vectors)
        return native_library._build()


@pytest.fixture(params=WIDTHS)
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels built for vectors of one width."""
    built = library(request.param)
    monkeypatch.setattr(native, "library", lambda: built)
    monkeypatch.setattr(backends, "_chosen", "compiled")
    monkeypatch.setattr(backends, "_failure", None)
    yield
