"""The hash of a batch: equal for equal data in any form, and different for other data."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from agent.helpers.loops import batch, language_model, regression, squares, train, update
from agent.helpers.wire_server import WireServer
from hypothesis import given
from hypothesis import strategies as st

import fp8scope
from fp8scope.observe.batch_hash import MAX_ROW, MODULUS, of_array, of_tensor

IDS = torch.randint(0, 50_000, (6, 40), generator=torch.Generator().manual_seed(0))
FEATURES = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1))


def test_it_works() -> None:
    # The numbers are part of the protocol: runs of different versions are compared.
    assert fp8scope.data_hash([1, 2, 3]) == 2424349021965508
    assert fp8scope.data_hash("text") == 673896950337025
    assert fp8scope.data_hash([[0.5, 1.5], [2.5, 3.5]]) == 2454473444652858


def test_it_is_the_same_in_another_process() -> None:
    code = "import fp8scope; print(fp8scope.data_hash({'a': ['x', 'y'], 'b': [1.5, 2]}))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(output) == fp8scope.data_hash({"a": ["x", "y"], "b": [1.5, 2]})


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "another type": lambda ids: ids.to(torch.int32),
    "NumPy": lambda ids: ids.numpy(),
    "lists": lambda ids: ids.tolist(),
    "by name": lambda ids: {"input_ids": ids},
    "nested parts": lambda ids: [{"a": ids[:2]}, (ids[2:],)],
    "more dimensions": lambda ids: ids.reshape(6, 8, 5),
    "other strides": lambda ids: ids.t().contiguous().t(),
    "another order": lambda ids: ids[[3, 0, 5, 1, 4, 2]],
}


@pytest.mark.parametrize("form", FORMS)
def test_equal_data_is_equal_in_any_form(form: str) -> None:
    assert fp8scope.data_hash(FORMS[form](IDS)) == fp8scope.data_hash(IDS)


def test_floats_count_as_float32() -> None:
    assert fp8scope.data_hash(FEATURES) == fp8scope.data_hash(FEATURES.double())
    assert fp8scope.data_hash(FEATURES.bfloat16()) == fp8scope.data_hash(FEATURES.bfloat16().float())
    assert fp8scope.data_hash(FEATURES.bfloat16()) != fp8scope.data_hash(FEATURES)
    assert fp8scope.data_hash(FEATURES.half().numpy()) == fp8scope.data_hash(FEATURES.half())


def test_micro_batches_and_ranks_add_up() -> None:
    parts = [IDS[:1], IDS[1:4], IDS[4:]]
    assert fp8scope.data_hash(*parts) == fp8scope.data_hash(IDS)
    assert sum(fp8scope.data_hash(part) for part in parts) % MODULUS == fp8scope.data_hash(IDS)


@given(st.integers(0, 5), st.integers(0, 39), st.integers(1, 10**6))
def test_any_change_is_seen(row: int, column: int, by: int) -> None:
    changed = IDS.clone()
    changed[row, column] += by
    assert fp8scope.data_hash(changed) != fp8scope.data_hash(IDS)


def test_the_order_within_a_sample_the_length_and_the_number_count() -> None:
    swapped = IDS.clone()
    swapped[0, 0], swapped[0, 1] = IDS[0, 1], IDS[0, 0]
    padded = torch.nn.functional.pad(IDS, (0, 1))
    hashes = [fp8scope.data_hash(each) for each in (IDS, swapped, padded, IDS[:5], torch.cat([IDS, IDS[:1]]))]
    assert len(set(hashes)) == 5
    assert fp8scope.data_hash(torch.tensor([1, 2])) != fp8scope.data_hash(torch.tensor([2, 1]))


def test_hashes_do_not_collide_and_use_all_bits() -> None:
    hashes = [fp8scope.data_hash(torch.tensor([[token]])) for token in range(5_000)]
    assert len(set(hashes)) == 5_000 and max(hashes) < MODULUS
    bits = np.array([[value >> bit & 1 for bit in range(53)] for value in hashes]).mean(axis=0)
    # Five standard deviations of a fair coin.
    assert abs(bits - 0.5).max() < 5 * 0.5 / np.sqrt(5_000)


@pytest.mark.parametrize(
    "tensor",
    [
        IDS,
        FEATURES,
        IDS[0],
        torch.tensor(5),
        IDS > 25_000,
        torch.arange(3 * (MAX_ROW + 7)).reshape(3, -1),
        FEATURES.to(torch.bfloat16),
        torch.complex(FEATURES, FEATURES),
        torch.full((2, 3), -7, dtype=torch.int8),
        torch.tensor([[2**63 - 1, -(2**63)]]),
    ],
)
def test_a_device_computes_the_same_as_the_host(tensor: torch.Tensor) -> None:
    on_host = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    assert int(of_tensor(tensor)) % MODULUS == of_array(on_host.numpy()) % MODULUS
    assert fp8scope.data_hash(tensor) == of_array(on_host.numpy()) % MODULUS


@pytest.mark.parametrize(
    "batch",
    [(), None, object(), {}, [], torch.empty(0, 4), np.zeros((0,)), [[]], torch.empty(2, device="meta")],
)
def test_without_data_it_is_0(batch: Any) -> None:
    assert fp8scope.data_hash(batch) == 0


def test_ragged_and_odd_values_are_hashed() -> None:
    odd: list[Any] = [[1], [1, 2], ["a", None], 2**70, float("nan"), b"bytes", np.array(["a", "b"]), {3, 4}]
    hashes = {fp8scope.data_hash(odd[:count]) for count in range(len(odd) + 1)}
    assert len(hashes) == len(odd) + 1
    nested: list[Any] = [1]
    for _ in range(100):
        nested = [nested, "x"]
    fp8scope.data_hash(nested)


def rows_of(number: int) -> int:
    return fp8scope.data_hash(batch(number))


@pytest.mark.usefixtures("online")
class TestInRuns:
    def test_attach_hashes_the_inputs_of_the_model(self, server: WireServer) -> None:
        model, optimizer = regression()
        run = fp8scope.attach(model, optimizer, data_hash=True)
        train(model, optimizer, 3)
        model.eval()
        model(batch(100))
        assert run.finish().errors == 0
        assert server.run.scalars("data_hash") == [rows_of(number) for number in range(3)]

    def test_micro_batches_of_a_step_add_up(self, server: WireServer) -> None:
        model, optimizer = regression()
        run = fp8scope.attach(model, optimizer, data_hash=True)
        for step in range(2):
            for micro in range(3):
                squares(model, 3 * step + micro).backward()  # type: ignore[no-untyped-call]
            update(optimizer)
        run.finish()
        expected = [fp8scope.data_hash(*(batch(3 * step + micro) for micro in range(3))) for step in range(2)]
        assert server.run.scalars("data_hash") == expected

    def test_a_hash_that_the_script_logs_wins(self, server: WireServer) -> None:
        model, optimizer = regression()
        run = fp8scope.attach(model, optimizer, data_hash=True)
        for number in range(2):
            squares(model, number).backward()  # type: ignore[no-untyped-call]
            update(optimizer)
            run.log(data_hash=number)
        run.finish()
        assert server.run.scalars("data_hash") == [0.0, 1.0]

    def test_without_the_option_there_is_none(self, server: WireServer) -> None:
        model, optimizer = language_model()
        run = fp8scope.attach(model, optimizer)
        model(IDS % 90).sum().backward()
        update(optimizer)
        run.finish()
        assert "data_hash" not in server.run.rows[0]["scalars"]

    def test_steps_by_hand_of_a_watched_model(self, server: WireServer) -> None:
        model, optimizer = regression()
        run = fp8scope.init(data_hash=True)
        run.watch(model, optimizer)
        for number in range(2):
            with run.step() as step:
                loss = squares(model, number)
                loss.backward()  # type: ignore[no-untyped-call]
                update(optimizer)
                step.log(loss=loss)
        model(batch(5))
        assert run.finish().errors == 0
        assert server.run.scalars("data_hash") == [rows_of(0), rows_of(1)]

    def test_a_model_without_tensors_is_warned_of(self, server: WireServer, caplog: Any) -> None:
        class Own(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(3))

            def forward(self) -> torch.Tensor:
                return self.weight.square().sum()

        model = Own()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = fp8scope.attach(model, optimizer, data_hash=True)
        for _ in range(2):
            model().backward()
            update(optimizer)
        assert run.finish().errors == 0
        assert caplog.text.count("the model is called with no tensor") == 1
