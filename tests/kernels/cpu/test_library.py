"""Loading the compiled backend, and what happens where it cannot be loaded."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8scope_kernels import E4M3, backends, get_backend, quantize, set_backend
from fp8scope_kernels.cpu import levels as cpu_levels
from fp8scope_kernels.cpu import library as cpu_library


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_cpu_failure", None)
    monkeypatch.setattr(backends, "_chosen", "auto")
    monkeypatch.setattr(cpu_library, "_library", None)


def cast() -> Tensor:
    return quantize(torch.linspace(-3, 3, 8192), torch.tensor(100.0), E4M3).data.float()


def reference() -> Tensor:
    set_backend("reference")
    result = cast()
    set_backend("auto")
    return result


def test_it_works() -> None:
    expected = reference()
    assert not cpu_library.is_loaded()
    assert torch.equal(cast(), expected)
    assert cpu_library.is_loaded()
    assert cpu_library.library() is cpu_library.library()
    assert get_backend() == "auto" and not backends.failures()


def test_auto_takes_it_for_tensors_of_any_size_on_a_cpu() -> None:
    assert backends.use_compiled(torch.empty(1))
    assert not backends.use_compiled(torch.empty(2**16, device="meta"))
    set_backend("reference")
    assert not backends.use_compiled(torch.empty(2**16))


def assert_warns_once_and_goes_on(message: str) -> None:
    """`auto`: one warning over several casts, with the definition's results; `compiled`: an error."""
    expected = reference()
    with pytest.warns(RuntimeWarning, match=rf"eager torch, with the same results.*{message}") as caught:
        for _ in range(3):
            assert torch.equal(cast(), expected)
    assert len(caught) == 1
    assert get_backend() == "reference"
    assert not cpu_library.is_loaded()
    with pytest.raises(RuntimeError, match=rf"compiled backend cannot be used: .*{message}"):
        set_backend("compiled")


def test_falls_back_in_a_source_tree_without_libraries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu_levels, "path", lambda level: tmp_path / f"{level.module}.so")
    assert_warns_once_and_goes_on(
        r"was not built with the package; run pip install -e \. \(or make install\)"
    )
    assert "was not built" in backends.failures()[0]


def test_falls_back_in_an_installed_package_without_libraries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu_levels, "FOLDER", tmp_path)
    monkeypatch.setattr(cpu_levels, "sources", lambda: [])
    assert_warns_once_and_goes_on("was not built with the package; reinstall fp8scope from a wheel")


def test_libraries_that_are_older_than_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cpu_levels.digest()
    for file in cpu_levels.sources():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert cpu_levels.digest(tmp_path) == cpu_levels.digest()
    with (tmp_path / "counts.h").open("a") as changed:
        changed.write("// Changed.\n")
    now = cpu_levels.digest(tmp_path)
    monkeypatch.setattr(cpu_levels, "digest", lambda: now)
    assert_warns_once_and_goes_on(r"was built from other sources; run pip install -e \. \(or make install\)")


def test_a_file_that_is_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "native.so").write_text("nothing")
    monkeypatch.setattr(cpu_levels, "path", lambda level: tmp_path / "native.so")
    assert_warns_once_and_goes_on(r"native\.so cannot be loaded .*run pip install -e \.")


def test_a_platform_without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_levels, "machine", lambda: "s390x")
    assert_warns_once_and_goes_on("there are none for this platform, only for Linux and macOS on x86-64")


def test_refuses_an_unknown_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8SCOPE_CPU_LEVEL", "i386")
    assert_warns_once_and_goes_on(r"FP8SCOPE_CPU_LEVEL must be one of .*, got 'i386'")


def test_refuses_a_level_that_the_processor_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = cpu_library.available_levels()
    beyond = cpu_levels.Level("x86-64-v9")
    monkeypatch.setattr(cpu_levels, "levels", lambda: (*levels, beyond))
    monkeypatch.setenv("FP8SCOPE_CPU_LEVEL", beyond.name)
    assert_warns_once_and_goes_on("FP8SCOPE_CPU_LEVEL must be one of ")


