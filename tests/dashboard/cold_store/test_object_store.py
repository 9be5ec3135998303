"""Files in an object store: what is written is read back, in bounded time, and no secret is told."""

from __future__ import annotations

import io
import logging
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import pytest
from dashboard.helpers.object_stores import SECRET, ColdFolder, S3Server
from django.conf import LazySettings

from fp8scope_dashboard.cold_store import object_store as module
from fp8scope_dashboard.cold_store.errors import ColdStoreAwayError, ColdValuesLostError
from fp8scope_dashboard.cold_store.object_store import PART, FileRange, ObjectStore, object_store

CONTENT = bytes(range(256)) * 5_000
DIGEST = sha256(CONTENT).digest()


def put(store: ObjectStore, name: str = "a", content: bytes = CONTENT) -> None:
    store.put(name, io.BytesIO(content), len(content), sha256(content).digest())


def test_it_works(any_cold: ColdFolder) -> None:
    store = object_store()
    assert store.digest_of("a", 1) is None and store.files(30.0) == []
    put(store)
    assert store.digest_of("a", len(CONTENT)) == DIGEST
    ranges = [FileRange("a", 1_000, 256), FileRange("a", 0, 3), FileRange("a", len(CONTENT) - 1, 1)]
    assert store.read(ranges) == [CONTENT[1_000:1_256], CONTENT[:3], b"\xff"]
    (file,) = store.files(30.0)
    assert (file.name, file.bytes) == ("a", len(CONTENT))
    store.delete("a")
    store.delete("a")
    assert any_cold.names() == []


def test_a_file_is_never_written_again(any_cold: ColdFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    store = object_store()
    put(store)
    monkeypatch.delattr(ObjectStore, "_write")
    put(store)
    assert any_cold.read("a") == CONTENT


def test_a_beginning_is_replaced(any_cold: ColdFolder) -> None:
    any_cold.write("a", CONTENT[:7])
    put(object_store())
    assert any_cold.read("a") == CONTENT


def test_what_is_read_back_is_compared(cold: ColdFolder) -> None:
    with pytest.raises(ColdValuesLostError, match="as it was written"):
        object_store().put("a", io.BytesIO(CONTENT), len(CONTENT), bytes(32))


def test_what_is_missing(any_cold: ColdFolder) -> None:
    store = object_store()
    with pytest.raises(ColdValuesLostError, match="lacks the file a"):
        store.read([FileRange("a", 0, 1)])
    put(store)
    with pytest.raises(ColdValuesLostError, match="only the beginning of the file a"):
        store.read([FileRange("a", len(CONTENT) - 1, 2)])
    # The store has answered.
    assert store.read([FileRange("a", 0, 2)]) == [CONTENT[:2]]


def test_what_a_killed_worker_wrote_is_deleted(cold: ColdFolder) -> None:
    cold.write("a" + PART, b"the beginning")
    object_store().delete("a")
    assert cold.names() == []


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port that takes connections and says nothing."""
    with ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr(module, "_threads", threads)
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield int(server.getsockname()[1])
        # The thread ends once the connection is closed: until then, Arrow makes no other client of S3.


def test_a_silent_store_takes_bounded_time(silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 1.0)
    store = ObjectStore(S3Server(None, silent).url("x"))  # type: ignore[arg-type]
    begin = time.monotonic()
    with pytest.raises(ColdStoreAwayError, match="does not answer"):
        store.read([FileRange("a", 0, 1)])
    first = time.monotonic() - begin
    # It is not asked again for a while.
    with monkeypatch.context() as patched, pytest.raises(ColdStoreAwayError):
        patched.setattr(module, "_threads", None)
        store.read([FileRange("a", 0, 1)])
    # The clients have no deadline on Linux: without ours this would take minutes.
    assert first < 30.0


def test_a_store_that_comes_back_is_asked_again(
    s3: S3Server, cold_s3: ColdFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = object_store()
    put(store)
    gone = ObjectStore(cold_s3.settings.url.replace(f":{s3.port}", ":9"))
    with pytest.raises(ColdStoreAwayError):
        gone.read([FileRange("a", 0, 1)])
    monkeypatch.setattr(gone, "_rests_until", 0.0)
    monkeypatch.setattr(gone, "_url", cold_s3.settings.url)
    monkeypatch.setattr(gone, "_opened", None)
    assert gone.read([FileRange("a", 0, 1)]) == [CONTENT[:1]]


def test_no_secret_is_told(s3: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    told = []
    for url in (
        s3.url("x", unknown_option="1"),
        s3.url("x").replace("s3://", "nothing://"),
        s3.url("x").replace(f":{s3.port}", ":9"),
        s3.url("x").replace("old-runs", "no-such-bucket"),
    ):
        caplog.clear()
        with caplog.at_level(logging.DEBUG), pytest.raises(ColdStoreAwayError) as raised:
            put(ObjectStore(url))
        told.append(caplog.text)
        assert "The cold store does not answer: " in caplog.text, "the operator learns why"
        for secret in (SECRET, "only/for+tests"):
            assert secret not in caplog.text and secret not in repr(raised.value)
        assert raised.value.__cause__ is None and raised.value.__suppress_context__
    assert len(set(told)) == len(told)


def test_without_a_store(settings: LazySettings) -> None:
    settings.COLD_STORE = None
    with pytest.raises(ColdStoreAwayError, match="FP8SCOPE_COLD_STORE is empty"):
        object_store()
