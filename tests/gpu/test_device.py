"""Tests that need a real device: no synchronisation, CUDA graph replay, and exact counts at any size."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from fp8scope_kernels import (
    BLOCK_STATISTICS,
    E4M3,
    MXFP4,
    MXFP8,
    NVFP4,
    STATISTICS,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Linear,
    Recipe,
    RowwiseScaling,
    ScalingState,
    StatisticsBuffer,
    amax_to_scale,
    convert,
    measure,
    observe,
    quantize,
    quantize_blocks,
    set_backend,
)
from fp8scope_kernels.backends import failures, use_triton

pytestmark = pytest.mark.gpu

RECIPES: tuple[Recipe, ...] = (
    DelayedScaling(),
    CurrentScaling(),
    CurrentScaling(stochastic_gradients=True),
    RowwiseScaling(),
    BlockScaling(),
    MXFP8(),
    MXFP4(stochastic_gradients=True),
    NVFP4(),
)
recipes = pytest.mark.parametrize("recipe", RECIPES, ids=repr)
backends = pytest.mark.parametrize("backend", ["triton", "reference"])


@contextmanager
def forbidding_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def empty_row(device: torch.device) -> Tensor:
    return torch.zeros(len(STATISTICS), dtype=torch.float64, device=device)


def test_it_works(device: torch.device) -> None:
    """`auto` takes Triton here, and a step of training with statistics gives what the definition gives."""
    x = torch.randn(256, 128, device=device, generator=torch.Generator(device).manual_seed(1))
    assert use_triton(x, "quantize")
    s = torch.tensor(3.0, device=device)
    row, expected_row = empty_row(device), empty_row(device)
    data = quantize(x, s, E4M3, row).data
    assert not failures()
    set_backend("reference")
    assert torch.equal(data.view(torch.uint8), quantize(x, s, E4M3, expected_row).data.view(torch.uint8))
    assert torch.equal(row, expected_row)


@recipes
@backends
def test_a_training_step_does_not_synchronise(device: torch.device, recipe: Recipe, backend: str) -> None:
    set_backend(backend)  # type: ignore[arg-type]
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
    model = model.to(device, torch.bfloat16)
    convert(model, recipe, exclude=())
    buffer = StatisticsBuffer(device=device)
    observe(model, buffer)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(128, 256, device=device, dtype=torch.bfloat16)

    def step() -> None:
        buffer.zero_()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(3):  # compiles what there is to compile
        step()
    torch.cuda.synchronize()
    with forbidding_synchronisation():
        for _ in range(3):
            step()
    assert (buffer.data[:, STATISTICS.index("numel")] > 0).all()
    assert (buffer.data[:, STATISTICS.index("amax")] > 0).all()


def replayed(capture: Callable[[], Tensor], x: Tensor, row: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
    """What a graph of `capture`, which reads x and writes row, gives once x holds other values."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            capture()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = capture()
    x.copy_(fresh)
    row.zero_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return result, row


