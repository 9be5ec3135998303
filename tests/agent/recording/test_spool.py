"""The spool: what was appended is read back, torn tails are recognised, bounds hold, old segments go."""

import contextlib
import fcntl
import os
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope.delivery.cursor import Cursor, SendProgress
from fp8scope.recording.records import FRAME, Record, RecordKind
from fp8scope.recording.segments import Owner, SpoolBusyError
from fp8scope.recording.spool import MAGIC, Spool, SpoolFullError, find_spools


def everything(spool: Spool, position: int = 0) -> list[Record]:
    found = []
    while (record := spool.read(position)) is not None:
        found.append(record)
        position = record.end
    return found


def payloads(spool: Spool) -> list[bytes]:
    return [record.payload for record in everything(spool) if record.kind is RecordKind.ROW]


def test_it_works(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for index in range(100):
        spool.append(RecordKind.ROW, b"%d" % index)
    assert payloads(spool) == [b"%d" % index for index in range(100)]
    assert not spool.in_memory() and spool.torn == 0
    spool.close()
    again = Spool(tmp_path)
    assert payloads(again) == [b"%d" % index for index in range(100)]
    again.close()


def written(directory: Path, rows: list[bytes]) -> Path:
    spool = Spool(directory)
    for row in rows:
        spool.append(RecordKind.ROW, row)
    spool.close()
    (path,) = directory.glob("*.log")
    return path


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=8), st.data())
def test_a_torn_tail_loses_only_itself(
    tmp_path_factory: pytest.TempPathFactory, rows: list[bytes], data: st.DataObject
) -> None:
    path = written(tmp_path_factory.mktemp("spool"), rows)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    ends = [len(MAGIC)]
    for row in rows:
        ends.append(ends[-1] + FRAME.size + len(row))
    survivors = sum(end <= cut for end in ends[1:])
    spool = Spool(path.parent)
    assert payloads(spool) == rows[:survivors]
    spool.close()


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=6), st.data())
def test_a_flipped_bit_is_never_taken_for_a_record(
    tmp_path_factory: pytest.TempPathFactory, rows: list[bytes], data: st.DataObject
) -> None:
    path = written(tmp_path_factory.mktemp("spool"), rows)
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(len(MAGIC), len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(whole)
    spool = Spool(path.parent)
    found = payloads(spool)
    assert found == rows[: len(found)] and len(found) < len(rows)
    assert spool.torn > 0
    spool.close()


def test_every_segment_can_be_read_without_those_before_it(tmp_path: Path) -> None:
    spool = Spool(tmp_path, max_bytes=800_000, preamble=lambda: [(RecordKind.REGISTRATION, b"{}")])
    for index in range(300):
        spool.append(RecordKind.ROW, b"%04d" % index + bytes(1000))
    assert len(list(tmp_path.glob("*.log"))) > 2
    rows = [record for record in everything(spool) if record.kind is RecordKind.ROW]
    assert [int(row.payload[:4]) for row in rows] == list(range(300))
    middle = rows[200]
    assert [record.kind for record in spool.preamble_before(middle.begin)] == [RecordKind.REGISTRATION]
    spool.forget(middle.begin)
    assert spool.begin > 0
    left = [
        int(record.payload[:4]) for record in everything(spool, middle.begin) if record.kind is RecordKind.ROW
    ]
    assert left == list(range(200, 300))
    spool.close()


def test_acknowledged_segments_make_room(tmp_path: Path) -> None:
    spool = Spool(tmp_path, max_bytes=800_000)
    position, read = 0, 0
    for index in range(5000):
        spool.append(RecordKind.ROW, b"%04d" % index + bytes(1000))
        while (record := spool.read(position)) is not None:
            position, read = record.end, read + 1
        spool.forget(position)
    assert read == 5000
    assert sum(path.stat().st_size for path in tmp_path.glob("*.log")) < 800_000
    spool.close()


def test_a_full_spool_says_so_and_still_takes_what_is_no_row(tmp_path: Path) -> None:
    spool = Spool(tmp_path, max_bytes=100_000)
    with pytest.raises(SpoolFullError, match="limit"):
        for _ in range(200):
            spool.append(RecordKind.ROW, bytes(1000))
    spool.append(RecordKind.FINISH, b"{}")
    assert everything(spool)[-1].kind is RecordKind.FINISH
    spool.close()


def test_in_memory_it_is_the_same(tmp_path: Path) -> None:
    spool = Spool(None, memory_bytes=3 << 20)
    count = 0
    with contextlib.suppress(SpoolFullError):
        while True:
            spool.append(RecordKind.ROW, b"%07d" % count + bytes(1000))
            count += 1
    assert 1000 < count < 3500 and spool.in_memory()
    assert [int(payload[:7]) for payload in payloads(spool)] == list(range(count))


def test_one_process_at_a_time(tmp_path: Path) -> None:
    first = Spool(tmp_path)
    with pytest.raises(SpoolBusyError, match="running process"):
        Spool(tmp_path)
    first.close()
    Spool(tmp_path).close()


def test_others_may_remove_spools_while_one_looks_for_them(tmp_path: Path) -> None:
    lasting = tmp_path / "run" / "z"
    lasting.mkdir(parents=True)
    (lasting / "cursor").touch()
    looked = threading.Event()

    def come_and_go() -> None:
        passing = [tmp_path / f"{number}" / "writer" for number in range(20)]
        while not looked.is_set():
            for one in passing:
                one.mkdir(parents=True)
                (one / "cursor").touch()
            for one in passing:
                (one / "cursor").unlink()
                one.rmdir()
                one.parent.rmdir()

    other = threading.Thread(target=come_and_go)
    other.start()
    try:
        for _ in range(300):
            assert list(find_spools(tmp_path))[-1] == lasting
    finally:
        looked.set()
        other.join()


def test_a_cursor_survives_being_torn(tmp_path: Path) -> None:
    path = tmp_path / "cursor"
    cursor = Cursor(path, SendProgress(writer="writer"))
    for seq in range(1, 6):
        cursor.progress.seq = seq
        cursor.save(durable=seq % 2 == 0)
    cursor.close()
    whole = path.read_bytes()
    assert len(whole) == 8192
    reopened = Cursor(path, SendProgress(writer="another"))
    assert (reopened.progress.seq, reopened.progress.writer) == (5, "writer")
    reopened.close()
    for slot, expected in ((0, {4, 5}), (1, {4, 5})):
        torn = bytearray(whole)
        torn[slot * 4096 + 20] ^= 0xFF
        path.write_bytes(torn)
        damaged = Cursor(path, SendProgress(writer="another"))
        assert damaged.progress.seq in expected and damaged.progress.writer == "writer"
        damaged.close()


def test_a_flush_reaches_everything_that_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what was written to a file that is full by now, and the names of new files."""
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    spool = Spool(tmp_path, max_bytes=8 * (64 << 10))
    while len(list(tmp_path.glob("*.log"))) < 3:
        spool.append(RecordKind.ROW, bytes(10_000))
    spool.flush()
    assert set(synced) == {str(tmp_path), *(str(path) for path in tmp_path.glob("*.log"))}
    synced.clear()
    spool.flush()
    assert synced == []
    spool.append(RecordKind.ROW, b"one more")
    spool.flush()
    assert synced == [str(max(tmp_path.glob("*.log")))]
    spool.close()


@pytest.mark.parametrize("durable", [True, False])
def test_a_durable_spool_writes_through(durable: bool, tmp_path: Path) -> None:
    spool = Spool(tmp_path, durable=durable)
    spool.append(RecordKind.ROW, b"a step")
    assert spool._active is not None
    (descriptor,) = [
        int(link.name)
        for link in Path("/proc/self/fd").iterdir()
        if Path(os.path.realpath(link)).parent == tmp_path.resolve()
        and os.path.realpath(link).endswith(".log")
    ]
    assert bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DSYNC) == durable
    spool.close()


def test_the_owner_of_a_spool(tmp_path: Path) -> None:
    assert Owner.of(tmp_path) is None
    Spool(tmp_path, owner=Owner.me(child=True)).close()
    assert Owner.of(tmp_path) == Owner(socket.gethostname(), os.getpid(), True)
    # Who only reads it does not make it theirs.
    Spool(tmp_path).close()
    assert Owner.of(tmp_path) == Owner(socket.gethostname(), os.getpid(), True)
    for nonsense in (b"", b"{", b"[]", b'{"host": "x"}'):
        (tmp_path / "lock").write_bytes(nonsense)
        assert Owner.of(tmp_path) is None
