"""Events beside TensorBoard's own reader: values of every writer and type, configuration, any bytes."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent.helpers.event_files import scalars, session_start, tensor, tensorboard_says, write
from agent.helpers.import_files import PNG
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto

from fp8scope.event_files.events import EventReader, LoggedEvent, plain_value
from fp8scope.event_files.log_run import LogRun, PlacedMedia


def read(event: Any) -> LoggedEvent:
    read = EventReader().read(event.SerializeToString())
    assert read is not None
    return read


def values(event: Any) -> list[tuple[str, float]]:
    return [(value.tag, value.value) for value in read(event).values]


def logged(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """The values of a directory by tag."""
    by_tag: dict[str, list[tuple[int, float]]] = {}
    run, has_more = LogRun(), True
    run.add_files(sorted(directory.glob("*tfevents*")))
    while has_more:
        placed, has_more = run.read()
        for value in placed:
            if isinstance(value, PlacedMedia):
                continue
            by_tag.setdefault(value.names[0], []).append((value.step, value.value))
    return by_tag


def test_it_works() -> None:
    event = read(scalars(7, 1.5, train__loss=0.5, lr=math.inf))
    assert (event.wall_time, event.step, event.is_start) == (1.5, 7, False)
    assert [(value.tag, value.value) for value in event.values] == [("train/loss", 0.5), ("lr", math.inf)]
    assert read(session_start(5)).is_start and read(session_start(5)).step == 5


def test_what_torch_and_tensorboardx_write(tmp_path: Path) -> None:
    from tensorboardX import SummaryWriter as OtherWriter
    from torch.utils.tensorboard import SummaryWriter

    for name, made in (("torch", SummaryWriter), ("other", OtherWriter)):
        writer = made(str(tmp_path / name))
        for step in range(50):
            writer.add_scalar("loss", 3 - step / 7, step)
            writer.add_scalar("val/loss", math.nan if step == 3 else step, step, walltime=1.79e9 + step)
        writer.add_histogram("weights", np.arange(99.0), 3)
        writer.add_image("image", np.zeros((3, 8, 8), np.uint8), 1)
        writer.add_scalars("both", {"a": 1.0, "b": 2.0}, 4)
        writer.close()
    writer = SummaryWriter(str(tmp_path / "torch"), filename_suffix=".new")
    for step in range(9):
        writer.add_scalar("tensor", step / 3, step, new_style=True)
        writer.add_scalar("double", step / 3, step, new_style=True, double_precision=True)
    writer.close()
    for directory in (path.parent for path in tmp_path.rglob("*tfevents*")):
        said, got = tensorboard_says(directory), logged(directory)
        assert said and got.keys() == said.keys()
        for tag, series in said.items():
            np.testing.assert_array_equal(got[tag], series)


DTYPES = (np.float32, np.float64, np.float16, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16)
LISTS = {
    "float_val": (1, -2.5),
    "double_val": (2, 1e300),
    "int_val": (3, -7),
    "int64_val": (9, -(2**62)),
    "bool_val": (10, True),
    "half_val": (19, 0x3E00),
    "uint32_val": (22, 2**32 - 1),
    "uint64_val": (23, 2**64 - 1),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_one_element(dtype: Any) -> None:
    for value in (3, 0):
        assert values(tensor(1, "a", np.array(value, dtype))) == [("a", value)]
        assert values(tensor(1, "a", np.array([value], dtype))) == [("a", value)]
    assert values(tensor(1, "a", np.array([1, 2], dtype))) == []


@pytest.mark.parametrize("name", LISTS)
def test_tensors_whose_values_are_lists(name: str) -> None:
    dtype, value = LISTS[name]
    entry = Summary.Value(tag="a", tensor=TensorProto(dtype=dtype, **{name: [value]}))
    entry.metadata.plugin_data.plugin_name = "scalars"
    expected = 1.5 if name == "half_val" else float(value)
    assert values(Event(summary=Summary(value=[entry]))) == [("a", expected)]
    getattr(entry.tensor, name).append(value)
    assert values(Event(summary=Summary(value=[entry]))) == []


def test_bfloat16() -> None:
    for content in ({"tensor_content": b"\xc0\x3f"}, {"half_val": [0x3FC0]}):
        entry = Summary.Value(tag="a", tensor=TensorProto(dtype=14, **content))
        entry.metadata.plugin_data.plugin_name = "scalars"
        assert values(Event(summary=Summary(value=[entry]))) == [("a", 1.5)]


def test_a_plugin_is_named_once() -> None:
    """Later values of a tag need no metadata; and what another plugin writes is no scalar."""
    reader = EventReader()
    first, later = tensor(1, "a", 1.0), tensor(2, "a", 2.0)
    later.summary.value[0].ClearField("metadata")
    both = [reader.read(event.SerializeToString()) for event in (first, later)]
    assert [event and event.values[0].value for event in both] == [1.0, 2.0]
    assert values(later) == [] and values(tensor(1, "a", 1.0, "histograms")) == []
    by_class = tensor(1, "a", 1.0, "mine")
    by_class.summary.value[0].metadata.data_class = DATA_CLASS_SCALAR
    assert values(by_class) == [("a", 1.0)]


def test_hyperparameters_and_texts(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    hparams = {"lr": 1e-3, "layers": 12, "name": "gpt", "fused": True}
    writer.add_hparams(hparams, {"best": 1.0}, run_name=".")
    writer.close()
    run = LogRun()
    run.add_files(sorted(tmp_path.glob("*tfevents*")))
    while run.read()[1]:
        pass
    assert run.config == hparams and run.config_changed
    assert read(tensor(1, "seq/text_summary", b"4096", "text")).config == {"seq": 4096}
    assert read(tensor(1, "long/text_summary", b"x" * 2_000, "text")).config == {}
    assert read(tensor(1, "lines/text_summary", b"a\nb", "text")).config == {}


@pytest.mark.parametrize(
    ("words", "value"),
    [("4096", 4096), ("-1", -1), ("1e-4", 1e-4), ("True", True), ("None", None), ("nan", "nan"), ("", "")]
    + [("9" * 19, float("9" * 19)), ("²", "²"), ("1_0", "1_0")],
)
def test_texts_become_values(words: str, value: Any) -> None:
    assert plain_value(words) == value


def test_a_tag_that_is_too_long_is_left_out() -> None:
    assert values(scalars(1, **{"x" * 1_001: 1.0, "y": 2.0})) == [("y", 2.0)]


def test_mutated_events_are_read_or_counted() -> None:
    """20,000 mutations of events of every kind: an event or a count, never an exception."""
    chance, reader = random.Random(7), EventReader()
    picture = Summary.Value(tag="a", image=Summary.Image(height=1, width=1, encoded_image_string=PNG))
    originals = [
        scalars(3, loss=1.0, val__loss=2.0).SerializeToString(),
        tensor(4, "a", np.float64(1.5)).SerializeToString(),
        tensor(4, "seq/text_summary", b"12", "text").SerializeToString(),
        tensor(4, "seq/text_summary", b"a\nb", "text").SerializeToString(),
        tensor(4, "batch", np.array([b"1", b"1", PNG], object), "images").SerializeToString(),
        Event(step=4, summary=Summary(value=[picture])).SerializeToString(),
        session_start(9).SerializeToString(),
    ]
    for _ in range(20_000):
        data = bytearray(chance.choice(originals))
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(data) + 1)
            data[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
        event = reader.read(bytes(data))
        assert event is None or all(isinstance(value.value, float) for value in event.values)
        assert event is None or all(isinstance(media.content, bytes) for media in event.media)
    assert reader.unreadable > 1_000


def test_it_reads_old_and_new_files_of_a_directory_in_order(tmp_path: Path) -> None:
    write(tmp_path / "events.out.tfevents.2.b", [scalars(2, a=2.0)])
    write(tmp_path / "events.out.tfevents.1.a", [scalars(1, a=1.0)])
    assert logged(tmp_path) == {"a": [(1, 1.0), (2, 2.0)]}
