"""Counters of unquantised tensors against torch, for every dtype, layout and non-finite value."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fp8scope_kernels import STATISTICS, StatisticsBuffer, backends, observe, plain_tensors, set_backend
from fp8scope_kernels.cpu import backend as cpu_backend
from fp8scope_kernels.high_precision import HighPrecisionObserver, add_tensor

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
NUMEL, AMAX, SCALE, NONFINITE = (STATISTICS.index(name) for name in ("numel", "amax", "scale", "nonfinite"))
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "permuted": lambda x: x.permute(1, 2, 0),
    "sliced": lambda x: x[1:, ::2, 3:],
    "expanded": lambda x: x[:1].expand(5, *x.shape[1:]),
    "expanded scalar": lambda x: x[0, 0, 0].expand(7, 3),
    "overlapping": lambda x: x.reshape(-1).unfold(0, 6, 2),
    "empty": lambda x: x[:0],
    "one element": lambda x: x[0, 0, 1],
}


@pytest.fixture(autouse=True, params=["compiled", "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_chosen", request.param)


def expected(x: Tensor) -> list[float]:
    wide = x.detach().float()
    finite = wide[torch.isfinite(wide)].abs().double()
    return [
        x.numel(),
        float(finite.max()) if finite.numel() else 0.0,
        1,
        0,
        0,
        0,
        int((~wide.isfinite()).sum()),
    ]


def counted(*tensors: Tensor) -> list[float]:
    buffer = StatisticsBuffer(4)
    buffer.register("before", format=None, shape=(1,), role="input")
    slot = buffer.register("x", format=None, shape=(-1,), role="input")
    for x in tensors:
        add_tensor(slot, x)
    assert not buffer.storage[0].any() and not buffer.storage[2:].any()
    row: list[float] = slot.row.tolist()
    return row


def test_it_works() -> None:
    x = torch.randn(3, 5)
    assert counted(x) == [15, float(x.abs().max()), 1, 0, 0, 0, 0]


@DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("poison", [(), (torch.nan,), (torch.inf, -torch.inf, torch.nan)], ids=len)
def test_every_layout(dtype: torch.dtype, layout: str, poison: tuple[float, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 20, 37, generator=generator).to(dtype)
    for index, value in enumerate(poison):
        x.view(-1)[[0, 1, 1500][index]] = value
    view = LAYOUTS[layout](x)
    assert counted(view) == expected(view)


@DTYPES
def test_all_poisoned(dtype: torch.dtype) -> None:
    assert counted(torch.full((9, 5000), torch.nan, dtype=dtype)) == [45000, 0, 1, 0, 0, 0, 45000]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_pattern(dtype: torch.dtype) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    assert counted(patterns) == expected(patterns)
    for x in patterns[torch.isfinite(patterns)][::97]:
        assert counted(x) == expected(x)


@pytest.mark.parametrize(
    "number", [3.4028235677973362e38, 3.4028235677973366e38, 1e300, 1e-46, 5e-324, 1.4e-45, 1 + 2**-30]
)
def test_float64_is_rounded_to_float32_first(number: float) -> None:
    x = torch.tensor([-number, 0.0], dtype=torch.float64)
    assert counted(x) == expected(x)


def test_several_threads_count_the_same() -> None:
    x = torch.randn(2**19 + 17)
    x[[5, 2**18, -1]] = torch.tensor([torch.nan, torch.inf, -(2.0**33)])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert counted(x) == expected(x) == [x.numel(), 2.0**33, 1, 0, 0, 0, 2]
    finally:
        torch.set_num_threads(before)


def test_calls_add_up() -> None:
    assert counted(torch.ones(3), torch.full((2, 2), -5.0), torch.tensor([torch.nan])) == [
        8,
        5,
        1,
        0,
        0,
        0,
        1,
    ]


def test_a_transposed_tensor_is_not_copied() -> None:
    x = torch.randn(40, 30)
    ordered, repeat = plain_tensors.in_memory_order(x.t())
    assert ordered.data_ptr() == x.data_ptr() and repeat == 1
    ordered, repeat = plain_tensors.in_memory_order(x[0].expand(9, 30))
    assert ordered.data_ptr() == x.data_ptr() and repeat == 9 and ordered.numel() == 30


def test_freed_memory_is_refused() -> None:
    set_backend("compiled")
    x = torch.ones(100)[10:]
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="freed"):
        cpu_backend.observe(x, StatisticsBuffer(1).storage.data_ptr())


def test_gradients_of_any_layout_are_counted() -> None:
    for reduce in (torch.sum, lambda y: (y.t() * torch.arange(4.0)).sum()):
        layer = nn.Linear(16, 16)
        buffer = StatisticsBuffer()
        observe(layer, buffer)
        x = torch.randn(4, 16)
        output = layer(x)
        output.retain_grad()
        reduce(output).backward()
        assert output.grad is not None
        assert buffer.data[2].tolist() == expected(output.grad)


def test_ignores_tensors_under_functorch() -> None:
    layer = nn.Linear(16, 16)
    buffer = StatisticsBuffer()
    observe(layer, buffer)
    problems: list[Exception] = []
    (observer,) = (hook for hook in layer._forward_hooks.values() if isinstance(hook, HighPrecisionObserver))
    observer.on_error = problems.append
    x = torch.randn(4, 16)
    gradient = torch.func.grad(lambda given: layer(given).sum())(x)
    assert torch.allclose(gradient, layer.weight.sum(0).expand(4, 16))
    assert problems


class TestWeights:
    """A weight is counted at every call, and read again only where it may have changed."""

    @pytest.fixture
    def layer(self) -> nn.Linear:
        return nn.Linear(16, 16)

    @pytest.fixture
    def buffer(self, layer: nn.Linear) -> StatisticsBuffer:
        buffer = StatisticsBuffer()
        observe(layer, buffer)
        return buffer

    @pytest.fixture
    def reads(self, monkeypatch: pytest.MonkeyPatch, layer: nn.Linear) -> list[int]:
        """One entry for each time that the layer's weight is read."""
        reads: list[int] = []
        read = cpu_backend.observe

        def noting(x: Tensor, address: int) -> int:
            if x is layer.weight:
                reads.append(address)
            return read(x, address)

        monkeypatch.setattr(cpu_backend, "observe", noting)
        return reads

    def test_calls_of_one_step_read_it_once(
        self, layer: nn.Linear, buffer: StatisticsBuffer, reads: list[int], backend: None
    ) -> None:
        with torch.no_grad():
            layer.weight[0, 0] = torch.nan
        for _ in range(4):
            layer(torch.ones(2, 16))
        assert buffer.data[1].tolist() == [
            4 * v if i in (NUMEL, NONFINITE) else v for i, v in enumerate(expected(layer.weight))
        ]
        if backends.get_backend() == "compiled":
            assert len(reads) == 1

    @pytest.mark.parametrize("clear", [StatisticsBuffer.zero_, StatisticsBuffer.exchange])
    def test_every_step_reads_it(
        self,
        layer: nn.Linear,
        buffer: StatisticsBuffer,
        reads: list[int],
        clear: Callable[[StatisticsBuffer], object],
    ) -> None:
        layer(torch.ones(2, 16))
        clear(buffer)
        # As an optimizer that writes past autograd: the tensor's version stays.
        layer.weight.data.fill_(7.0)
        layer(torch.ones(2, 16))
        assert buffer.data[1].tolist() == expected(layer.weight)

    def test_a_change_within_the_step_is_seen(self, layer: nn.Linear, buffer: StatisticsBuffer) -> None:
        layer(torch.ones(2, 16))
        with torch.no_grad():
            layer.weight.fill_(9.0)
        layer(torch.ones(2, 16))
        assert buffer.data[1, AMAX] == 9 and buffer.data[1, NUMEL] == 2 * 256


