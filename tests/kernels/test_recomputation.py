"""Activation checkpointing with delayed scales: gradients are those without it, whatever comes in between."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.process_group import run_ranks
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.checkpoint import checkpoint

from fp8scope_kernels import DelayedScaling, StatisticsBuffer, convert, observe

RECIPE = DelayedScaling(history_length=2)
MICRO_BATCHES = 4


class Layers(nn.Module):
    """Two layers of which the first is called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        convert(self, RECIPE, include=("first", "second"))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(torch.tanh(self.first(x)))))
        return x + y


def batch(index: int) -> Tensor:
    """Micro-batches grow, so that the scales of two calls differ."""
    generator = torch.Generator().manual_seed(index)
    return 3.0**index * torch.randn(8, 32, generator=generator)


Run = Callable[[nn.Module, Tensor], Tensor]


def nested(reentrant: bool) -> Run:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            y: Tensor = model(checkpoint(model, x, use_reentrant=reentrant))
            return y

        y: Tensor = checkpoint(inner, x, use_reentrant=reentrant)
        return y

    return run


RUNS: dict[str, Run] = {
    "plain": lambda model, x: model(model(x)),
    "by hooks": lambda model, x: checkpoint(lambda y: model(model(y)), x, use_reentrant=False),
    "to the end": lambda model, x: checkpoint(
        lambda y: model(model(y)), x, use_reentrant=False, early_stop=False
    ),
    "reentrant": lambda model, x: checkpoint(lambda y: model(model(y)), x, use_reentrant=True),
    "two regions": lambda model, x: checkpoint(
        model, checkpoint(model, x, use_reentrant=False), use_reentrant=True
    ),
    "nested": nested(False),
    "nested, reentrant": nested(True),
}


def first_first(losses: list[Any]) -> None:
    for loss in losses:
        loss.backward()


def last_first(losses: list[Any]) -> None:
    sum(losses).backward()


ORDERS = {"first first": first_first, "last first": last_first}


def gradients(run: Run, order: Callable[[list[Any]], None], repeats: int = 1) -> dict[str, Tensor]:
    model, buffer = Layers(), StatisticsBuffer()
    observe(model, buffer)
    inputs = [batch(index).requires_grad_() for index in range(MICRO_BATCHES)]
    for _ in range(repeats):
        order([run(model, x).square().mean() for x in inputs])
    results = {f"x{index}": x.grad for index, x in enumerate(inputs)}
    results |= {name: parameter.grad for name, parameter in model.named_parameters()}
    results |= {"rows": buffer.data.clone(), **dict(model.named_buffers())}
    return {name: value for name, value in results.items() if value is not None}


@pytest.mark.parametrize("run", [name for name in RUNS if name != "plain"])
@pytest.mark.parametrize("order", ORDERS)
def test_it_works(run: str, order: str) -> None:
    """Bit for bit, with several forward calls before the backward ones, twice."""
    assert_same(gradients(RUNS[run], ORDERS[order], 2), gradients(RUNS["plain"], ORDERS[order], 2), run)


def assert_same(results: dict[str, Tensor], expected: dict[str, Tensor], run: str) -> None:
    """All bits; but a reentrant region adds its own gradients of a weight first, in another order."""
    assert results.keys() == expected.keys()
    for name, value in results.items():
        if name.endswith(("weight", "bias")) and "by hooks" not in run:
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5 * value.abs().max().item())
        else:
            assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("run", ["by hooks", "nested"])
def test_a_region_is_recomputed_for_each_backward_call(run: str) -> None:
    def twice(losses: list[Any]) -> None:
        for loss in losses:
            loss.backward(retain_graph=True)
        last_first(losses)

    assert_same(gradients(RUNS[run], twice), gradients(RUNS["plain"], twice), run)


class Stage(nn.Module):
    def __init__(self, layers: nn.Module, run: str) -> None:
        super().__init__()
        self.layers, self.run = layers, RUNS[run]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.run(self.layers, x)
        return y


def stages() -> list[nn.Module]:
    """A stage each for two ranks, with weights that differ."""
    models = [Layers(), Layers()]
    with torch.no_grad():
        models[1].second.weight.mul_(2)
    return list(models)


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def state_of(model: nn.Module, buffer: StatisticsBuffer) -> list[Tensor]:
    grads = [parameter.grad for parameter in model.parameters()]
    return [*(grad for grad in grads if grad is not None), buffer.data.clone(), *model.buffers()]


def job_pipeline(rank: int, size: int) -> dict[str, list[Tensor]]:
    """Gradients, rows and scaling state of this rank's stage, over two steps."""
    results = {}
    for run in ("plain", "by hooks", "nested"):
        model, buffer = stages()[rank], StatisticsBuffer()
        observe(model, buffer)
        # With known shapes, torch does not try the model on zeros.
        example = batch(0).requires_grad_()
        stage = PipelineStage(
            Stage(model, run), rank, size, torch.device("cpu"), batch(0) if rank == 0 else example, example
        )
        schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_of, scale_grads=False)
        data = torch.cat([batch(index) for index in range(MICRO_BATCHES)])
        for _ in range(2):
            if rank == 0:
                schedule.step(data)
            else:
                schedule.step(target=data.flip(1))
        results[run] = state_of(model, buffer)
        dist.barrier()
    return results


def test_a_pipeline_is_one_process() -> None:
    """1F1B, with and without checkpointing: one process that takes the micro-batches in turn, bit for bit."""
    models, buffers = stages(), [StatisticsBuffer(), StatisticsBuffer()]
    for model, buffer in zip(models, buffers, strict=True):
        observe(model, buffer)
    for _ in range(2):
        for index in range(MICRO_BATCHES):
            x = batch(index)
            y: Any = x
            for model in models:
                y = RUNS["plain"](model, y)
            first_first([loss_of(y, x.flip(1))])
    for rank, results in enumerate(run_ranks(job_pipeline, 2)):
        expected = state_of(models[rank], buffers[rank])
        for run, result in results.items():
            assert all(map(torch.equal, result, expected)), f"rank {rank}, {run}"
