"""Launches compiled ahead of time, as Triton's launcher would compile them on a GPU. This needs no GPU.

The launcher makes a constant of every size that is 1, and marks pointers and sizes that are multiples of 16.
The interpreter does neither, so that a kernel may pass there and not compile on a GPU. Here the functions of
backend.py run with tensors on the CPU; what they would launch is recorded, and compiled.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp8scope_kernels import (
    BLOCK_STATISTICS,
    E2M1,
    E4M3,
    E5M2,
    MXFP8,
    STATISTICS,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Linear,
    RandomStream,
    Recipe,
    RowwiseScaling,
    StatisticsBuffer,
    backends,
    observe,
    operands,
)
from fp8scope_kernels.random_stream import Draw
from fp8scope_kernels.recipes import Role
from fp8scope_kernels.triton import availability as triton_availability
from fp8scope_kernels.triton import backend as triton_backend

if not triton_availability.is_installed():
    pytest.skip("needs Triton, which is there for Linux only", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from fp8scope_kernels.triton import kernels as triton_kernels

CAPABILITIES = (80, 90, 100)
ONE = torch.ones(())
BF16, FP8, FP8_WIDE = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2

Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


class Recorder:
    """Stands for the module of kernels: `kernel[grid](...)` is noted, not run."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(triton_kernels, name)
        if not isinstance(value, triton.JITFunction):
            return value

        def launch(*args: Any, **options: Any) -> None:
            self.launches.append((value, args, options))

        return {(size,): launch for size in range(1, triton_kernels.MAX_PROGRAMS + 1)}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(triton_backend, "_kernels", lambda: recorder)
    return recorder


def compile_launch(launch: Launch, capability: int) -> None:
    """Compile a launch to a binary for this GPU, with the specialisations of Triton's own launcher."""
    kernel, args, options = launch
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialisation, chosen = binder(*args, **options)
    parsed, signature, constants, attributes = kernel._pack_args(
        backend, chosen, bound, specialisation, chosen
    )
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=target, options=parsed.__dict__)
    assert compiled.asm["cubin"]


def summary(launch: Launch) -> tuple[str, ...]:
    """What the launcher's choice of a binary depends on."""
    kernel, args, options = launch
    values = []
    for value in args:
        if isinstance(value, Tensor):
            values.append(f"{value.dtype}{value.data_ptr() % 16 == 0}")
        else:
            values.append("1" if value == 1 else f"{value % 16 == 0}{abs(value) >= 2**31}")
    return kernel.fn.__name__, *values, str(sorted(options.items()))


def rows(index: int) -> Tensor:
    """A row of a buffer: those with an odd index are not at a multiple of 16 bytes."""
    buffer = StatisticsBuffer(4)
    for number in range(4):
        buffer.register(str(number), format=E4M3, shape=(1,), role="input")
    return buffer.storage[index]


def expanded_gradient() -> Tensor:
    """What `y.sum().backward()` gives an observed layer: one element, expanded."""
    seen: list[Tensor] = []
    y = torch.zeros(4, 32, requires_grad=True)
    y.register_hook(seen.append)  # type: ignore[no-untyped-call]
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert seen[0].stride() == (0, 0)
    return seen[0]


OBSERVED: dict[str, Callable[[], Tensor]] = {
    "one element, expanded": expanded_gradient,
    "no dimensions": lambda: torch.zeros((), dtype=BF16),
    "a multiple of 16": lambda: torch.zeros(4, 32, dtype=BF16),
    "several tiles, no multiple of 16": lambda: torch.zeros(3, 4097, dtype=torch.float16),
    "at an odd address": lambda: torch.zeros(40)[1:],
}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_it_works(capability: int, recorder: Recorder) -> None:
    """The observer of plain layers, with every kind of size."""
    for index, make in enumerate(OBSERVED.values()):
        assert triton_backend.observe(make(), rows(index % 2))
    compile_all(recorder, capability, "observe_tiles")


