"""Rows to an Arrow batch: nothing is added, nothing left out, and the same rows are the same bytes."""

import math
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from agent.helpers.wire_messages import read_batch
from hypothesis import given
from hypothesis import strategies as st

from fp8scope.delivery.arrow_encoding import CONTENT_TYPE, EncodedBatch, encode_batch
from fp8scope.observe.snapshot import EMPTY
from fp8scope.recording.records import Row, TornRecordError

STATISTICS = ("numel", "amax", "scale", "saturated", "underflow", "subnormal", "nonfinite")
IDS = {
    "run": "11111111-1111-4111-8111-111111111111",
    "writer": "22222222-2222-4222-8222-222222222222",
    "seq": 3,
}

numbers = st.floats(width=64)
# Of a tensor, NaN is what is not known.
statistics = st.floats(width=64, allow_nan=False) | st.just(math.nan)
extra_names = st.sampled_from(["sq_error", "blocks", "update_ratio"])
names = st.text("abcXYZ019_./-", min_size=1, max_size=12)
scalars = st.dictionaries(names, numbers, max_size=5)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    tensors = draw(st.integers(0, 4))
    matrix = np.array(
        draw(st.lists(st.lists(statistics, min_size=7, max_size=7), min_size=tensors, max_size=tensors))
    ).reshape(tensors, 7)
    lists = st.lists(statistics, min_size=tensors, max_size=tensors)
    extras = {name: np.array(values) for name, values in draw(st.dictionaries(extra_names, lists)).items()}
    # The number of elements is a count.
    matrix[:, 0] = draw(st.lists(st.integers(0, 9), min_size=tensors, max_size=tensors))
    moment = draw(st.integers(0, 2**52))
    return Row(
        step=draw(st.integers(0, 2**62)),
        time_us=moment,
        dropped=draw(st.integers(0, 9)),
        scalars=draw(scalars),
        statistics=matrix,
        extras=extras,
    )


def encode(batch: list[Row]) -> EncodedBatch:
    return encode_batch(batch, STATISTICS, **IDS)  # type: ignore[arg-type]


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def known_values(row: Row) -> int:
    """How many statistics a row has something to say of."""
    observed = row.statistics[row.statistics[:, 0] != 0]
    if not len(row.statistics):
        return 0
    return int(np.isfinite(observed).sum() + np.isinf(observed).sum()) + sum(
        int((~np.isnan(values)).sum()) for values in row.extras.values()
    )


def test_it_works() -> None:
    matrix = np.array([[8.0, 3.5, 2.0, 1, 2, 3, 4], [0.0] * 7])
    first = Row(step=1, time_us=1_700_000_000_000_000, dropped=0, scalars={"loss": 2.0}, statistics=matrix)
    second = Row(
        step=2, time_us=1_700_000_000_500_000, dropped=5, scalars={"lr": float("nan")}, statistics=EMPTY
    )
    batch = encode([first, second])
    found = read_batch(batch.body, CONTENT_TYPE)
    assert (batch.rows, batch.points) == (2, 9) and found["points"] == 9
    assert (found["run"], found["writer"], found["seq"], found["dropped"]) == (*IDS.values(), 5)
    one, two = found["rows"]
    assert one["scalars"] == {"loss": 2.0, "lr": None} and two["scalars"]["loss"] is None
    assert math.isnan(two["scalars"]["lr"])
    assert one["tensors"]["amax"] == [3.5, None] and two["tensors"]["amax"] == [None, None]
    assert one["time"].isoformat() == "2023-11-14T22:13:20+00:00"


@given(st.lists(rows(), min_size=1, max_size=5))
def test_what_goes_in_comes_out(batch: list[Row]) -> None:
    batch.sort(key=lambda row: row.step)
    encoded = encode(batch)
    found = read_batch(encoded.body, CONTENT_TYPE)
    assert encoded.points == found["points"] == sum(len(row.scalars) + known_values(row) for row in batch)
    for row, got in zip(batch, found["rows"], strict=True):
        assert got["step"] == row.step
        kept = {name: value for name, value in got["scalars"].items() if value is not None}
        assert kept.keys() == row.scalars.keys()
        assert all(same(kept[name], value) for name, value in row.scalars.items())
        for index, name in enumerate(STATISTICS):
            values = got["tensors"].get(name, [])
            for tensor, value in enumerate(values):
                known = tensor < len(row.statistics) and row.statistics[tensor, 0] != 0
                expected = row.statistics[tensor, index] if known else math.nan
                assert same(math.nan if value is None else value, expected)
        for name, values in row.extras.items():
            extra = got["tensors"].get(name, [])[: len(values)]
            assert all(same(math.nan if v is None else v, w) for v, w in zip(extra, values, strict=False))


@given(rows())
def test_a_row_survives_the_spool(row: Row) -> None:
    read = Row.decode(row.encode())
    assert (read.step, read.time_us, read.dropped) == (row.step, row.time_us, row.dropped)
    assert list(read.scalars) == list(row.scalars)
    assert np.array_equal(list(read.scalars.values()), list(row.scalars.values()), equal_nan=True)
    assert np.array_equal(read.statistics, row.statistics, equal_nan=True)
    assert read.statistics.shape == row.statistics.shape
    assert list(read.extras) == list(row.extras)
    for name, values in row.extras.items():
        assert np.array_equal(read.extras[name], values, equal_nan=True)


@given(rows(), st.data())
def test_a_row_that_is_cut_off_is_torn(row: Row, data: st.DataObject) -> None:
    payload = row.encode()
    cut = data.draw(st.integers(0, len(payload) - 1))
    with pytest.raises(TornRecordError):
        Row.decode(payload[:cut])


@given(st.lists(rows(), min_size=1, max_size=4))
def test_the_same_rows_are_the_same_bytes(batch: list[Row]) -> None:
    again = [Row.decode(row.encode()) for row in batch]
    assert encode(batch).body == encode(again).body


PROGRAM = """
import hashlib, sys
import numpy as np
from fp8scope.delivery.arrow_encoding import encode_batch
from fp8scope.recording.records import Row
rows = [
    Row(step=i, time_us=i, dropped=0, scalars={"loss": i / 7}, statistics=np.arange(i * 7.0).reshape(i, 7))
    for i in range(1, 50)
]
names = ("numel", "amax", "scale", "saturated", "underflow", "subnormal", "nonfinite")
print(hashlib.sha256(encode_batch(rows, names, run="r", writer="w", seq=1).body).hexdigest())
print("pandas" in sys.modules, "pyarrow.compute" in sys.modules)
"""


def test_the_same_rows_are_the_same_bytes_in_another_process() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    # And nothing large is imported on the way, while a training is going on.
    assert found.pop().splitlines()[1] == "False False"


def test_a_batch_is_compressed() -> None:
    batch = [
        Row(
            step=step,
            time_us=step,
            dropped=0,
            scalars={},
            statistics=np.tile([64.0, 1, 1, 0, 0, 0, 0], (500, 1)),
        )
        for step in range(20)
    ]
    assert len(encode(batch).body) < 20 * 500 * 7 * 8 / 20
    with pa.ipc.open_stream(encode(batch).body) as stream:
        assert stream.read_all().num_rows == 20


def test_no_rows_are_no_batch() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        encode([])
