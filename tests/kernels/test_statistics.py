"""The statistics buffer: catalogue, growth, and what accumulates how."""

import pytest
import torch

from fp8scope_kernels import E4M3, E5M2, STATISTICS, StatisticsBuffer, TensorInfo, quantize


def test_it_works() -> None:
    buffer = StatisticsBuffer(capacity=4)
    slot = buffer.register("mlp.up.weight", format=E4M3, shape=(32, 16), role="weight")
    quantize(torch.ones(32, 16), torch.tensor(2.0), E4M3, slot.row)
    assert buffer.data.tolist() == [[512.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0]]
    assert slot.info == TensorInfo(
        name="mlp.up.weight", module="mlp.up", role="weight", format="E4M3", shape=(32, 16), numel=512
    )


def test_the_statistics_have_the_agreed_order() -> None:
    assert STATISTICS == ("numel", "amax", "scale", "saturated", "underflow", "subnormal", "nonfinite")


def test_calls_within_a_step_accumulate() -> None:
    buffer = StatisticsBuffer()
    row = buffer.register("a.input", format=E4M3, shape=(-1, 4), role="input").row
    quantize(torch.tensor([300.0, torch.nan, 1e-9, 2.0]), torch.tensor(2.0), E4M3, row)
    quantize(torch.tensor([500.0, -500.0, 2.0**-8]), torch.tensor(1.0), E4M3, row)
    stats = dict(zip(STATISTICS, row.tolist(), strict=True))
    assert stats == {
        "numel": 7.0,
        "amax": 500.0,
        "scale": 1.0,
        "saturated": 3.0,
        "underflow": 1.0,
        "subnormal": 1.0,
        "nonfinite": 1.0,
    }


def test_a_new_step_starts_from_zero() -> None:
    buffer = StatisticsBuffer(capacity=2)
    row = buffer.register("a.input", format=E4M3, shape=(-1, 4), role="input").row
    quantize(torch.full((4,), 9.0), torch.tensor(1.0), E4M3, row)
    buffer.zero_()
    assert torch.count_nonzero(buffer.storage) == 0
    quantize(torch.full((4,), 3.0), torch.tensor(1.0), E4M3, row)
    assert row[:2].tolist() == [4.0, 3.0]


def test_it_grows_and_keeps_what_was_counted() -> None:
    buffer = StatisticsBuffer(capacity=1)
    first = buffer.register("a.input", format=E4M3, shape=(-1, 4), role="input")
    first.row[0] = 7
    slots = [buffer.register(f"b{i}.input", format=E5M2, shape=(-1,), role="input") for i in range(9)]
    assert buffer.capacity >= 10
    assert first.row[0] == 7
    first.row[1] = 3.0
    slots[-1].row[0] = 5
    assert buffer.data[:, 0].tolist() == [7.0, *[0.0] * 8, 5.0]
    assert buffer.data[0, 1] == 3.0
    assert [info.name for info in buffer.catalogue] == ["a.input", *(f"b{i}.input" for i in range(9))]
    assert len(buffer) == 10


def test_the_same_name_gets_the_same_row() -> None:
    buffer = StatisticsBuffer()
    one = buffer.register("a.input", format=E4M3, shape=(-1, 4), role="input")
    two = buffer.register("a.input", format=E4M3, shape=(-1, 4), role="input")
    assert (one.index, two.index, len(buffer)) == (0, 0, 1)
    with pytest.raises(ValueError, match="already registered as input"):
        buffer.register("a.input", format=E4M3, shape=(-1, 4), role="weight")


def test_numel_is_unknown_if_a_dimension_is() -> None:
    buffer = StatisticsBuffer()
    assert buffer.register("a.input", format=E4M3, shape=(-1, 4), role="input").info.numel == 0
    assert buffer.register("scalar", format=E4M3, shape=(), role="other").info.numel == 1
    assert buffer.catalogue[1].module == ""


@pytest.mark.parametrize("capacity", [0, -1, 10**9])
def test_an_invalid_capacity_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="capacity must be from 1"):
        StatisticsBuffer(capacity=capacity)


def test_a_tensor_needs_a_name() -> None:
    with pytest.raises(ValueError, match="needs a name"):
        StatisticsBuffer().register("", format=E4M3, shape=(1,), role="input")
