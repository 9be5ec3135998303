"""Object stores for tests: an S3 server as a process, and a folder; and old runs to move into them."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from contract.helpers.histograms import counts, message
from contract.helpers.wire_client import WireClient
from dashboard.helpers import compacting
from dashboard.helpers.reading import Reader
from dashboard.helpers.recorder import Recorder
from django.db import connection
from django.utils import timezone
from helpers.waiting import wait_until
from pyarrow.fs import FileSelector, FileSystem, LocalFileSystem

from fp8scope_dashboard.exports.content import content_of
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.settings.cold_store import ColdStoreSettings
from fp8scope_dashboard.telemetry import histograms, queries
from fp8scope_dashboard.telemetry.models import Histogram, Rolling, Tile

BUCKET = "old-runs"
SECRET = "only%2Ffor+tests"
MOVED = ("telemetry_tile", "telemetry_histogram")


@dataclass(frozen=True)
class S3Server:
    """An S3 server on a port of this machine."""

    process: subprocess.Popen[bytes]
    port: int

    def url(self, folder: str, **more: str) -> str:
        parameters = {"endpoint_override": f"127.0.0.1:{self.port}", "scheme": "http", "region": "us-east-1"}
        query = "&".join(f"{name}={value}" for name, value in (parameters | more).items())
        return f"s3://tester:{SECRET}@{BUCKET}/{folder}?{query}"


@contextmanager
def s3_server(log: Path) -> Iterator[S3Server]:
    """Start a server, with a bucket."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            wait_until(lambda: answers(port), "the S3 server", seconds=60)
            server = S3Server(process, port)
            FileSystem.from_uri(server.url("", allow_bucket_creation="true"))[0].create_dir(BUCKET)
            yield server
        finally:
            process.kill()


def answers(port: int) -> bool:
    """Return whether something listens on a port of this machine."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@dataclass(frozen=True)
class ColdFolder:
    """The files of a cold store, from the outside."""

    settings: ColdStoreSettings

    @property
    def _opened(self) -> tuple[FileSystem, str]:
        return FileSystem.from_uri(self.settings.url)

    def names(self) -> list[str]:
        system, folder = self._opened
        infos = system.get_file_info(FileSelector(folder, allow_not_found=True))
        return sorted(info.base_name for info in infos if info.is_file)

    def read(self, name: str) -> bytes:
        system, folder = self._opened
        with system.open_input_stream(f"{folder}/{name}") as file:
            return bytes(file.read())

    def write(self, name: str, content: bytes) -> None:
        system, folder = self._opened
        if isinstance(system, LocalFileSystem):
            system.create_dir(folder)
        with system.open_output_stream(f"{folder}/{name}") as file:
            file.write(content)

    def remove(self, name: str) -> None:
        system, folder = self._opened
        system.delete_file(f"{folder}/{name}")


def old_run(steps: int = 1_100) -> Recorder:
    """An ended, compacted run of two ranks with histograms, silent for a year. Some values are missing."""
    first = Recorder.of_new_run(["a.input", "b.weight"])
    second = first.another(rank=1, tensors=["b.weight", "a.input"])
    random = np.random.default_rng(0)
    for begin in range(0, steps, 100):
        part = range(begin, min(steps, begin + 100))
        for recorder in (first, second):
            values = random.normal(size=(len(part), 2))
            values[random.random(values.shape) < 0.1] = np.nan
            overflow = random.integers(0, 3, (len(part), 2)).astype(float)
            recorder.send(
                list(part),
                {"loss": random.random(len(part)).tolist()},
                {"amax": values, "saturated": overflow, "numel": np.full((len(part), 2), 64.0)},
            )
    for recorder in (first, second):
        sample(recorder, range(0, steps, 250), random)
    finish(first)
    return first


def sample(recorder: Recorder, steps: range, random: np.random.Generator) -> None:
    """Store histograms of both tensors of a writer."""
    client = WireClient("", None, recorder.run.pk, recorder.writer)
    for step in steps:
        bins = {index: counts(e0=float(random.integers(1, 99)), em3=5.0, bad=1.0) for index in (0, 1)}
        seq = 100_000 + step
        body = message(client, seq, step, bins)
        histograms.append(recorder.run.pk, recorder.writer, seq, step, [0, 1], body)


def finish(recorder: Recorder) -> None:
    """End the run, compact it, and make it old."""
    Run.objects.filter(pk=recorder.run.pk).update(state="finished")
    compacting.compact(recorder)
    Run.objects.filter(pk=recorder.run.pk).update(heartbeat_at=timezone.now() - timedelta(days=365))
    assert not Rolling.objects.get(run=recorder.run).pending


def everything(recorder: Recorder) -> list[Any]:
    """The results of all readers: queries, the API over HTTP, and the export."""
    run = recorder.run
    reader = Reader(run.project)
    last = max(queries.scalar(run.pk, "loss").steps.tolist())
    results = compacting.everything(recorder)
    for tensor in (0, 1):
        results.append(repr(queries.histogram(run.pk, tensor)))
        results.append(repr(queries.rank_histograms(run.pk, tensor, 300)))
        results.append(repr(queries.tensor_histograms(run.pk, tensor)))
    results.append(repr(queries.step_histograms(run.pk)))
    results.append(repr(queries.by_rank(run.pk, "amax", np.array([0, 1]), last)))
    results.append(repr(queries.unmerged_rows(run.pk, ["amax"], [0, 1], 0, last)))
    for path, query in (
        ("series", {"tensor": "a.input", "statistic": "amax"}),
        ("heatmap", {"statistic": "saturation_rate", "columns": 9, "format": "json"}),
    ):
        results.append(reader.json(f"/runs/{run.pk}/{path}", **query))
    exported = content_of(run, with_binary=True)
    results += [repr(piece.to_pylist()) for piece in exported.pieces()]
    return results


def warm_bodies() -> int:
    """The number of bodies of tensors in PostgreSQL."""
    tiles = Tile.objects.filter(name__startswith="tensor:", location=None)
    return tiles.count() + Histogram.objects.filter(location=None).count()


def cold_bodies() -> int:
    """The number of bodies in the cold store. In PostgreSQL they are empty."""
    total = 0
    with connection.cursor() as cursor:
        for table in MOVED:
            cursor.execute(
                f"SELECT count(*), sum(octet_length(body)) FROM {table} WHERE location IS NOT NULL"
            )
            number, size = cursor.fetchone()
            assert not size
            total += number
    return total
