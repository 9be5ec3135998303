"""What the end of a step promises: the row of the one before has been written; and what bounds its wait."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8scope.config import Settings
from fp8scope.guard import Guard
from fp8scope.recording import recorder as module
from fp8scope.recording.entries import Document, Origin
from fp8scope.recording.recorder import Recorder
from fp8scope.recording.records import Bytes, RecordKind
from fp8scope.recording.spool import Spool


class OnDevice:
    """Values that are still being computed, until the test releases them."""

    def __init__(self) -> None:
        self.ready = threading.Event()

    def is_ready(self) -> bool:
        return self.ready.is_set()

    def wait(self) -> None:
        self.ready.wait()


def row(text: str, source: OnDevice | None = None) -> Document:
    return Document(RecordKind.ROW, lambda: text.encode(), source)


def rows(spool: Spool) -> list[str]:
    found, position = [], 0
    while (record := spool.read(position)) is not None:
        if record.kind is RecordKind.ROW:
            found.append(record.payload.decode())
        position = record.end
    return found


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    opened = Spool(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def recorder(spool: Spool) -> Recorder:
    """One without its thread: what is written is written by `catch_up`."""
    made = Recorder(Settings(), Guard(), Origin(3, "node", 2))
    made.spool = spool
    made._quick = True
    return made


def test_it_works(recorder: Recorder, spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    # There is no recorder's thread to wait for here, however slow this machine's disk is for a moment.
    monkeypatch.setattr(module, "UNNOTICED", 60.0)
    for number in range(20):
        recorder.add(row(str(number)))
        recorder.catch_up()
        assert set(rows(spool)) >= {str(before) for before in range(number)}


def test_a_write_that_is_under_way_is_not_done(
    recorder: Recorder, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken from the queue is not written: the end of the next step waits for it."""
    writing, go_on = threading.Event(), threading.Event()
    append = spool.append

    def slow(kind: RecordKind, *payload: Bytes) -> None:
        if kind is RecordKind.ROW and payload == (b"first",):
            writing.set()
            go_on.wait(60)
        append(kind, *payload)

    monkeypatch.setattr(spool, "append", slow)
    monkeypatch.setattr(module, "WAIT_AT_MOST", 60.0)
    monkeypatch.setattr(module, "WAIT_ALLOWANCE", 60.0)
    recorder.add(row("first"))
    other = threading.Thread(target=recorder.drain)
    other.start()
    writing.wait(60)
    recorder.add(row("second"))
    threading.Timer(0.05, go_on.set).start()
    recorder.catch_up()
    assert "first" in rows(spool)
    other.join()


def test_what_another_thread_writes_is_waited_for(
    recorder: Recorder, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing run reads its last steps back: those that the recorder's thread has just taken, too."""
    writing, go_on = threading.Event(), threading.Event()
    append = spool.append

    def slow(kind: RecordKind, *payload: Bytes) -> None:
        writing.set()
        go_on.wait(60)
        append(kind, *payload)

    monkeypatch.setattr(spool, "append", slow)
    recorder.add(row("last"))
    other = threading.Thread(target=recorder.drain)
    other.start()
    writing.wait(60)
    threading.Timer(0.05, go_on.set).start()
    recorder.drain()
    assert rows(spool) == ["last"]
    other.join()


def test_a_device_is_not_waited_for(recorder: Recorder, spool: Spool) -> None:
    computing = OnDevice()
    recorder.add(row("first", computing))
    for quick in (True, False):
        recorder._quick = quick
        recorder.add(row("later"))
        recorder.catch_up()
        assert rows(spool) == []
    computing.ready.set()
    assert recorder.drain()
    assert rows(spool) == ["first", "later", "later"]
    assert not recorder.drain()


@pytest.mark.parametrize("quick", [True, False])
def test_the_wait_is_bounded_and_so_are_all_of_them(
    quick: bool, recorder: Recorder, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAIT_AT_MOST", 0.05)
    monkeypatch.setattr(module, "WAIT_ALLOWANCE", 0.2)
    recorder._quick = quick
    # A disk that does not answer blocks the writing thread, which holds the lock.
    with recorder.lock:
        for _ in range(30):
            recorder.add(row("waits"))
            recorder.catch_up()
        spent = recorder._waited
        assert spent >= 0.2 - module.WAIT_SHARE * (time.monotonic() - recorder._began)
        recorder.add(row("does not"))
        recorder.catch_up()
        # A share of the run's time is all that comes back.
        assert recorder._waited - spent <= 0.05 + module.UNNOTICED + 1.0
    assert recorder.drain() and len(rows(spool)) == 31


def test_who_writes_comes_first_and_begins_each_file(recorder: Recorder, spool: Spool) -> None:
    recorder.add(Document(RecordKind.REGISTRATION, lambda: b'{"name":"x"}'))
    recorder.add(row("first"))
    recorder.drain()
    kinds, position = [], 0
    while (record := spool.read(position)) is not None:
        kinds.append(record.kind)
        position = record.end
    assert kinds == [RecordKind.REGISTRATION, RecordKind.TENSORS, RecordKind.ROW]
    assert [kind for kind, _ in recorder.preamble()] == [RecordKind.REGISTRATION, RecordKind.TENSORS]
    assert b'"attempt":2' in recorder.preamble()[1][1] and b'"rank":3' in recorder.preamble()[1][1]


def test_a_row_that_cannot_be_made_is_dropped_and_counted(recorder: Recorder, spool: Spool) -> None:
    def broken() -> bytes:
        raise ValueError("planned")

    recorder.add(Document(RecordKind.ROW, broken))
    recorder.add(row("good"))
    recorder.drain()
    assert rows(spool) == ["good"]
    assert (recorder._guard.dropped, recorder._guard.errors) == (1, 1)