def test_explicit_choice_after_a_failure_is_taken_when_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_cpu_failure", "as if it had failed")
    assert get_backend() == "reference"
    set_backend("compiled")
    assert get_backend() == "compiled" and backends.use_compiled(torch.empty(1))


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"auto, reference, compiled, triton, got 'cuda'"):
        set_backend("cuda")  # type: ignore[arg-type]


# --- in a process of its own ----------------------------------------------------------------------------

PROBE = """
import json, os, warnings
import torch
from fp8scope_kernels import E4M3, backends, quantize, set_backend
from fp8scope_kernels.cpu import library as cpu_library

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    data = quantize(torch.linspace(-3, 3, 8192), torch.tensor(100.0), E4M3).data.float()
loaded = [line.split()[-1] for line in open("/proc/self/maps") if "kernels_" in line]
set_backend("reference")
same = torch.equal(data, quantize(torch.linspace(-3, 3, 8192), torch.tensor(100.0), E4M3).data.float())
print(json.dumps({"same": same, "warnings": len(caught),
                  "loaded": sorted({os.path.basename(path) for path in loaded})}))
"""


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_compiler_is_needed_and_nothing_is_written(tmp_path: Path) -> None:
    """A home that cannot be written to, or does not exist, does not matter, and neither does the PATH."""
    nowhere = dict.fromkeys(("HOME", "XDG_CACHE_HOME"), f"{os.devnull}/none")
    result: dict[str, Any] = json.loads(
        run(PROBE, PATH=str(tmp_path), CXX=str(tmp_path / "g++"), TMPDIR=str(tmp_path), **nowhere)
    )
    assert result["same"] and result["warnings"] == 0
    assert [path for path in tmp_path.rglob("*") if "fp8scope" in path.name or path.suffix == ".so"] == []


@pytest.mark.parametrize("level", [level.name for level in cpu_library.available_levels()])
def test_the_environment_chooses_a_level(level: str) -> None:
    result = json.loads(run(PROBE, FP8SCOPE_CPU_LEVEL=level))
    assert result["same"] and result["warnings"] == 0
    lowest = cpu_levels.levels()[0].name
    assert result["loaded"] == sorted({f"kernels_{lowest}.so", f"kernels_{level}.so"})


THREADS = """
import os, torch
from fp8scope_kernels import E4M3
from fp8scope_kernels.cpu import backend as cpu_backend, library as cpu_library

torch.set_num_threads(1)
x = torch.randn(4 * cpu_backend.ELEMENTS_PER_THREAD).bfloat16()
torch.set_num_threads(4)
before = len(os.listdir("/proc/self/task"))
cpu_backend.quantize(x, 100.0, E4M3, torch.float8_e4m3fn, measure=True)
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_large_tensors_are_shared_between_torch_s_threads() -> None:
    environment = {"OMP_NUM_THREADS": "4", "OMP_DYNAMIC": "false"}
    assert run(THREADS, **environment) == "3\n"
    # torch's own work takes the same threads and not more.
    torch_first = THREADS.replace("before =", "torch.ones(2**22).add_(1); before =")
    assert run(torch_first, **environment) == "0\n"


FORK = """
import os, torch
from fp8scope_kernels import E4M3
from fp8scope_kernels.cpu import backend as cpu_backend, library as cpu_library

x = torch.randn(4 * cpu_backend.ELEMENTS_PER_THREAD).bfloat16()
torch.set_num_threads(4)
cast = lambda: cpu_backend.quantize(x, 100.0, E4M3, torch.float8_e4m3fn, measure=True)
# Both start torch's threads. The child uses the kernels alone: torch's own operations would wait.
expected = x.abs().max().item()
if LOADED:
    cast()
child = os.fork()
if not child:
    os._exit(0 if cast().amax == expected else 1)
print(os.waitpid(child, 0)[1], cast().amax == expected)
"""


@pytest.mark.parametrize("loaded", ["True", "False"])
def test_a_forked_child_does_not_wait_for_threads_that_it_lacks(loaded: str) -> None:
    """As DataLoader workers and ranks started by fork are; with the library loaded before and after it."""
    assert run(FORK.replace("LOADED", loaded), OMP_NUM_THREADS="4") == "0 True\n"
