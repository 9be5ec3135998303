"""The Triton backend where there is no GPU: in Triton's interpreter, and its kernels compiled for GPUs.

Whether Triton interprets is decided when it is imported, so that those tests run in a process of their own.
They are the ones in tests/gpu, which also run on a CUDA device.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from fp8scope_kernels import (
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    Format,
    RowwiseScaling,
    backends,
    get_backend,
    set_backend,
)
from fp8scope_kernels.triton import availability as triton_availability
from fp8scope_kernels.triton import backend as triton_backend

if not triton_availability.is_installed():
    pytest.skip("needs Triton, which is there for Linux only", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp8scope_kernels.triton import kernels as triton_kernels

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backends, "_chosen", "auto")
    monkeypatch.setattr(backends, "_triton_failures", {})
    yield


@pytest.mark.slow
def test_it_works(tmp_path: Path) -> None:
    """Bit for bit the definition, in the interpreter: see tests/gpu/test_triton*.py."""
    files = sorted(str(path) for path in (ROOT / "tests/gpu").glob("test_triton*.py"))
    assert len(files) == 5
    # Its own folder: pytest makes the shared one private again, where PostgreSQL of other tests has files.
    options = ("-p", "no:cacheprovider", "-p", "no:xdist", "--basetemp", str(tmp_path / "inner"))
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, *files],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    passed = re.search(r"^(\d+) passed", finished.stdout, re.MULTILINE)
    assert passed and int(passed[1]) > 100, finished.stdout
    assert "skipped" not in finished.stdout


def compile_for(
    capability: int, kernel: Any, types: dict[str, str], constants: dict[str, Any], aligned: tuple[str, ...]
) -> str:
    """The PTX for a GPU of this compute capability; ptxas has accepted it too."""
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": 4, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.asm["cubin"]
    return str(compiled.asm["ptx"])


def assert_exact_and_wide(ptx: str) -> None:
    """What rounding relies on, and 16 bytes at a time wherever a tensor is read or written."""
    code = "\n".join(line for line in ptx.splitlines() if not line.lstrip().startswith((".b8", "//")))
    assert re.search(r"\bmul(\.rn)?\.f32", code)
    assert ".ftz" not in code
    assert "fma." not in code
    assert "div.full" not in code and "div.approx" not in code
    assert re.search(r"ld\.global\S*\.v4\.b32", code)
    assert re.search(r"st\.global\S*\.v4\.b32", code)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("transpose", [False, True], ids=["flat", "transposed"])
def test_the_pass_over_a_tensor_compiles(capability: int, transpose: bool) -> None:
    height, width = triton_backend.SQUARE if transpose else triton_backend.FLAT
    pointers = {"x": "*i16", "scale": "*fp32", "q": "*u8", "q_t": "*u8", "partials": "*i64"}
    sizes = dict.fromkeys(("rows", "columns", "row_stride", "tiles_across", "tiles"), "i32")
    constants = {
        **triton_backend._format_bits(E4M3),
        "BEYOND": triton_backend._beyond(E4M3, torch.float8_e4m3fn),
        **dict.fromkeys(("SATURATE", "PROPAGATE", "BYTES", "CAST", "COUNT", "MEASURE"), True),
        "TRANSPOSE": transpose,
        "HEIGHT": height,
        "WIDTH": width,
        "column_stride": 1,
    }
    aligned = (*pointers, "rows", "columns", "row_stride")
    assert_exact_and_wide(
        compile_for(capability, triton_kernels.quantize_tiles, {**pointers, **sizes}, constants, aligned)
    )


@pytest.mark.parametrize("tall", [False, True], ids=["rows", "squares"])
def test_the_pass_over_blocks_compiles(tall: bool) -> None:
    pointers = {"x": "*i16", "q": "*i16", "scales": "*fp32", "partials": "*i64"}
    sizes = dict.fromkeys(("rows", "columns", "row_stride", "block_width", "blocks_across", "tiles"), "i32")
    bits = triton_backend._format_bits(E4M3)
    constants = {
        **{name: bits[name] for name in ("MAX", "LIMIT", "NORMAL", "MANTISSA", "BIAS")},
        **triton_backend._scale_rule(RowwiseScaling(), E4M3),
        "PROPAGATE": True,
        "TALL": tall,
        "COUNT": True,
        "HEIGHT": 128 if tall else 4,
        "WIDTH": 128 if tall else 1024,
        "column_stride": 1,
    }
    aligned = (*pointers, "rows", "columns", "row_stride", "block_width")
    ptx = compile_for(90, triton_kernels.quantize_block_tiles, {**pointers, **sizes}, constants, aligned)
    assert_exact_and_wide(ptx)
    assert "div.rn.f32" in ptx


def test_the_sum_of_partials_compiles() -> None:
    pointers = {"partials": "*i64", "amax": "*fp32", "nonfinite": "*fp64", "scale": "*fp32"}
    rows = {"row": "*fp64", "block_row": "*fp64", "programs": "i32", "numel": "i64"}
    flags = {"MEASURED": False, "HAS_ROW": True, "HAS_BLOCK_ROW": True}
    ptx = compile_for(90, triton_kernels.finish, {**pointers, **rows}, flags, tuple(pointers))
    # In one program, and so without atomics: the same sums in the same order every time.
    assert not re.search(r"\b(atom|red)\.", ptx)


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E4M3FNUZ, E5M2FNUZ], ids=lambda fmt: fmt.name)
def test_format_constants_of_the_kernels(fmt: Format) -> None:
    assert fmt.dtype is not None
    largest = torch.tensor([fmt.max]).to(fmt.dtype).view(torch.uint8).item()
    assert triton_backend._format_bits(fmt)["MAX_CODE"] == largest
    beyond = torch.tensor([torch.inf if fmt.has_infinity else torch.nan]).to(fmt.dtype)
    assert triton_backend._beyond(fmt, fmt.dtype) == beyond.view(torch.uint8).item()


def test_selecting_triton_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton_availability, "accelerators", lambda: [torch.device("xpu", 0)])
    with pytest.raises(RuntimeError, match="needs a CUDA or ROCm device.*TRITON_INTERPRET=1"):
        set_backend("triton")
    monkeypatch.setattr(triton_availability, "is_installed", lambda: False)
    with pytest.raises(RuntimeError, match="pip install triton"):
        set_backend("triton")
    assert get_backend() == "auto"


def test_which_tensors_use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton_availability, "accelerators", lambda: [torch.device("cuda", 0)])
    on_cpu = torch.empty(4)
    for choice in ("auto", "reference", "triton"):
        set_backend(choice)
        assert not backends.use_triton(on_cpu, "quantize")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backends.use_triton(on_cpu, "quantize")
    set_backend("auto")
    assert not backends.use_triton(on_cpu, "quantize")


def test_a_failure_gives_up_one_kernel_without_stopping_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise OSError("no compiler\nat all")

    with pytest.warns(
        RuntimeWarning, match=r"observe continues in eager torch.*OSError: no compiler\)"
    ) as seen:
        assert backends.attempt_triton("observe", broken) is None
    assert len(seen) == 1
    assert backends.failures() == ("observe: OSError: no compiler\nat all",)
    monkeypatch.setattr(backends, "is_plain", lambda x: True)
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), is_cpu=False)
    for kernel in get_args(backends.TritonKernel):
        assert backends.use_triton(on_gpu, kernel) == (kernel != "observe")
    assert backends.attempt_triton("quantize", lambda: 3) == 3


def test_no_memory_left_is_not_a_failure_of_triton() -> None:
    def greedy() -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        backends.attempt_triton("quantize", greedy)
    assert not backends.failures()


def test_a_failure_of_an_explicitly_chosen_backend_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise OSError("no compiler")

    monkeypatch.setattr(backends, "_chosen", "triton")
    with pytest.raises(OSError, match="no compiler"):
        backends.attempt_triton("quantize", broken)
    assert not backends.failures()


def test_an_invalid_argument_is_not_a_failure_of_triton() -> None:
    def refusing() -> int:
        raise ValueError("on another device")

    with pytest.raises(ValueError, match="another device"):
        backends.attempt_triton("quantize", refusing)
    assert not backends.failures()
