"""Steps that are shorter than a switch of threads: each row is its own, is there in time and is whole."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from agent.helpers.wire_server import WireServer
from torch import nn

import fp8scope
from fp8scope.config import Settings
from fp8scope.guard import Guard
from fp8scope.recording import recorder as module
from fp8scope.recording.entries import Document, Origin
from fp8scope.recording.recorder import Recorder
from fp8scope.recording.records import RecordKind, Row
from fp8scope.recording.registration import blank_registration
from fp8scope.recording.spool import Spool
from fp8scope.run import Run
from fp8scope_kernels import fp8_layers


def watched(settings: Settings, layers: int = 40) -> tuple[Run, torch.Tensor, nn.Module]:
    """A run, and the memory that its model's layers write their statistics to."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
    fp8scope.convert(model, fp8scope.DelayedScaling())
    run = Run(settings, blank_registration("short"))
    run.watch(model, every=0)
    return run, next(fp8_layers(model))[1].slots["input"].buffer.data, model


def rows(spool: Spool) -> list[Row]:
    found, position = [], 0
    while (record := spool.read(position)) is not None:
        if record.kind is RecordKind.ROW:
            found.append(Row.decode(record.payload))
        position = record.end
    return found


def test_it_works(server: WireServer, settings: Settings) -> None:
    """The memory that a step's statistics lie in is written from, cleared and used again: not too early."""
    run, _, model = watched(settings)
    buffer = next(fp8_layers(model))[1].slots["input"].buffer
    for number in range(1, 1001):
        with run.step() as step:
            buffer.data.fill_(float(number))
            step.log(loss=float(number))
    report = run.finish(120)
    assert report.complete and report.errors == report.rows_dropped == 0
    assert server.run.steps == list(range(1, 1001))
    for row in server.run.rows:
        assert set(row["tensors"]["amax"]) == {float(row["step"])} == {row["scalars"]["loss"]}


def test_each_is_in_the_spool_when_the_next_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The promise, but for its bound: this machine's disk may be slow for a moment.
    monkeypatch.setattr(module, "WAIT_AT_MOST", 60.0)
    monkeypatch.setattr(module, "WAIT_ALLOWANCE", 60.0)
    offline = Settings(mode="offline", directory=tmp_path)
    run, _, _ = watched(offline, layers=4)
    for number in range(1, 301):
        with run.step():
            pass
        if number % 50 == 0:
            spool = run.session.writers.pipeline.spool
            assert spool is not None
            steps = [row.step for row in rows(spool)]
            assert steps[: number - 1] == list(range(1, number))
    run.finish()


def test_what_the_agent_adds_is_the_scripts_to_override(server: WireServer, settings: Settings) -> None:
    run = Run(settings, blank_registration("times"))
    with run.step(tokens=100):
        pass
    with run.step(tokens=50) as step:
        step.log(step_seconds=7.0, tokens=3.0)
    with run.step():
        pass
    assert run.finish(60).errors == 0
    first, second, third = (row["scalars"] for row in server.run.rows)
    assert first["tokens"] == 100 and first["step_seconds"] > 0
    assert first["tokens_per_second"] == pytest.approx(100 / first["step_seconds"])
    assert (second["step_seconds"], second["tokens"]) == (7.0, 3.0)
    # What was counted is not what was logged.
    assert run.state_dict()["tokens"] == 150
    assert third["tokens"] is third["tokens_per_second"] is None and third["step_seconds"] > 0


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """One without its thread, for which a slow write would make `catch_up` wait."""
    monkeypatch.setattr(module, "UNNOTICED", 60.0)
    made = Recorder(Settings(), Guard(), Origin())
    made.spool = Spool(tmp_path)
    made._quick = True
    yield made
    made.spool.close()


def text(name: str) -> Document:
    return Document(RecordKind.ROW, lambda: name.encode())


def names(recorder: Recorder) -> list[str]:
    assert recorder.spool is not None
    found, position = [], 0
    while (record := recorder.spool.read(position)) is not None:
        if record.kind is RecordKind.ROW:
            found.append(record.payload.decode())
        position = record.end
    return found


def test_the_training_thread_writes_no_more_than_is_due(recorder: Recorder) -> None:
    for name in "abcde":
        recorder.add(text(name))
    recorder.catch_up(but=2)
    assert names(recorder) == ["a", "b", "c"]
    recorder.catch_up()
    assert names(recorder) == ["a", "b", "c", "d"]
    recorder.catch_up(but=0)
    assert names(recorder) == ["a", "b", "c", "d", "e"]


def test_the_recorder_leaves_what_comes_while_it_writes(recorder: Recorder) -> None:
    """Else it and a training thread that makes short steps would wait for each other at each of them."""
    added = threading.Event()

    def adds() -> bytes:
        if not added.is_set():
            added.set()
            recorder.add(text("later"))
        return b"first"

    recorder.add(Document(RecordKind.ROW, adds))
    assert recorder.drain() and names(recorder) == ["first"]
    assert recorder.drain() and names(recorder) == ["first", "later"]
    assert not recorder.drain()


def test_an_entry_is_done_with_once_it_is_written_or_given_up(recorder: Recorder) -> None:
    done: list[str] = []

    class Finished(Document):
        __slots__ = ()

        def done(self) -> None:
            done.append(",".join(names(recorder)))

    def broken() -> bytes:
        raise ValueError("planned")

    recorder.add(Finished(RecordKind.ROW, lambda: b"good"))
    recorder.add(Finished(RecordKind.ROW, broken))
    recorder.drain()
    assert done == ["good", "good"]
