"""Statistics tables: several devices, one catalogue, and the cost of an unsampled step."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from agent.helpers.watching import AMAX, NUMEL, Watched
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8scope.observe.collector import Collector
from fp8scope.observe.snapshot import Assembly
from fp8scope.observe.tensors import StatisticsTables
from fp8scope.observe.tensors.buffers import NOTES, SAMPLED_STATISTICS
from fp8scope_kernels import E4M3, SAMPLE_SIZE, STATISTICS, DelayedScaling, convert

CPU, OTHER = torch.device("cpu"), torch.device("meta")


def fp8_model(layers: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(layers)])
    convert(model, DelayedScaling())
    return model


def test_it_works() -> None:
    """A model on two devices: each has a table, and the catalogue is one."""
    tables = StatisticsTables()
    first, second, sampled = tables.on(CPU), tables.on(OTHER), tables.on(CPU, every_step=False)
    assert tables.on(CPU) is first and first is not second and first is not sampled
    for table, name in ((first, "a"), (second, "b"), (first, "c"), (sampled, "d")):
        table.buffer.register(f"{name}.input", format=E4M3, shape=(4,), role="input")
        tables.place()
    assert [info.name for info in tables.catalogue] == ["a.input", "b.input", "c.input", "d.input"]
    assert (first.positions, second.positions, sampled.positions) == ([0, 2], [1], [3])

    assembly = Assembly(sampled=False)
    rows = {first: [[1.0] * 7, [3.0] * 7], second: [[2.0] * 7]}
    for table, values in rows.items():
        flat = np.array([value for row in values for value in row] + [9.0, 9.0])
        assert assembly.add(table, len(values), flat) == 7 * len(values)
    observed = assembly.finish({})
    assert observed.statistics.tolist() == [[1.0] * 7, [2.0] * 7, [3.0] * 7]


def test_a_model_on_two_devices_can_be_watched() -> None:
    model = fp8_model(3)
    model[1].to(OTHER)
    collector = Collector(lambda kind, error: pytest.fail(str(error)))
    assert collector.watch(model) == 9
    grown = collector.new_tensors()
    assert grown is not None
    assert [info.name for info in grown[1]] == [
        f"{layer}.{role}" for layer in (0, 2, 1) for role in ("input", "weight", "grad_output")
    ]
    assert collector.new_tensors() is None


def test_the_same_name_in_two_tables_is_one_tensor() -> None:
    tables = StatisticsTables()
    for device in (CPU, OTHER):
        tables.on(device).buffer.register("a.input", format=E4M3, shape=(4,), role="input")
    tables.place()
    assert len(tables.catalogue) == 1
    for seen in (0, 1):
        assembly = Assembly(sampled=False)
        for index, table in enumerate(tables.all):
            assembly.add(table, 1, np.full(7, 5.0 if index == seen else 0.0))
        assert assembly.finish({}).statistics.tolist() == [[5.0] * 7]


def test_assembles_sampled_statistics_of_their_tensors() -> None:
    tables = StatisticsTables()
    table = tables.on(CPU)
    slots = [table.buffer.register(f"{name}.input", format=E4M3, shape=(4,), role="input") for name in "abcd"]
    tables.place()
    tables.sample(True)
    for slot in slots[:3]:
        slot.row[0] = 4
    slots[0].block_row[:] = torch.tensor([8.0, 1.0, 0.5, 1.0, 2.0])
    sample = slots[1].sample_row
    assert sample is not None
    sample[0], sample[1], sample[2 + 150] = 0.25, 9.0, 4.0
    table.note("update_ratio", [slots[2], slots[3]], torch.tensor([0.125, 7.0]))
    assembly = Assembly(sampled=True)
    flat = torch.cat([part.reshape(-1) for part in table.parts()]).numpy()
    assert assembly.add(table, 4, flat) == len(flat) == 4 * (len(STATISTICS) + 5 + SAMPLE_SIZE + len(NOTES))
    observed = assembly.finish({"loss": 1.0})
    extras = observed.extras
    assert set(extras) == {*SAMPLED_STATISTICS[:7], "update_ratio"} and observed.scalars == {"loss": 1.0}
    np.testing.assert_array_equal(extras["scale_max"], [2.0, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(extras["sq_error"], [np.nan, 0.25, np.nan, np.nan])
    # A tensor that was not seen in this step says nothing.
    np.testing.assert_array_equal(extras["update_ratio"], [np.nan, np.nan, 0.125, np.nan])
    assert observed.histogram_tensors.tolist() == [1] and observed.histogram_counts[0, 150] == 4.0
    table.clear()
    assert not table.buffer.data.any() and torch.isnan(table.notes).all()


def test_notes_grow_with_the_table() -> None:
    table = StatisticsTables().on(CPU, capacity=2)
    slots = []
    for index in range(9):
        slots.append(table.buffer.register(f"{index}.input", format=E4M3, shape=(4,), role="input"))
        table.note("history_amax", [slots[-1]], torch.tensor([float(index)]))
    assert table.notes[:, NOTES.index("history_amax")].tolist() == list(range(9))


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def test_unsampled_steps_run_no_more_operators_after_a_sampled_one() -> None:
    model = fp8_model(20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watched = Watched(model, optimizer, every=4)
    x = torch.randn(4, 32)

    def end_of_step() -> int:
        with Operators() as operators:
            watched.collector.snapshot({})
        return sum(operators.seen.values())

    for number in range(1, 7):
        watched.collector.begin(number)
        model(x).sum().backward()
        optimizer.step()
        watched.collector.new_tensors()
        count = end_of_step()
        assert count <= 8 or number in (1, 5), (number, count)


def test_an_abandoned_sampled_step_leaves_no_statistics() -> None:
    model = fp8_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = Watched(model, optimizer, every=2)

    def train() -> None:
        model(torch.ones(4, 32)).sum().backward()
        optimizer.step()

    watched.collector.begin(1)
    train()
    watched.collector.discard()
    step = watched.step(train)
    assert step.row("0.input")[NUMEL] == 4 * 32 and step.row("0.input")[AMAX] == 1.0
    assert step.row("0.weight.update")[NUMEL] == 32 * 32
    assert step.histograms["0.input"].sum() == 4 * 32


def test_other_sources_work_when_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("not today")

    problems: list[str] = []
    monkeypatch.setattr("fp8scope.observe.tensors.Float8Layers.__init__", broken)
    collector = Collector(lambda kind, error: problems.append(f"{kind}: {error}"))
    assert collector.watch(fp8_model()) == 6
    assert problems == ["watching the model: not today"]
