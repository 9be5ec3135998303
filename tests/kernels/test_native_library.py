"""Building the compiled backend: when it pays, with which compiler, and what happens where that fails."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8scope_kernels import E4M3, backends, get_backend, native_library, quantize, set_backend

needs_compiler = pytest.mark.skipif(not backends.has_compiler(), reason="needs a C++ compiler on the PATH")


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_failure", None)
    monkeypatch.setattr(backends, "_chosen", "auto")
    monkeypatch.setattr(native_library, "_library", None)


def cast() -> Tensor:
    return quantize(torch.linspace(-3, 3, 8192), torch.tensor(100.0), E4M3).data.float()


def reference() -> Tensor:
    set_backend("reference")
    return cast()


@needs_compiler
def test_it_works() -> None:
    expected = reference()
    set_backend("compiled")
    assert not native_library.is_loaded()
    assert torch.equal(cast(), expected)
    assert native_library.is_loaded()
    assert native_library.library() is native_library.library()
    assert get_backend() == "compiled"


def test_auto_builds_for_what_is_large_and_only_with_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = torch.empty(backends.AUTO_ELEMENTS), torch.empty(backends.AUTO_ELEMENTS - 1)
    built: list[bool] = []
    monkeypatch.setattr(native_library, "is_built", lambda: bool(built))
    monkeypatch.setattr(native_library, "library", lambda: built.append(True))
    monkeypatch.setattr(native_library, "compiler", lambda: None)
    assert not backends.use_compiled(large)
    monkeypatch.setattr(native_library, "compiler", lambda: "/usr/bin/c++")
    assert not backends.use_compiled(small)
    assert not built
    assert backends.use_compiled(large)
    assert built == [True]
    assert backends.use_compiled(small), "what is there is used for everything"
    assert not backends.use_compiled(torch.empty(backends.AUTO_ELEMENTS, device="meta"))
    set_backend("reference")
    assert not backends.use_compiled(large)


def assert_told_once_and_goes_on(message: str) -> None:
    """One warning over several casts, which the definition computes from then on."""
    expected = reference()
    set_backend("compiled")
    with pytest.warns(RuntimeWarning, match=rf"eager torch, with the same results.*{message}") as caught:
        for _ in range(3):
            assert torch.equal(cast(), expected)
    assert len(caught) == 1
    assert get_backend() == "reference"
    assert not native_library.is_loaded()


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "compiler", lambda: sys.executable)
    assert_told_once_and_goes_on(r"RuntimeError: .*python.* failed")
    assert (backends.failure() or "").startswith("RuntimeError")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "compiler", lambda: None)
    assert_told_once_and_goes_on(
        r"no C\+\+ compiler was found; install g\+\+ or clang\+\+, or let CXX name one"
    )


def test_a_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As from a temporary folder that is mounted such that nothing in it can be run."""
    compiler = tmp_path / "cxx"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho nothing > "$2"\n')
    compiler.chmod(0o700)
    monkeypatch.setattr(native_library, "compiler", lambda: str(compiler))
    assert_told_once_and_goes_on(r"native\.so: .*; let TMPDIR name a folder")


@needs_compiler
def test_no_temporary_folder_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", os.devnull)
    assert_told_once_and_goes_on("NotADirectoryError")


@needs_compiler
def test_a_compiler_without_openmp_will_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrapper = tmp_path / "cxx"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *-fopenmp*) exit 1;; esac\nexec {native_library.compiler()} -w -O0 "$@"\n'
    )
    wrapper.chmod(0o700)
    expected = reference()
    monkeypatch.setattr(native_library, "compiler", lambda: str(wrapper))
    set_backend("compiled")
    assert torch.equal(cast(), expected)
    assert native_library.is_loaded()


@needs_compiler
def test_the_source_has_no_warnings(tmp_path: Path) -> None:
    compiler = native_library.compiler()
    assert compiler is not None
    done = subprocess.run(
        [compiler, "-std=c++20", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-O1"]
        + ["-fsyntax-only", str(native_library.SOURCE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr == ""


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"auto, reference, compiled, triton, got 'cuda'"):
        set_backend("cuda")  # type: ignore[arg-type]


# --- in a process of its own ----------------------------------------------------------------------------

PROBE = """
import json, sys, warnings
import torch
from fp8scope_kernels import E4M3, backends, get_backend, native_library, quantize, set_backend

def cast():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = quantize(torch.linspace(-3, 3, 2 * backends.AUTO_ELEMENTS), torch.tensor(100.0), E4M3).data
    told = [str(w.message) for w in caught]
    return {"sum": data.float().abs().sum().item(), "told": told, "built": native_library.is_loaded()}

found = {}
for name in sys.argv[1:]:
    set_backend(name)
    found[name] = [cast(), cast()]
print(json.dumps({**found, "failure": backends.failure(), "left": get_backend()}))
"""


def probe(*choices: str, **environment: str) -> dict[str, Any]:
    """What each of the chosen backends does in a process with this environment, two casts each."""
    inherited = {name: value for name, value in os.environ.items() if name != "CXX"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *choices],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_machine_without_a_compiler(tmp_path: Path) -> None:
    """`auto` stays with eager torch and says nothing; `compiled` says so once, with the same results."""
    found = probe("reference", "auto", "compiled", PATH=str(tmp_path), CXX=str(tmp_path / "g++"))
    expected = found["reference"][0]["sum"]
    assert expected > 0
    assert found["auto"] == [{"sum": expected, "told": [], "built": False}] * 2
    first, second = found["compiled"]
    assert (first["sum"], second["sum"]) == (expected, expected)
    assert not first["built"]
    (message,) = first["told"]
    assert "install g++ or clang++" in message
    assert second["told"] == []
    assert "no C++ compiler was found" in found["failure"]
    assert found["left"] == "reference"


@needs_compiler
def test_nothing_is_kept_on_the_disk(tmp_path: Path) -> None:
    """So a home that cannot be written to, or does not exist, does not matter."""
    found = probe(
        "auto", HOME=f"{os.devnull}/home", XDG_CACHE_HOME=f"{os.devnull}/cache", TMPDIR=str(tmp_path)
    )
    assert [result["built"] for result in found["auto"]] == [True, True]
    assert [result["told"] for result in found["auto"]] == [[], []]
    assert found["failure"] is None
    assert [path for path in tmp_path.rglob("*") if "fp8scope" in path.name or path.suffix == ".so"] == []
