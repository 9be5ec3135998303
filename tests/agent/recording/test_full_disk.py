"""A disk that takes no more: each step is stored, or counted and said to be lost; none goes in silence."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from agent.helpers.small_disk import fill, may_mount, small_disk
from agent.helpers.wire_server import WireServer
from agent.helpers.writer import join_sender, rows_acknowledged, settle, spool_of
from helpers.waiting import wait_until

from fp8scope.cli import main as cli
from fp8scope.config import Settings
from fp8scope.recording import segments
from fp8scope.recording.finish_report import FinishReport
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run

STEPS = 400

# Records STEPS steps to a server that refuses connections, and tells how it ended.
CHILD = """
import json, os, resource, signal, sys
import fp8scope
steps, limit, ending = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit << 10, limit << 10))
run = fp8scope.init(name="full")
for number in range(steps):
    with run.step(tokens=10) as step:
        step.log({f"value{index}": index + number for index in range(50)}, loss=1.0 / (number + 1))
if ending == "kill":
    run.session.writers.pipeline.settle()
    os.kill(os.getpid(), signal.SIGKILL)
if ending == "evaluation":
    run.log_eval("heldout", "accuracy", [0, 1] * 2000)
report = run.finish(1)
print(json.dumps([report.rows_dropped, report.errors, str(report.directory)]))
"""


def unused_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def record(
    directory: Path, *, steps: int = STEPS, limit: int = 0, ending: str = "finish", mode: str = "online"
) -> tuple[list[int], str]:
    """Rows dropped and errors as the report says, and what stood on standard error."""
    environment = {
        **os.environ,
        "FP8SCOPE_URL": unused_address(),
        "FP8SCOPE_TOKEN": "fp8s_test-token",
        "FP8SCOPE_DIR": str(directory),
        "FP8SCOPE_MODE": mode,
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(steps), str(limit), ending],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if ending == "kill":
        assert done.returncode == -signal.SIGKILL, done.stderr
        return [0, 0], done.stderr
    assert done.returncode == 0, done.stderr
    dropped, errors, _ = json.loads(done.stdout)
    return [dropped, errors], done.stderr


@pytest.fixture
def sync(server: WireServer, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], int]:
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)
    return lambda directory: cli.main(["sync", str(directory)])


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Path, int]]:
    """A folder that is full after some KiB, and the limit on a file's size that makes it so (0: none)."""
    kib = request.param
    folder = tmp_path / "small"
    if may_mount(folder):
        with small_disk(folder, kib) as mounted:
            yield mounted, 0
    else:
        yield folder, kib


