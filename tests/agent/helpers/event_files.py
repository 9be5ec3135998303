"""Event files for tests, written by TensorBoard's own classes, and what its own reader says of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util import tensor_util

WALL = 1_790_000_000.0


def scalars(step: int, wall_time: float | None = None, **values: float) -> Any:
    """An event with values of tags; `__` in a name stands for `/`."""
    summary = Summary(
        value=[Summary.Value(tag=tag.replace("__", "/"), simple_value=value) for tag, value in values.items()]
    )
    return Event(wall_time=WALL + step if wall_time is None else wall_time, step=step, summary=summary)


def session_start(step: int) -> Any:
    return Event(wall_time=WALL, step=step, session_log=SessionLog(status=SessionLog.START))


def version() -> Any:
    return Event(wall_time=WALL, file_version="brain.Event:2")


def tensor(step: int, tag: str, value: Any, plugin: str = "scalars") -> Any:
    """An event with a tensor, as TensorFlow 2 writes scalars."""
    entry = Summary.Value(tag=tag, tensor=tensor_util.make_tensor_proto(value))
    entry.metadata.plugin_data.plugin_name = plugin
    return Event(wall_time=WALL + step, step=step, summary=Summary(value=[entry]))


def write(path: Path, events: Iterable[Any], *, append: bool = False) -> Path:
    """Write an event file, beginning with its version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab" if append else "wb") as file:
        writer = RecordWriter(file)
        for event in events if append else [version(), *events]:
            writer.write(event.SerializeToString())
        writer.flush()
    return path


def tensorboard_says(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """The steps and values of each tag by TensorBoard's reader."""
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    said = {tag: [(e.step, float(e.value)) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
    for tag in reader.Tags()["tensors"]:
        if reader.SummaryMetadata(tag).plugin_data.plugin_name == "scalars":
            said[tag] = [
                (e.step, float(tensor_util.make_ndarray(e.tensor_proto))) for e in reader.Tensors(tag)
            ]
    return said