def cast(x: Tensor, dtype: torch.dtype, row: Tensor | None, **options: Any) -> None:
    format = {BF16: E2M1, FP8: E4M3, FP8_WIDE: E5M2}[dtype]
    triton_backend.quantize(dtype, x, ONE, format, row, **options)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_one_scale_for_a_tensor(capability: int, recorder: Recorder) -> None:
    for index, shape in enumerate(((1, 1), (1, 48), (64, 256))):
        x = torch.zeros(shape, dtype=BF16)
        triton_backend.measure(x)
        cast(x, FP8, rows(index % 2), measure=True)
    cast(torch.zeros(1, 1), FP8, rows(0), transpose=True)
    cast(torch.zeros(64, 256, dtype=BF16), FP8, rows(1), measure=True, transpose=True)
    wide = torch.zeros(64, 256)
    cast(wide.t(), FP8_WIDE, rows(0), nonfinite="clamp")
    cast(wide, BF16, None, saturate=False)
    cast(wide.half(), BF16, rows(0), extent=(torch.zeros(()), torch.zeros((), dtype=torch.float64)))
    history = triton_backend.AmaxHistory(torch.zeros(600), torch.zeros((), dtype=torch.int64))
    triton_backend.quantize(FP8, torch.zeros(1, 1), ONE, E4M3, rows(0), measure=True, history=history)
    for power_of_two, store in ((True, ONE), (False, None)):
        triton_backend.measure_and_scale(wide, 448.0, power_of_two=power_of_two, store=store)
    for length, interval in ((600, 1), (1, 16)):
        past = triton_backend.AmaxHistory(history.amaxes[:length], history.calls)
        triton_backend.delayed_scale(past, ONE, interval, 448.0)
    compile_all(recorder, capability, "quantize_tiles", "finish", "delayed_scale", "current_scale")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_rounded_at_random(capability: int, recorder: Recorder) -> None:
    draw = RandomStream(3).draw()
    extent = torch.zeros(()), torch.zeros((), dtype=torch.float64)
    triton_backend.quantize_at_random(FP8, torch.zeros(1, 1), ONE, E4M3, draw, rows(0))
    triton_backend.quantize_at_random(FP8_WIDE, torch.zeros(64, 256, dtype=BF16), ONE, E5M2, draw, rows(1))
    cast_at_random = triton_backend.quantize_at_random
    half, other = torch.zeros(48).half(), Draw(draw.state, 1)
    cast_at_random(BF16, half, ONE, E2M1, other, rows(0), extent=extent, nonfinite="clamp")
    triton_backend.quantize_at_random(FP8, torch.zeros(64, 256), ONE, E4M3, draw)
    compile_all(recorder, capability, "quantize_at_random_tiles", "finish")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_scale_for_each_block(capability: int, recorder: Recorder) -> None:
    both = rows(1), torch.zeros(len(BLOCK_STATISTICS), dtype=torch.float64)
    triton_backend.quantize_blocks(torch.zeros(1, 1), E4M3, (1, 1), RowwiseScaling(), *both)
    triton_backend.quantize_blocks(torch.zeros(16, 1, dtype=BF16), E4M3, (1, 32), MXFP8(), rows(0))
    triton_backend.quantize_blocks(torch.zeros(64, 256, dtype=BF16), E4M3, (1, 32), MXFP8(), rows(0))
    wide = torch.zeros(256, 256)
    triton_backend.quantize_blocks(wide.t(), E5M2, (128, 128), BlockScaling(), rows(0))
    triton_backend.quantize_blocks(wide, E5M2, (1, 32), MXFP8(rounding="floor"))
    compile_all(recorder, capability, "quantize_block_tiles", "finish")


def compile_all(recorder: Recorder, capability: int, *kernels: str) -> None:
    """Compile each kind of launch once; `kernels` are those that must have been launched."""
    kinds = {summary(launch): launch for launch in recorder.launches}
    assert {name for name, *_ in kinds} == set(kernels)
    for launch in kinds.values():
        compile_launch(launch, capability)


def test_every_kernel_is_compiled_here() -> None:
    launched = {
        name
        for name, value in vars(triton_kernels).items()
        if isinstance(value, triton.JITFunction) and value.fn.__module__ == triton_kernels.__name__
    }
    assert launched - {"store_partials"} == {
        "observe_tiles",
        "quantize_tiles",
        "quantize_at_random_tiles",
        "quantize_block_tiles",
        "finish",
        "delayed_scale",
        "current_scale",
    }
    assert len(STATISTICS) == 7, "the kernels write to a row by number"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What was compiled before must not answer for a kernel that no longer compiles."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    yield


class DeviceOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of torch that launch a kernel: all but those that make tensors and views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_memory = func._schema.name in ("aten::empty", "aten::new_empty", "aten::empty_like")
        is_view = any(value.alias_info is not None for value in func._schema.returns) and not any(
            argument.alias_info is not None and argument.alias_info.is_write
            for argument in func._schema.arguments
        )
        if not (is_memory or is_view):
            self.names.append(func._schema.name)
        return result


@pytest.mark.parametrize(
    "recipe",
    [DelayedScaling(), DelayedScaling(interval=4, amax_compute="most_recent"), CurrentScaling()],
    ids=str,
)
@pytest.mark.parametrize("role", ["input", "grad_output"])
def test_a_tensor_takes_three_launches(
    recipe: Recipe, role: Role, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scale, history, cast, transpose, inverse and counters of a tensor with one scale, on FP8 units."""
    monkeypatch.setattr(backends, "use_triton", lambda x, kernel: True)
    monkeypatch.setattr(operands, "has_fp8_units", lambda *_: True)
    layer = Fp8Linear(64, 48, recipe=recipe)
    observe(torch.nn.Sequential(layer), StatisticsBuffer())
    state = layer.state_of(role)
    if isinstance(recipe, DelayedScaling):
        # The first call looks at its own tensor.
        state.calls.fill_(1)
        state._started = True
    x = torch.zeros(32, 64, dtype=BF16)
    with DeviceOperations() as operations:
        layer.quantize(role, x, update=True, transpose=True)
    assert len(recorder.launches) == 3
    assert operations.names == []