def test_a_skipped_step_reads_nothing() -> None:
    layer = nn.Linear(16, 16)
    buffer = StatisticsBuffer()
    observe(layer, buffer)
    buffer.pace.observing = False
    layer(torch.ones(2, 16)).sum().backward()
    assert not buffer.data.any() and buffer.pace.calls == 0
    buffer.pace.observing = True
    layer(torch.ones(2, 16)).sum().backward()
    assert (buffer.data[:, NUMEL] > 0).all() and buffer.pace.calls == 2 and buffer.pace.seconds > 0


def test_an_observer_of_every_step_skips_none() -> None:
    layer = nn.Linear(16, 16)
    buffer = StatisticsBuffer()
    observe(layer, buffer)
    (observer,) = (hook for hook in layer._forward_hooks.values() if isinstance(hook, HighPrecisionObserver))
    observer.every_step = True
    buffer.pace.observing = False
    layer(torch.ones(2, 16)).sum().backward()
    assert (buffer.data[:, NUMEL] > 0).all()


@pytest.mark.parametrize("shape", [(1,), (3, 1000), (128, 513)])
def test_norms_are_those_of_double_precision(shape: tuple[int, ...]) -> None:
    tensors = [torch.randn(shape), torch.randn(shape).t() if len(shape) == 2 else torch.randn(shape)]
    tensors.append(torch.randn(3)[:, None].expand(3, 4))
    exact = torch.cat([x.double().reshape(-1) for x in tensors]).norm()
    assert cpu_backend.norm(tensors) == pytest.approx(float(exact), rel=1e-6)
    tensors.append(torch.tensor([torch.nan]))
    assert cpu_backend.norm(tensors) != cpu_backend.norm(tensors)
