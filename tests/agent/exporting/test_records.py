"""Records and messages of TensorBoard's event files, against its own reader and published checksums."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope.binary.encoding import field_text, varint
from fp8scope.exporting.tensorboard.messages import event, hparam_values, version_event
from fp8scope.exporting.tensorboard.records import masked_checksums, record, scalar_records


def unmasked(checksum: int) -> int:
    rotated = (checksum - 0xA282EAD8) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


@pytest.mark.parametrize(
    ("content", "checksum"),
    [
        # RFC 3720, appendix B.4.
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
    ],
    ids=["zeros", "ones", "increasing", "decreasing", "digits"],
)
def test_checksums_are_those_of_the_standard(content: bytes, checksum: int) -> None:
    rows = np.frombuffer(content * 2, np.uint8).reshape(2, -1)
    assert [unmasked(int(value)) for value in masked_checksums(rows)] == [checksum] * 2


@pytest.mark.parametrize(
    ("number", "encoded"),
    [(0, "00"), (127, "7f"), (128, "8001"), (300, "ac02"), (2**64 - 1, "ffffffffffffffffff01")],
)
def test_whole_numbers(number: int, encoded: str) -> None:
    assert varint(number).hex() == encoded


@given(
    st.dictionaries(
        st.integers(0, 2**62), st.tuples(st.floats(), st.floats(0, 4e9)), min_size=1, max_size=40
    ),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200),
)
def test_tensorboards_reader_reads_every_event(points: dict[int, tuple[float, float]], tag: str) -> None:
    """With its own check of both checksums of each record."""
    from tensorboard.compat.proto import event_pb2

    steps = np.array(sorted(points), np.int64)
    values = np.array([points[step][0] for step in steps.tolist()])
    times = np.array([points[step][1] for step in steps.tolist()])
    data = scalar_records(tag, times, steps, values)
    position, read = 0, []
    while position < len(data):
        (length,) = struct.unpack_from("<Q", data, position)
        assert data[position : position + 12] == record(data[position + 12 : position + 12 + length])[:12]
        read.append(event_pb2.Event.FromString(data[position + 12 : position + 12 + length]))
        position += 16 + length
    assert [message.step for message in read] == steps.tolist()
    assert [message.wall_time for message in read] == times.tolist()
    summaries = [message.summary.value[0] for message in read]
    assert {summary.tag for summary in summaries} == {tag}
    stored = np.array([summary.tensor.double_val[0] for summary in summaries])
    assert stored.tobytes() == values.tobytes()


def test_the_file_is_read_whole(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    path = tmp_path / "events.out.tfevents.1"
    values = hparam_values("g", 1.5, None, 3, {"lr": 1e-3, "n": 2**53, "on": False, "name": "\udc80"})
    records = [record(version_event(1.5)), *(record(event(1.5, 0, value)) for value in values)]
    series = scalar_records("loss", np.arange(3.0), np.array([1, 200, 70_000]), np.array([1.0, 2.0, 3.0]))
    path.write_bytes(b"".join(records) + series)
    events = list(EventFileLoader(str(path)).Load())
    assert events[0].file_version == "brain.Event:2"
    assert [message.step for message in events[4:]] == [1, 200, 70_000]


def test_a_damaged_record_is_noticed(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

    path = tmp_path / "events.out.tfevents.1"
    whole = record(version_event(1.5)) + record(event(1.5, 1, field_text(1, "x")))
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert len(list(RawEventFileLoader(str(path)).Load())) == 1
