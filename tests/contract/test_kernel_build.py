"""The build of the CPU kernels: the choice of the compiler, and the messages if there is none."""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
from contract.helpers.quick_compiler import quick_compiler

from fp8scope_kernels.cpu import levels as cpu_levels

ROOT = Path(__file__).parents[2]
BACKEND = ROOT / "build_backend"
LIBRARIES = Path("kernels", "fp8scope_kernels", "cpu")
MODULES = f"""
import json, sys
from pathlib import Path
sys.path.insert(0, {str(BACKEND)!r})
import backend, commands, compilers, elf

def needs_of(path):
    needs = elf.read(Path(path))
    return sorted(needs.libraries), needs.glibc

"""


def python(
    *arguments: str | Path, interpreter: Path | str = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("CXX", "PYTHONPATH")}
    return subprocess.run(
        [str(interpreter), *(str(argument) for argument in arguments)],
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def evaluate(code: str, **environment: str) -> Any:
    """Evaluate an expression over the modules of build_backend; the result passes through JSON."""
    done = python("-c", f"{MODULES}print(json.dumps({code}))", **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # setuptools prints lines before it


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files that the build reads, without compiled libraries."""
    shutil.copytree(BACKEND, tmp_path / "build_backend", ignore=shutil.ignore_patterns("__pycache__"))
    package = tmp_path / LIBRARIES
    shutil.copytree(cpu_levels.SOURCES, package / "csrc")
    shutil.copy(cpu_levels.__file__, package)
    return tmp_path


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """An interpreter without any packages: no setuptools, no ziglang."""
    venv.create(tmp_path / "venv", with_pip=False)
    return tmp_path / "venv" / "bin" / "python"


@pytest.mark.slow
def test_it_works(tree: Path, plain: Path, tmp_path: Path) -> None:
    """One command, with any Python and a compiler, builds all libraries from these sources."""
    if evaluate("backend.get_requires_for_build_wheel()"):
        pytest.skip("this machine has no C++ compiler")
    compiler = quick_compiler(tmp_path)
    assert compiler is not None
    done = python(tree / "build_backend" / "kernel_libraries.py", interpreter=plain, CXX=compiler)
    assert done.returncode == 0, done.stderr
    folder = tree / LIBRARIES
    libraries = sorted(folder.glob("*.so"))
    assert [path.name for path in libraries] == sorted(
        cpu_levels.path(level).name for level in cpu_levels.levels()
    )
    for library in libraries:
        assert cpu_levels.digest().encode() in library.read_bytes()
        needed, (major, minor) = evaluate(f"needs_of({str(library)!r})")
        assert needed == ["libc.so.6"] and (major, minor) <= (2, 17)
    assert sorted(folder.glob("*.o")) == []


def test_the_installed_libraries_run_on_any_machine_of_this_kind() -> None:
    """Those that the tests run with, which were built with every optimisation."""
    installed = [str(cpu_levels.path(level)) for level in cpu_levels.levels()]
    for library in installed:
        assert evaluate(f"needs_of({library!r})[0]") == ["libc.so.6"]
    platform = evaluate(f"commands.linux_platform([Path(name) for name in {installed!r}])")
    assert platform == f"manylinux_2_17_{cpu_levels.machine()}"


def test_names_the_remedies_if_there_is_no_compiler(tree: Path, plain: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    done = python(tree / "build_backend" / "kernel_libraries.py", interpreter=plain, PATH=str(empty))
    assert done.returncode != 0
    assert "apt-get install g++" in done.stderr and "pip install ziglang==" in done.stderr
    assert list((tree / LIBRARIES).glob("*.so")) == []


@pytest.mark.parametrize("hook", ["wheel", "editable"])
def test_requires_a_compiler_from_pypi_only_if_the_machine_has_none(hook: str, tmp_path: Path) -> None:
    requirements = f"backend.get_requires_for_build_{hook}()"
    assert evaluate(requirements, PATH=str(tmp_path)) == [evaluate("compilers.ZIG")]
    assert evaluate(requirements, PATH=str(tmp_path), FP8SCOPE_BUILD_KERNELS="0") == []
    assert evaluate(requirements, CXX="zig") == [evaluate("compilers.ZIG")]
    if any(shutil.which(name) for name in ("g++", "clang++")):
        assert evaluate(requirements) == []


def test_skips_a_compiler_that_fails(tmp_path: Path) -> None:
    for name in ("g++", "clang++", "c++"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o700)
    assert evaluate("backend.get_requires_for_build_wheel()", PATH=f"{tmp_path}:/bin") == [
        evaluate("compilers.ZIG")
    ]


def test_builds_no_libraries_if_disabled_or_unsupported() -> None:
    assert len(evaluate("[extension.name for extension in commands.extensions()]")) == len(
        cpu_levels.levels()
    )
    assert (
        evaluate("[extension.name for extension in commands.extensions()]", FP8SCOPE_BUILD_KERNELS="0") == []
    )
    assert (
        evaluate("[extension.name for extension in commands.extensions()]", FP8SCOPE_ARCHITECTURE="s390x")
        == []
    )


def test_reads_the_dependencies_of_a_library() -> None:
    torch = pytest.importorskip("torch")
    assert "libtorch_python.so" in evaluate(f"needs_of({torch._C.__file__!r})")[0]
    # A library with such dependencies runs only on the machine that built it.
    assert (
        evaluate(f"commands.linux_platform([Path({torch._C.__file__!r})])") == f"linux_{cpu_levels.machine()}"
    )


@pytest.mark.slow
def test_the_source_compiles_without_warnings() -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("this machine has no C++ compiler")
    done = subprocess.run(
        [compiler, "-std=c++20", "-Wall", "-Wextra", "-O1", "-fsyntax-only"]
        + [str(cpu_levels.SOURCES / "kernels.cpp")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr == ""
