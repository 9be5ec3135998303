"""`fp8scope remote-write` against a receiver that decodes with other people's decoders."""

from __future__ import annotations

import base64
import math
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import cramjam
import pytest
from contract.helpers.wire_client import WireClient
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from helpers.live_servers import Server

import fp8scope
from fp8scope.cli.main import main
from fp8scope.exporting.remote_write.samples import MAX_LABEL, MAX_RUNS
from fp8scope.exporting.remote_write.sender import RemoteWriteError, RemoteWriter, WriteReceiver
from fp8scope_dashboard.runs.models import Run, RunState

STALE: Final = 0x7FF0000000000002
Series = dict[tuple[tuple[str, str], ...], float]


def _message(file: Any, name: str, *fields: tuple[str, int, int, int, str]) -> None:
    message = file.message_type.add(name=name)
    for label, number, kind, repeated, type_name in fields:
        entry = message.field.add(name=label, number=number, type=kind, label=repeated)
        if type_name:
            entry.type_name = type_name


def write_request_class() -> Any:
    """The class of Prometheus' WriteRequest, from the fields of its prompb/remote.proto and types.proto."""
    kinds = descriptor_pb2.FieldDescriptorProto
    one, many = kinds.LABEL_OPTIONAL, kinds.LABEL_REPEATED
    file = descriptor_pb2.FileDescriptorProto(name="remote.proto", package="prometheus", syntax="proto3")
    _message(file, "Label", ("name", 1, kinds.TYPE_STRING, one, ""), ("value", 2, kinds.TYPE_STRING, one, ""))
    _message(
        file, "Sample", ("value", 1, kinds.TYPE_DOUBLE, one, ""), ("timestamp", 2, kinds.TYPE_INT64, one, "")
    )
    _message(
        file,
        "TimeSeries",
        ("labels", 1, kinds.TYPE_MESSAGE, many, ".prometheus.Label"),
        ("samples", 2, kinds.TYPE_MESSAGE, many, ".prometheus.Sample"),
    )
    _message(file, "WriteRequest", ("timeseries", 1, kinds.TYPE_MESSAGE, many, ".prometheus.TimeSeries"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("prometheus.WriteRequest"))


WRITE_REQUEST: Final = write_request_class()


@dataclass
class MetricsReceiver:
    """What was received. `statuses` are answered in turn, then 204."""

    url: str = ""
    requests: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)

    def latest(self) -> Series:
        return series_of(self.requests[-1])


def series_of(request: Any) -> Series:
    """The series of a request with their values."""
    read: Series = {}
    for series in request.timeseries:
        labels = tuple((label.name, label.value) for label in series.labels)
        (sample,) = series.samples
        assert list(labels) == sorted(labels) and dict(labels)["__name__"].startswith("fp8scope_")
        assert abs(sample.timestamp / 1000 - time.time()) < 60 and labels not in read
        read[labels] = sample.value
    return read


def is_stale(value: float) -> bool:
    return bool(struct.unpack("<Q", struct.pack("<d", value))[0] == STALE)


def named(series: Series, metric: str, **labels: str) -> list[float]:
    """The values of the series with a name and labels."""
    wanted = {"__name__": metric, **labels}
    return [value for pairs, value in series.items() if wanted.items() <= dict(pairs).items()]


@pytest.fixture
def receiver() -> Iterator[MetricsReceiver]:
    shown = MetricsReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            shown.headers.append(dict(self.headers))
            shown.requests.append(WRITE_REQUEST.FromString(bytes(cramjam.snappy.decompress_raw(body))))
            self.send_response(shown.statuses.pop(0) if shown.statuses else 204)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    shown.url = f"http://127.0.0.1:{server.server_port}/api/v1/write"
    yield shown
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def live(server: Server) -> WireClient:
    """A running run with a loss and a gradient norm that is not finite."""
    client = WireClient(server.url, server.token)
    client.register(name="live\x1b[1m" + "\x07" * 60, precision="fp8", group="g")
    client.send(client.batch(0, [1, 2], scalars={"loss": [3.5, 0.1], "grad_norm": [1.0, math.nan]}))
    return client


def writer_of(
    server: Server, receiver: MetricsReceiver, said: list[str] | None = None, max_runs: int = MAX_RUNS
) -> RemoteWriter:
    return RemoteWriter(
        fp8scope.Client(server.url, server.token, patience=0.0),
        WriteReceiver(url=receiver.url),
        project="default",
        query="state:running state:silent",
        scalars=["loss", "grad_norm", "lr"],
        say=(said if said is not None else []).append,
        max_runs=max_runs,
    )


def test_it_works(server: Server, live: WireClient, receiver: MetricsReceiver) -> None:
    writer_of(server, receiver).run(1.0, rounds=1)
    first, last = map(series_of, receiver.requests)
    run = str(live.run)
    assert named(first, "fp8scope_run_scalar", scalar="loss", run=run, project="default", group="g") == [0.1]
    (norm,) = named(first, "fp8scope_run_scalar", scalar="grad_norm")
    assert math.isnan(norm) and not is_stale(norm)
    assert named(first, "fp8scope_run_step", run=run) == [2.0] and named(
        first, "fp8scope_run_open_alerts"
    ) == [0.0]
    (name,) = {dict(labels)["name"] for labels in first}
    assert name.startswith("live\\x1b[1m\\x07") and len(name) == MAX_LABEL
    # Its end ends every series.
    assert last.keys() == first.keys() and all(map(is_stale, last.values()))
    headers = receiver.headers[0]
    assert headers["Content-Encoding"] == "snappy" and headers["Content-Type"] == "application/x-protobuf"
    assert headers["X-Prometheus-Remote-Write-Version"] == "0.1.0"


