"""Models that torch compiles, and models that several processes train together."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8scope.guard import Guard
from fp8scope.observe.timing import Measures


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


@pytest.fixture
def measures() -> Iterator[Measures]:
    guard = Guard()
    made = Measures(guard)
    yield made
    made.close()
    torch._dynamo.reset()
    assert guard.errors == 0


def train(
    measures: Measures, call: Callable[[torch.Tensor], torch.Tensor], optimizer: Any
) -> dict[str, float]:
    """Three steps; what the last one measured."""
    found: dict[str, float] = {}
    for _ in range(3):
        measures.begin()
        torch.autograd.backward(call(torch.ones(4, 8)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        reading = measures.end({})
        assert reading is not None
        found = reading.read()
    return found


def compiled(one: nn.Module) -> tuple[Any, list[int]]:
    """The model compiled as one graph, or an error; and a list that grows with each compilation."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    return torch.compile(one, backend=backend, fullgraph=True), graphs


def test_it_works(measures: Measures) -> None:
    fast, graphs = compiled(model())
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.1)
    measures.watch(fast, optimizer)
    found = train(measures, fast, optimizer)
    assert found["time_forward"] > 0 and found["time_backward"] > 0 and found["time_optimizer"] > 0
    # What the weights tell: 2 operations a weight and row, three times.
    seconds = sum(value for name, value in found.items() if name.startswith("time_"))
    assert found["model_flops_per_second"] * seconds == pytest.approx(3 * 2 * 4 * 128)
    assert len(graphs) == 1


def test_times_a_model_compiled_after_it_was_watched(measures: Measures) -> None:
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    measures.watch(plain, optimizer)
    fast, graphs = compiled(plain)
    found = train(measures, fast, optimizer)
    # One graph as without us; what happens in it is seen as a whole.
    assert len(graphs) == 1
    assert found["time_forward"] == 0 and found["time_optimizer"] > 0 and found["grad_norm"] > 0


def test_does_not_change_the_compiled_graph(measures: Measures) -> None:
    plain, watched = model(), model()
    measures.watch(watched)
    sizes = []
    for one in (plain, watched):
        fast, graphs = compiled(one)
        fast(torch.ones(4, 8))
        sizes.append(graphs)
    assert sizes[0] == sizes[1]


def test_times_a_model_compiled_in_place(measures: Measures) -> None:
    one = model()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    measures.watch(one, optimizer)
    one.compile(backend="eager", fullgraph=True)
    assert train(measures, one, optimizer)["time_optimizer"] > 0


def test_gradient_reduction_counts_as_backward(measures: Measures, tmp_path: Path) -> None:
    """DDP's reducer ends the backward pass by a callback of its own: ours comes after it."""
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
    try:
        wrapped = nn.parallel.DistributedDataParallel(model())
        order: list[str] = []
        wrapped.register_comm_hook(None, lambda state, bucket: _reduced(order, bucket))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        measures.watch(wrapped, optimizer)
        (hooks,) = measures._models.values()
        ended = hooks._backward_ended

        def noted() -> None:
            order.append("ended")
            ended()

        hooks._backward_ended = noted  # type: ignore[method-assign]
        found = train(measures, wrapped, optimizer)
        assert found["time_backward"] > 0
        assert order[-2:] == ["reduced", "ended"]
    finally:
        dist.destroy_process_group()


def _reduced(order: list[str], bucket: Any) -> Any:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def finish() -> None:
        order.append("reduced")
        future.set_result(bucket.buffer())

    # Later than the last gradient: the backward pass has to wait for it.
    threading.Timer(0.05, finish).start()
    return future