def test_a_graph_of_scaling_and_quantisation_replays(device: torch.device) -> None:
    set_backend("triton")
    x, row = torch.ones(300, 200, device=device), empty_row(device)

    def capture() -> Tensor:
        extent = measure(x)
        return quantize(x, amax_to_scale(extent.amax, E4M3, margin=-1), E4M3, row, extent=extent).data

    fresh = torch.randn(300, 200, device=device) * 17
    result, row = replayed(capture, x, row, fresh)
    set_backend("reference")
    expected_row = empty_row(device)
    extent = measure(fresh)
    scale = amax_to_scale(extent.amax, E4M3, margin=-1)
    for _ in range(3):
        expected = quantize(fresh, scale, E4M3, expected_row, extent=extent).data
    assert torch.equal(result.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(row, expected_row)
    assert row[STATISTICS.index("saturated")] > 0


def test_a_graph_of_blocks_replays(device: torch.device) -> None:
    set_backend("triton")
    x, row = torch.ones(130, 200, device=device), empty_row(device)
    block_row = torch.zeros(len(BLOCK_STATISTICS), dtype=torch.float64, device=device)

    def capture() -> Tensor:
        return quantize_blocks(x, E4M3, (1, 32), MXFP8(rounding="floor"), row, block_row).values

    fresh = torch.randn(130, 200, device=device) * 17
    result, row = replayed(capture, x, row, fresh)
    set_backend("reference")
    expected_row = empty_row(device)
    for _ in range(3):
        expected = quantize_blocks(fresh, E4M3, (1, 32), MXFP8(rounding="floor"), expected_row).values
    assert torch.equal(result, expected)
    assert torch.equal(row, expected_row)


def test_a_graph_of_a_layer_replays(device: torch.device) -> None:
    set_backend("triton")
    layer = Fp8Linear(64, 64, device=device, dtype=torch.bfloat16, recipe=CurrentScaling())
    x = torch.ones(32, 64, device=device, dtype=torch.bfloat16)
    fresh = torch.randn(32, 64, device=device, dtype=torch.bfloat16)

    def capture() -> Tensor:
        with torch.no_grad():
            return layer(x)  # type: ignore[no-any-return]

    result, _ = replayed(capture, x, empty_row(device), fresh)
    with torch.no_grad():
        assert torch.equal(result, layer(fresh))


class Training:
    """A step of a model with FP8 layers and counters, on tensors that stay where they are."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
        self.model = model.to(device, torch.bfloat16)
        convert(self.model, recipe, exclude=())
        self.rows = StatisticsBuffer(device=device)
        observe(self.model, self.rows)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.x = torch.zeros(128, 256, device=device, dtype=torch.bfloat16)

    def step(self) -> None:
        self.rows.zero_()
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.x).square().mean().backward()
        self.optimizer.step()

    def load(self, step: int) -> None:
        self.x.copy_(torch.randn(128, 256, generator=torch.Generator().manual_seed(step)) * 1.5**step)

    def everything(self) -> dict[str, Tensor]:
        grads = {f"{name}.grad": p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        counters = {"counters": self.rows.data, "block counters": self.rows.block_data}
        return {**self.model.state_dict(), **dict(self.model.named_buffers()), **grads, **counters}


@recipes
@backends
def test_a_graph_of_a_training_step_replays(device: torch.device, recipe: Recipe, backend: str) -> None:
    """Replays are steps: weights, gradients, scales, histories, random words and counters.

    tests/agent/accelerator/on_capture.py shows the same where there is no device.
    """
    set_backend(backend)  # type: ignore[arg-type]
    captured, eager = Training(recipe, device), Training(recipe, device)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(3):
            for own in (captured, eager):
                own.load(step)
                own.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for step in range(3, 8):
        for own in (captured, eager):
            own.load(step)
        graph.replay()
        eager.step()
        expected = eager.everything()
        for name, tensor in captured.everything().items():
            assert torch.equal(tensor.nan_to_num(), expected[name].nan_to_num()), f"{name}, step {step}"
    assert (captured.rows.data[:, STATISTICS.index("numel")] > 0).all()


@pytest.mark.parametrize("warm_up", [0, 1, 2])
@pytest.mark.parametrize("interval", [1, 3])
@backends
def test_replays_of_a_graph_advance_delayed_scaling(
    device: torch.device, backend: str, interval: int, warm_up: int
) -> None:
    """Each replay is a call: it uses the past, moves the history, and updates the scale when it is time."""
    set_backend(backend)  # type: ignore[arg-type]
    recipe = DelayedScaling(history_length=2, interval=interval)
    captured, eager = ScalingState(recipe, E4M3, device), ScalingState(recipe, E4M3, device)
    amax, used = torch.ones((), device=device), torch.zeros((), device=device)
    for _ in range(warm_up):
        captured.next_scale(amax)
        eager.next_scale(amax)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        used.copy_(captured.next_scale(amax))
    for value in (1.0, 4.0, 2.0, 0.5, 64.0, 0.5, 8.0):
        amax.fill_(value)
        graph.replay()
        assert used.item() == eager.next_scale(amax).item()
    # And eager calls go on from where the replays have come.
    assert captured.next_scale(amax).item() == eager.next_scale(amax).item()
    for name, buffer in eager.named_buffers():
        assert torch.equal(captured.get_buffer(name), buffer), name


def test_more_than_2_31_elements(device: torch.device) -> None:
    """Counted exactly; the last element is in its place."""
    free, _ = torch.cuda.mem_get_info()
    if free < 10 * 2**30:
        pytest.skip("needs 10 GiB of free memory on the CUDA device")
    torch.use_deterministic_algorithms(False)
    set_backend("triton")
    x = torch.ones(2**31 + 4099, dtype=torch.bfloat16, device=device)
    x[-3:] = torch.tensor([1e4, torch.nan, 1e-9], dtype=torch.bfloat16)
    row = empty_row(device)
    q = quantize(x, torch.tensor(1.0, device=device), E4M3, row)
    assert q.data[-4:].view(torch.uint8).tolist() == [0x38, 0x7E, 0x7F, 0]
    assert row.tolist() == [x.numel(), x[-3].item(), 1, 1, 1, 0, 1]
    q = quantize(x, torch.tensor(2.0**-9, device=device), E4M3, row.zero_())
    assert row[STATISTICS.index("subnormal")] == x.numel() - 3


def test_a_buffer_on_another_device_is_refused(device: torch.device) -> None:
    set_backend("triton")
    with pytest.raises(ValueError, match="StatisticsBuffer with device='cuda"):
        quantize(torch.ones(9, device=device), torch.tensor(1.0), E4M3, empty_row(torch.device("cpu")))


def test_quantises_a_tensor_on_a_non_current_device(device: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    set_backend("triton")
    x = torch.randn(70, 70, device="cuda:1")
    row = empty_row(x.device)
    data = quantize(x, torch.tensor(3.0, device=x.device), E4M3, row).data
    set_backend("reference")
    assert torch.equal(data.cpu().float(), quantize(x.cpu(), torch.tensor(3.0), E4M3).data.float())
    assert row[0] == x.numel()