def test_series_of_a_run_end_with_it(server: Server, live: WireClient, receiver: MetricsReceiver) -> None:
    other = WireClient(server.url, server.token)
    other.register(name="other")
    other.send(other.batch(0, [1], scalars={"loss": [2.0]}))
    writer = writer_of(server, receiver)
    writer.send()
    finish = {"writer": str(live.writer), "seq": 1, "state": "finished", "rows_sent": 2, "points_sent": 4}
    assert live.request("POST", "/finish", json={**finish, "dropped": 0, "errors": 0}).status == 201
    writer.send()
    read = receiver.latest()
    assert all(is_stale(value) for value in named(read, "fp8scope_run_step", run=str(live.run)))
    assert named(read, "fp8scope_run_scalar", run=str(other.run)) == [2.0]
    writer.send()
    assert {dict(labels)["run"] for labels in receiver.latest()} == {str(other.run)}


def test_a_verdict_is_one_of_six(server: Server, receiver: MetricsReceiver) -> None:
    from dashboard.helpers.seeding import seed_project

    seeded = seed_project(server.project, 120)
    Run.objects.update(state=RunState.SILENT)
    writer_of(server, receiver).send()
    read = receiver.latest()
    client = fp8scope.Client(server.url, server.token)
    for run in (seeded.healthy, seeded.faulty):
        verdict = client.run(run.pk).verdict()
        values = named(read, "fp8scope_run_verdict", run=str(run.pk))
        assert sorted(values) == [0.0] * 5 + [1.0]
        assert named(read, "fp8scope_run_verdict", run=str(run.pk), verdict=verdict.verdict) == [1.0]
        expected = [] if verdict.delta is None else [verdict.delta]
        assert named(read, "fp8scope_run_difference", run=str(run.pk), unit=verdict.unit) == expected
    assert named(read, "fp8scope_run_verdict", run=str(seeded.baselines[0].pk)) == []


def test_a_receiver_that_is_away_gets_the_next_values(
    server: Server, live: WireClient, receiver: MetricsReceiver
) -> None:
    said: list[str] = []
    writer = writer_of(server, receiver, said)
    receiver.statuses = [503, 204]
    writer.send()
    assert "answers 503" in said[0]
    # Nothing was taken, so that nothing is ended.
    writer.end()
    assert len(receiver.requests) == 1
    writer.send()
    writer.end()
    assert len(receiver.requests) == 3 and all(map(is_stale, receiver.latest().values()))


@pytest.mark.parametrize("status", [400, 401, 404, 302])
def test_a_receiver_that_refuses_ends_it(
    server: Server, live: WireClient, receiver: MetricsReceiver, status: int
) -> None:
    receiver.statuses = [status]
    with pytest.raises(RemoteWriteError, match=f"answers {status}"):
        writer_of(server, receiver).run(1.0, rounds=3)
    assert len(receiver.requests) == 1


def test_a_server_that_is_away_is_said(server: Server, receiver: MetricsReceiver) -> None:
    said: list[str] = []
    writer = writer_of(
        Server("http://127.0.0.1:9", server.token, server.project, server.process, server.log), receiver, said
    )
    writer.send()
    assert "does not answer" in said[0] and not receiver.requests


def test_the_number_of_series_is_bounded(server: Server, receiver: MetricsReceiver) -> None:
    made = [Run(id=uuid.uuid4(), project=server.project, name="r", state=RunState.RUNNING) for _ in range(8)]
    Run.objects.bulk_create(made)
    writer_of(server, receiver, max_runs=5).send()
    assert len({dict(labels)["run"] for labels in receiver.latest()}) == 5 < MAX_RUNS


def test_the_command_runs_until_it_is_interrupted(
    server: Server, live: WireClient, receiver: MetricsReceiver, tmp_path: Path
) -> None:
    secret = tmp_path / "credentials"
    secret.write_text("ada:pass word\n")
    command = [sys.executable, "-m", "fp8scope", "remote-write", receiver.url, "--every", "1"]
    process = subprocess.Popen(
        [*command, "--basic-file", str(secret)],
        env={**os.environ, "FP8SCOPE_URL": server.url, "FP8SCOPE_TOKEN": server.token},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while len(receiver.requests) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in error and "pass word" not in error
    assert all(map(is_stale, receiver.latest().values()))
    expected = base64.b64encode(b"ada:pass word").decode()
    assert receiver.headers[0]["Authorization"] == f"Basic {expected}"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["ftp://x"], "begins with http"),
        (["http://user:secret@host/write"], "credentials belong into a file"),
        (["http://x", "--every", "0"], "seconds from 1 to 3600"),
        (["http://x", "--bearer-file", "a", "--basic-file", "b"], "not both"),
        (["http://x", *["--scalar", "a"] * 21], "at most 20 scalars"),
    ],
    ids=str,
)
def test_wrong_options(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as wrong:
        main(["remote-write", *arguments])
    error = capsys.readouterr().err
    assert wrong.value.code == 2 and text in error and "secret" not in error


@pytest.mark.parametrize(
    "content", ["", "a\nb", "x" * 5_000, "no colon"], ids=["empty", "lines", "long", "colon"]
)
def test_credentials_that_cannot_be_used(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str,
) -> None:
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)
    file = tmp_path / "credentials"
    file.write_text(content)
    assert main(["remote-write", "http://127.0.0.1:9/write", "--basic-file", str(file)]) == 1
    assert str(file) in capsys.readouterr().err
    assert main(["remote-write", "http://127.0.0.1:9/write", "--bearer-file", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err