@pytest.mark.parametrize("disk", [256], indirect=True)
def test_it_works(
    disk: tuple[Path, int],
    server: WireServer,
    sync: Callable[[Path], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, limit = disk
    (dropped, errors), said = record(folder, limit=limit)
    assert sync(folder) == 0
    run = server.run
    assert run.steps == list(range(1, STEPS - dropped + 1)) and errors == 0, said
    assert (run.finish["state"], run.finish["dropped"], run.dropped) == ("finished", dropped, 0)
    assert "was killed" not in capsys.readouterr().out
    if not limit:
        assert 0 < dropped < STEPS
        assert "Nothing is lost" not in said and f"{dropped} steps are lost" in said
        assert said.count("steps cannot be written to disk") == 1


@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize("disk", [32, 48, 64, 96, 128, 180, 512], indirect=True)
def test_what_is_stored_and_what_is_dropped_add_up(
    mode: str, disk: tuple[Path, int], server: WireServer, sync: Callable[[Path], int]
) -> None:
    folder, limit = disk
    (dropped, errors), said = record(folder, limit=limit, mode=mode)
    assert sync(folder) == 0
    # What `resume="auto"` goes by may find no room either: that is counted, and no step.
    assert errors == 0 or "remembering the run" in said, said
    assert len(server.run.steps) + dropped == STEPS
    assert server.run.steps == list(range(1, STEPS - dropped + 1))
    assert (server.run.finish["state"], server.run.finish["dropped"]) == ("finished", dropped)
    assert (f"{dropped} steps are lost" in said) == (dropped > 0)


def test_a_limit_on_the_size_of_files_loses_nothing(
    tmp_path: Path, server: WireServer, sync: Callable[[Path], int]
) -> None:
    """Another file takes what one does not."""
    (dropped, errors), _ = record(tmp_path, limit=64)
    assert (dropped, errors) == (0, 0) and sync(tmp_path) == 0
    assert server.run.steps == list(range(1, STEPS + 1))
    assert server.run.finish["state"] == "finished"


@pytest.mark.parametrize("disk", [4, 12, 24], indirect=True)
def test_a_disk_without_room_for_anything(disk: tuple[Path, int]) -> None:
    folder, limit = disk
    (dropped, errors), said = record(folder, limit=limit, steps=20)
    if not limit:
        assert dropped == 20 and errors >= 1
        assert "20 steps are lost" in said and "Nothing is lost" not in said


@pytest.mark.parametrize("disk", [128], indirect=True)
def test_steps_in_memory_of_a_killed_process_are_counted(
    disk: tuple[Path, int], server: WireServer, sync: Callable[[Path], int]
) -> None:
    folder, _ = disk
    record(folder, ending="kill")
    assert sync(folder) == 0
    finish = server.run.finish
    assert finish["state"] == "failed" and "was killed" in finish["error"]
    # The last step may have been on its way to the recorder.
    assert STEPS - 1 <= len(server.run.steps) + finish["dropped"] <= STEPS


@pytest.mark.parametrize("disk", [96], indirect=True)
def test_other_records_that_are_lost_are_counted_as_errors(
    disk: tuple[Path, int], server: WireServer, sync: Callable[[Path], int]
) -> None:
    folder, limit = disk
    (dropped, errors), said = record(folder, limit=limit, ending="evaluation")
    assert sync(folder) == 0
    assert len(server.run.steps) + dropped == STEPS
    assert len(server.run.evaluations) + errors == 1 and server.run.finish["errors"] == errors
    if not limit:
        assert errors == 1 and "evaluation" in said


def steps(run: Run, count: int) -> None:
    for _ in range(count):
        with run.step() as step:
            step.log({f"value{index}": float(index) for index in range(50)})


def finish(run: Run, seconds: float) -> FinishReport:
    """As `Run.finish`, and wait for the sender: it may be in a request, and has the spool until then."""
    report = run.finish(seconds)
    assert join_sender(run)
    return report


def away(settings: Settings, directory: Path) -> Settings:
    return replace(settings, url=unused_address(), directory=directory, connect_timeout=0.2)


class FailingDisk:
    """`os` as `recording.segments` sees it. With `error` set, writes fail; with `partly`, half way."""

    def __init__(self) -> None:
        self.error = 0
        self.partly = False
        self.failed = 0

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def pwritev(self, descriptor: int, pieces: list[bytes], at: int) -> int:
        if not self.error:
            return os.pwritev(descriptor, pieces, at)
        if self.partly:
            data = b"".join(pieces)
            return os.pwrite(descriptor, data[: len(data) // 2], at)
        raise self.fail()

    def pwrite(self, descriptor: int, data: bytes, at: int) -> int:
        if self.error:
            raise self.fail()
        return os.pwrite(descriptor, data, at)

    def ftruncate(self, descriptor: int, length: int) -> None:
        if self.error == errno.EIO:
            raise self.fail()
        os.ftruncate(descriptor, length)

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        if self.error == errno.EROFS and flags & os.O_CREAT:
            raise self.fail()
        return os.open(path, flags, mode)

    def fail(self) -> OSError:
        self.failed += 1
        return OSError(self.error, os.strerror(self.error))


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    disk = FailingDisk()
    monkeypatch.setattr(segments, "os", disk)
    return disk


@pytest.mark.parametrize("partly", [False, True])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_disk_that_fails_for_good(
    error: int,
    partly: bool,
    server: WireServer,
    settings: Settings,
    sync: Callable[[Path], int],
    failing: FailingDisk,
    tmp_path: Path,
) -> None:
    run = Run(away(settings, tmp_path), blank_registration("failing"))
    steps(run, 20)
    settle(run)
    failing.error, failing.partly = error, partly
    steps(run, 30)
    report = finish(run, 0.5)
    failing.error = 0
    assert failing.failed > 0 and report.rows_dropped == 30 and report.errors == 0
    assert sync(tmp_path) == 0
    assert server.run.steps == list(range(1, 21))
    assert (server.run.finish["state"], server.run.finish["dropped"]) == ("finished", 30)


@pytest.mark.parametrize("partly", [False, True])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_recovers_loses_nothing(
    error: int,
    partly: bool,
    server: WireServer,
    settings: Settings,
    sync: Callable[[Path], int],
    failing: FailingDisk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fp8scope.recording.spool.RETRY_SECONDS", 0.05)
    run = Run(away(settings, tmp_path), blank_registration("recovering"))
    for _ in range(3):
        steps(run, 10)
        settle(run)
        failing.error, failing.partly = error, partly
        steps(run, 10)
        settle(run)
        assert (
            run.session.writers.pipeline.spool is not None and run.session.writers.pipeline.spool.in_memory()
        )
        failing.error = 0
        time.sleep(0.1)
        steps(run, 2)
        settle(run)
        assert not spool_of(run).in_memory()
    report = finish(run, 0.2)
    assert (report.rows_dropped, report.errors) == (0, 0)
    assert sync(tmp_path) == 0
    assert server.run.steps == list(range(1, 67)) and server.run.finish["state"] == "finished"


def test_a_disk_and_a_memory_that_are_full_lose_exactly_the_gap(
    server: WireServer,
    settings: Settings,
    sync: Callable[[Path], int],
    failing: FailingDisk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("fp8scope.recording.spool.RETRY_SECONDS", 0.05)
    small = replace(away(settings, tmp_path), memory_bytes=64 << 10)
    run = Run(small, blank_registration("gap"))
    steps(run, 10)
    settle(run)
    failing.error = errno.ENOSPC
    steps(run, 200)
    settle(run)
    gap = run.guard.dropped
    assert 0 < gap < 200
    failing.error = 0
    time.sleep(0.1)
    steps(run, 10)
    report = finish(run, 0.2)
    assert report.rows_dropped == gap and sync(tmp_path) == 0
    kept = server.run.steps
    assert len(kept) + gap == 220 and kept[:10] == list(range(1, 11)) and kept[-10:] == list(range(211, 221))
    assert server.run.dropped == server.run.finish["dropped"] == gap
    assert caplog.text.count("steps are being dropped") == 1


def test_what_the_server_has_is_not_counted_as_lost(
    server: WireServer, settings: Settings, failing: FailingDisk, tmp_path: Path
) -> None:
    run = Run(replace(settings, directory=tmp_path), blank_registration("sent"))
    steps(run, 10)
    settle(run)
    failing.error = errno.ENOSPC
    steps(run, 40)
    # Not what the server has, but what it has acknowledged: an answer that is lost counts as no answer.
    wait_until(lambda: rows_acknowledged(run) == 50, "the server's answer to the fiftieth step")
    server.stop()
    steps(run, 7)
    report = finish(run, 0.5)
    failing.error = 0
    server.start()
    assert report.rows_dropped == 7 and report.rows_sent == 50
    os.environ |= {"FP8SCOPE_URL": server.url, "FP8SCOPE_TOKEN": server.token}
    assert cli.main(["sync", str(tmp_path)]) == 0
    assert server.run.steps == list(range(1, 51)) and server.run.finish["dropped"] == 7


def test_a_cursor_that_cannot_be_written_stops_nothing(
    server: WireServer, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(errno.EIO, "planned")

    run = Run(replace(settings, directory=tmp_path), blank_registration("cursor"))
    steps(run, 5)
    monkeypatch.setattr("fp8scope.delivery.cursor.os.pwrite", fail)
    steps(run, 5)
    report = run.finish()
    monkeypatch.undo()
    assert report.complete and server.run.steps == list(range(1, 11)) and report.errors > 0


def test_a_disk_that_becomes_free_is_used_again(
    server: WireServer,
    settings: Settings,
    sync: Callable[[Path], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a real file system; `test_a_disk_that_recovers_loses_nothing` needs none that can be mounted."""
    monkeypatch.setattr("fp8scope.recording.spool.RETRY_SECONDS", 0.05)
    folder = tmp_path / "small"
    if not may_mount(folder):
        pytest.skip("this process may not mount a file system")
    with small_disk(folder, 512):
        run = Run(away(settings, folder), blank_registration("free again"))
        steps(run, 10)
        settle(run)
        filling = fill(folder)
        steps(run, 60)
        settle(run)
        assert (
            run.session.writers.pipeline.spool is not None and run.session.writers.pipeline.spool.in_memory()
        )
        filling.unlink()
        time.sleep(0.1)
        steps(run, 10)
        settle(run)
        assert not spool_of(run).in_memory()
        report = finish(run, 0.2)
        assert (report.rows_dropped, report.errors) == (0, 0) and sync(folder) == 0
    assert server.run.steps == list(range(1, 81)) and server.run.finish["state"] == "finished"
