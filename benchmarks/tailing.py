"""Measure `fp8scope tail DIR`: reading, sending, and the lag of a value. Prints one JSON line.

`read_per_s` is the rate at which our reader gives the values of a file with `--steps` steps of three tags;
`read_tensorboard_per_s` is that of TensorBoard's own EventAccumulator on the same file. `sent_values_per_s`
is the rate at which the file is stored by an installation (`fp8scope up`: web, worker, beat, PostgreSQL with
fsync, Redis). For the lag a process writes a step every `--pause` seconds while the directory is followed
with the default interval of one second. The lag of a value is the time from the writer's clock to the
server's acknowledgement, which follows the commit.

    python benchmarks/tailing.py [--steps 200000] [--seconds 30] [--pause 0.05]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

WRITER = """
import sys, time
from tensorboardX import SummaryWriter
writer = SummaryWriter(sys.argv[1], flush_secs=1)
end, step = time.time() + float(sys.argv[2]), 0
while time.time() < end:
    writer.add_scalar("loss", 1 / (step + 1), step)
    writer.flush()
    step += 1
    time.sleep(float(sys.argv[3]))
writer.close()
"""
TAGS = ("loss", "learning_rate", "grad_norm")


def write(path: Path, steps: int) -> None:
    """Write one event a step and tag, as SummaryWriter does."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for step in range(steps):
            for tag in TAGS:
                summary = Summary(value=[Summary.Value(tag=tag, simple_value=step / steps)])
                event = Event(wall_time=1.79e9 + step, step=step, summary=summary)
                writer.write(event.SerializeToString())
        writer.flush()


def read_rates(path: Path, steps: int) -> dict[str, float]:
    """Values per second of both readers."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from fp8scope.event_files.log_run import LogRun

    began, values, has_more, run = time.perf_counter(), 0, True, LogRun()
    run.add_files([path])
    while has_more:
        placed, has_more = run.read()
        values += len(placed)
    ours = values / (time.perf_counter() - began)
    began = time.perf_counter()
    reader = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    count = sum(len(reader.Scalars(tag)) for tag in reader.Tags()["scalars"])
    theirs = count / (time.perf_counter() - began)
    if not values == count == steps * len(TAGS):
        raise SystemExit(f"{values} and {count} values were read of {steps * len(TAGS)}")
    return {
        "read_per_s": round(ours),
        "read_tensorboard_per_s": round(theirs),
        "over": round(ours / theirs, 2),
    }


class TimedTransport:
    """A transport that notes when batches were acknowledged."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.acknowledged: list[tuple[float, int]] = []

    def send(self, method: str, path: str, body: bytes, content_type: str = "application/json") -> Any:
        outcome = self._transport.send(method, path, body, content_type)
        if path.endswith("/batches"):
            self.acknowledged.append((time.time(), int(outcome.answer.get("rows", 0))))
        return outcome


def lags(directory: Path, transport: TimedTransport, options: argparse.Namespace) -> Iterator[float]:
    """The lags of the values of a training, in seconds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from fp8scope.event_files.follower import DirectoryFollower, FollowOptions

    command = [sys.executable, "-c", WRITER, str(directory / "run"), str(options.seconds), str(options.pause)]
    writer = subprocess.Popen(command)
    follower = DirectoryFollower(directory, transport, FollowOptions(), say=lambda message: None)
    while writer.poll() is None:
        follower.turn()
        time.sleep(1.0)
    follower.turn()
    reader = EventAccumulator(str(directory / "run"), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    written = iter(event.wall_time for event in reader.Scalars("loss"))
    for moment, rows in transport.acknowledged:
        for _ in range(rows):
            yield moment - next(written)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--pause", type=float, default=0.05)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    from chaos import make_token

    from fp8scope.config import Settings
    from fp8scope.delivery.transport import Transport
    from fp8scope.event_files.follower import DirectoryFollower, FollowOptions
    from fp8scope_dashboard.servers.supervisor import Supervisor

    with tempfile.TemporaryDirectory() as temporary:
        logs = Path(temporary) / "logs"
        file = logs / "run" / "events.out.tfevents.1.host"
        write(file, options.steps)
        figures: dict[str, Any] = read_rates(file, options.steps)
        with Supervisor(Path(temporary) / "up", port=0) as supervisor:
            transport = Transport(Settings(url=supervisor.url, token=make_token(supervisor)))
            began = time.perf_counter()
            follower = DirectoryFollower(logs, transport, FollowOptions(), say=lambda message: None)
            follower.turn()
            figures["sent_values_per_s"] = round(follower.sent / (time.perf_counter() - began))
            (live := Path(temporary) / "live").mkdir()
            seconds = list(lags(live, TimedTransport(transport), options))
    p50, p95 = np.percentile(seconds, [50, 95])
    figures |= {
        "lag_p50_s": round(float(p50), 2),
        "lag_p95_s": round(float(p95), 2),
        "lag_values": len(seconds),
    }
    print(json.dumps({"benchmark": "tailing", "cpus": os.cpu_count(), **figures}))


if __name__ == "__main__":
    main()
