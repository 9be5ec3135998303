"""A step's anatomy: its parts are exact, do not overlap, and add up to the step's time."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from agent.helpers.ticking import Loop, Model, Slow, x
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from fp8scope.guard import Guard
from fp8scope.observe.timing import Measures
from fp8scope.observe.timing.anatomy import (
    CHECKPOINT,
    COMMUNICATION,
    DATA_PART,
    FORWARD_PART,
    REST,
    PartTimes,
)

Tick = Callable[[float], None]


class Samples(Dataset[torch.Tensor]):
    """Four samples that take 10 units each."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        Slow.tick(10)
        return torch.ones(4)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[None]:
    """A group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_it_works(loop: Loop, clock: Tick, tmp_path: Path) -> None:
    loop.measures.begin()
    for batch in DataLoader(Samples(), batch_size=4):
        clock(1)
        out = loop.model(batch)
        clock(0.5)
        out.sum().backward()
        clock(0.25)
        loop.optimizer.step()
    assert loop.anatomy() == {
        "data": 40, "forward": 2, "loss": 0.5, "backward": 3, "optimizer": 5, "rest": 1.25,
    }  # fmt: skip


def test_without_a_loader_the_wait_for_a_forward_pass_is_data(loop: Loop, clock: Tick) -> None:
    loop.measures.begin()
    clock(7)
    loop.model(x()).sum().backward()
    assert loop.anatomy() == {"data": 7, "forward": 2, "backward": 3}


def test_a_checkpoint_is_taken_out_of_the_part_that_it_interrupts(
    loop: Loop, clock: Tick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Weight:
        def __reduce__(self) -> tuple[type[int], tuple[int]]:
            clock(20)
            return int, (1,)

    path = tmp_path / "weights.pt"
    loop.measures.begin()
    loop.model(x()).sum().backward()
    torch.save(Weight(), path)
    loop.optimizer.step()
    first = loop.anatomy()
    # What a thread saves in the background stalls nothing.
    loop.measures.begin()
    thread = threading.Thread(target=torch.save, args=(Weight(), path))
    thread.start()
    thread.join()
    loop.model(x()).sum().backward()
    assert first["checkpoint"] == 20 and first["optimizer"] == 5
    assert loop.anatomy() == {"data": 20, "forward": 2, "backward": 3}


def test_collectives_and_the_wait_for_reduced_gradients_are_communication(
    ranks: None, loop: Loop, clock: Tick
) -> None:
    def reduce(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        # Queued within the backward pass, as by data parallelism: it runs when all gradients are computed.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: clock(30))
        return future

    parallel = DistributedDataParallel(loop.model)
    parallel.register_comm_hook(None, reduce)
    loop.measures.begin()
    out = parallel(x())
    dist.all_reduce(torch.ones(1))
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    work.wait()
    out.sum().backward()
    assert loop.anatomy() == {"forward": 2, "backward": 3, "communication": 30}


def test_everything_is_restored_when_the_last_run_ends(ranks: None) -> None:
    def functions() -> tuple[Any, ...]:
        return (
            torch.save,
            dist.all_reduce,
            dist.distributed_c10d.all_reduce,
            DataLoader.__iter__,
            dist.Work.wait,
        )

    before, measures = functions(), Measures(Guard())
    measures.watch(Model())
    measures.begin()
    assert all(one is not other for one, other in zip(functions(), before, strict=True))
    measures.close()
    assert functions() == before


def test_a_compiled_graph_holds_the_original_functions(ranks: None) -> None:
    model = Model()
    measures = Measures(Guard())
    measures.watch(model)
    measures.begin()

    def reduced(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x + 1

    compiled = torch.compile(reduced, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2, 2]
    measures.close()


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_operations_count_as_the_hardwares(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    model, guard = Checkpointed(), Guard()
    measures = Measures(guard)
    measures.watch(model)
    ratios = []
    for _ in range(2):
        measures.begin()
        model(torch.ones(2, 8, requires_grad=True)).sum().backward()
        reading = measures.end({})
        assert reading is not None
        scalars = reading.read()
        ratios.append(scalars["hardware_flops_per_second"] / scalars["model_flops_per_second"])
    measures.close()
    # Without reentering, recomputation ends before the last product of each layer: nothing needs its result.
    assert ratios == pytest.approx([4 / 3 if reentrant else 7 / 6] * 2) and guard.errors == 0


def test_parts_do_not_overlap() -> None:
    times = PartTimes()
    times.interruption(CHECKPOINT, 3)
    times.interval(FORWARD_PART, 10)
    times.interruption(DATA_PART, 4)
    times.interruption(COMMUNICATION, 1)
    times.interval(DATA_PART, 8)
    assert times.seconds[CHECKPOINT] == 3 and times.seconds[FORWARD_PART] == 7
    assert times.seconds[DATA_PART] == 4 and times.seconds[REST] == 3 and sum(times.seconds) == 18
