"""What the program writes becomes bounded documents without secrets."""

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fp8scope.process import standard_streams
from fp8scope.recording import console
from fp8scope.recording.console import ConsoleLog

TOKEN = "token-of-the-agent"
Streams = Callable[[], None]


@contextlib.contextmanager
def recorded() -> Iterator[ConsoleLog]:
    log = ConsoleLog(lambda: 7, TOKEN, 1.0)
    assert log.start()
    try:
        yield log
    finally:
        log.stop()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    """Sets fresh standard streams in the test itself: pytest sets its own after the fixtures."""

    def fresh() -> None:
        for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
            monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))

    yield fresh
    assert standard_streams._taps == []


def texts(documents: list[dict[str, Any]]) -> list[str]:
    return [line["text"] for document in documents for line in document["lines"]]


def test_it_works(streams: Streams) -> None:
    streams()
    handler = logging.StreamHandler(sys.stderr)
    with recorded() as log:
        print("loss", 2.5)
        handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "kept the stream", None, None))
        documents = log.take()
    (document,) = documents
    assert document["kind"] == "console" and document["step"] == 7
    assert [(line["stream"], line["text"], line["step"]) for line in document["lines"]] == [
        ("stdout", "loss 2.5", 7),
        ("stderr", "kept the stream", 7),
    ]
    print("not heard any more")
    assert log.take() == []


def test_streams_are_as_before(streams: Streams) -> None:
    streams()
    before = sys.stdout
    with recorded(), recorded():
        assert sys.stdout is before
        print("x")
    assert "write" not in vars(sys.stdout)
    sys.stdout.flush()
    assert before.buffer.getvalue() == b"x\n"  # type: ignore[union-attr]


def test_a_stream_that_writes_to_another_counts_once(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams()

    class Tee:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def write(self, text: str) -> int:
            return int(self.stream.write(text))

        def flush(self) -> None:
            self.stream.flush()

    monkeypatch.setattr(sys, "stdout", Tee(sys.stdout))
    with recorded() as log:
        print("once")
        assert texts(log.take()) == ["once"]


def test_an_exception_of_a_stream_is_the_programs(streams: Streams) -> None:
    streams()
    with recorded() as log:
        sys.stdout.close()
        with pytest.raises(ValueError, match="closed"):
            print("x")
        assert texts(log.take()) == []


def test_a_stream_may_take_what_text_streams_do_not(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams()

    class Converting:
        """Prints whatever it gets, as the streams of some launchers do."""

        def __init__(self, target: Any) -> None:
            self.target = target

        def write(self, value: Any, end: str = "", *, upper: bool = False) -> int:
            text = f"{value}{end}"
            return int(self.target.write(text.upper() if upper else text))

    monkeypatch.setattr(sys, "stdout", Converting(sys.__stdout__))
    with recorded() as log:
        assert sys.stdout.write(5, "\n") == 2  # type: ignore[call-arg, arg-type]
        sys.stdout.write(None)  # type: ignore[arg-type]
        sys.stdout.write("\n")
        sys.stdout.write("loud", upper=True)  # type: ignore[call-arg]
        assert texts(log.take()) == ["5", "None", "loud"]
    sys.__stdout__.seek(0)  # type: ignore[union-attr]
    assert sys.__stdout__.read() == "5\nNone\nLOUD"  # type: ignore[union-attr]


def test_another_wrapper_stays(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    streams()
    with recorded() as log:
        wrapped = sys.stdout.write
        monkeypatch.setattr(sys.stdout, "write", lambda text: wrapped(text.upper()))
        print("loud")
        assert texts(log.take()) == ["LOUD"]
    print("still there")
    sys.stdout.flush()
    assert sys.stdout.buffer.getvalue() == b"LOUD\nSTILL THERE\n"  # type: ignore[union-attr]
    assert log.take() == []
    standard_streams._taps.clear()


def test_secrets_are_left_out(streams: Streams) -> None:
    streams()
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nowIB\n-----END RSA PRIVATE KEY-----\nafter"
    with recorded() as log:
        print(f"a {TOKEN} b\nhf_abcdefghijklmnop\npassword=hunter2\n{key}")
        found = texts(log.take())
    assert found[-1] == "after" and len(found) == 8
    assert not any(secret in " ".join(found) for secret in (TOKEN, "hf_", "hunter2", "MIIE", "owIB"))


def test_a_key_is_recognised_over_two_documents(streams: Streams) -> None:
    streams()
    with recorded() as log:
        print("-----BEGIN PRIVATE KEY-----\nMIIE")
        log.take()
        print("owIB\n-----END PRIVATE KEY-----\nafter")
        assert texts(log.take()) == ["[redacted]", "[redacted]", "after"]


def test_much_output_is_bounded_and_counted(streams: Streams) -> None:
    streams()
    line = "x" * 200
    with recorded() as log:
        for _ in range(20_000):
            print(line)
        found = log.take()
    lines = texts(found)
    # The newest are kept.
    assert "lines are left out" in lines[0] and sum(map(len, lines)) <= console.BURST_CHARACTERS + 200
    assert found[-1]["lines"][-1]["number"] == 19_999 or len(lines) < 20_000
    for document in found:
        assert len(document["lines"]) <= console.DOCUMENT_LINES


def test_the_end_is_recorded_in_any_case(streams: Streams) -> None:
    streams()
    with recorded() as log:
        print("x\n" * 200_000)
        log.take()
        log._allowance = 0.0
        print("Traceback\nValueError: why", file=sys.stderr)
        assert texts(log.take(final=True))[-1] == "ValueError: why"


def test_without_room_lines_are_counted(streams: Streams) -> None:
    streams()
    with recorded() as log:
        print("a\nb")
        assert log.take(keep=False) == []
        print("c")
        assert texts(log.take()) == [
            "2 lines are left out: the program writes more than the console log takes.",
            "c",
        ]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_not_heard(streams: Streams) -> None:
    streams()
    with recorded() as log:
        print("parent")
        if (child := os.fork()) == 0:
            log.stop_in_child()
            print("child")
            os._exit(0 if log.take() == [] and "write" not in vars(sys.stdout) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert texts(log.take()) == ["parent"]
