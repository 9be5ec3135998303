"""The agent's exceptions never reach the training code; the user's are never swallowed."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from agent.helpers.faulty_http import Fault
from agent.helpers.wire_server import WireServer
from agent.helpers.writer import settle

from fp8scope.config import Settings
from fp8scope.guard import Guard
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run


def record(run: Run, steps: int, values: int = 1) -> None:
    for index in range(steps):
        with run.step() as step:
            step.log({f"x{number}": index + number / 7 for number in range(values)})


def test_it_works(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard()
    for _ in range(5):
        with guard.shield("a test"):
            raise ValueError("planned")
    assert guard.errors == 5
    assert len(caplog.messages) == 1 and "ValueError: planned" in caplog.text


def test_what_is_not_ours_passes() -> None:
    guard = Guard()
    with pytest.raises(KeyboardInterrupt), guard.shield("a test"):
        raise KeyboardInterrupt
    assert guard.errors == 0


def test_a_users_exception_passes_and_marks_the_run_failed(server: WireServer, settings: Settings) -> None:
    run = Run(settings, blank_registration("crash"))
    with pytest.raises(ZeroDivisionError), run, run.step() as step:
        step.log(loss=float("nan"))
        1 / 0  # noqa: B018
    finish = server.run.finish
    assert finish["state"] == "failed"
    assert "ZeroDivisionError" in finish["error"] and "test_guard.py" in finish["error"]
    # What the failing step had logged is what explains it.
    assert len(server.run.rows) == 1 and "loss" in server.run.rows[0]["scalars"]


def test_a_step_that_was_tried_again_does_not_fail_the_run(server: WireServer, settings: Settings) -> None:
    run = Run(settings, blank_registration("retry"))
    for attempt in range(2):
        try:
            with run.step():
                if attempt == 0:
                    raise MemoryError("planned")
        except MemoryError:
            continue
    run.finish()
    assert server.run.finish["state"] == "finished" and server.run.steps == [1, 2]


def test_secrets_in_a_traceback_are_redacted(server: WireServer, settings: Settings) -> None:
    run = Run(settings, blank_registration("secret"))
    with pytest.raises(RuntimeError), run:
        raise RuntimeError("cannot log in with password=hunter2 and hf_abcdefghijklmnop")
    error = server.run.finish["error"]
    assert "cannot log in" in error and "hunter2" not in error and "hf_abc" not in error


SCRIPT = """
import sys, fp8scope
run = fp8scope.init(name="script")
with run.step() as step:
    step.log(loss=1.0)
{end}
"""


@pytest.mark.parametrize(
    ("end", "state", "status", "error"),
    [
        ("", "finished", 0, ""),
        ("sys.exit(0)", "finished", 0, ""),
        ("raise KeyError('planned')", "failed", 1, "KeyError: 'planned'"),
        ("raise KeyboardInterrupt", "failed", -2, "KeyboardInterrupt"),
        ("del run", "finished", 0, ""),
    ],
)
def test_the_end_of_a_script(
    end: str, state: str, status: int, error: str, server: WireServer, tmp_path: Path
) -> None:
    environment = {**os.environ, "FP8SCOPE_URL": server.url, "FP8SCOPE_TOKEN": server.token}
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(end=end))
    script = subprocess.run(
        [sys.executable, str(path)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert script.returncode == status, script.stderr
    assert server.run.finish["state"] == state and server.run.steps == [1]
    assert error in server.run.finish["error"]


def test_an_unwritable_directory_keeps_things_in_memory(server: WireServer, settings: Settings) -> None:
    settings.directory.parent.mkdir(exist_ok=True)
    settings.directory.write_text("a file where a directory should be")
    run = Run(settings, blank_registration("nowhere"))
    record(run, 50)
    report = run.finish()
    # The spool, and what `resume="auto"` goes by, when the run begins and when it ends.
    assert report.complete and report.errors == 3 and report.directory is None
    assert server.run.steps == list(range(1, 51)) and server.run.points == report.points_sent


def test_memory_is_bounded_and_what_is_dropped_is_counted(server: WireServer, settings: Settings) -> None:
    server.stop()
    settings.directory.write_text("a file")
    run = Run(replace(settings, memory_bytes=100_000), blank_registration("bounded"))
    record(run, 2000, values=20)
    dropped = run.guard.dropped
    assert 0 < dropped < 2000
    server.start()
    report = run.finish()
    assert report.complete
    assert len(server.run.rows) == report.rows_sent == 2000 - report.rows_dropped
    assert server.run.points == report.points_sent
    assert server.run.finish["dropped"] == report.rows_dropped


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes: writing it on fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_files_that_may_not_grow_further_lose_nothing(server: WireServer, settings: Settings) -> None:
    server.plan = lambda method, path: Fault(drop=True) if "/batches" in path else None
    run = Run(settings, blank_registration("full"))
    with disk_of(20_000):
        record(run, 300, values=20)
        settle(run)
        assert len(list(run.directory.glob("*.log"))) > 1
        server.plan = lambda method, path: None
        report = run.finish()
    assert report.complete and report.rows_dropped == 0
    assert server.run.steps == list(range(1, 301)) and server.run.points == report.points_sent


def test_a_spool_that_reaches_its_bound_drops_and_counts(server: WireServer, settings: Settings) -> None:
    server.stop()
    run = Run(replace(settings, spool_bytes=200_000), blank_registration("bound"))
    record(run, 2000, values=20)
    run.log_eval("heldout", "accuracy", [1, 0])
    server.start()
    report = run.finish()
    assert report.complete and report.rows_dropped > 0
    assert len(server.run.rows) == report.rows_sent == 2000 - report.rows_dropped
    assert server.run.steps == list(range(1, report.rows_sent + 1))
    assert len(server.run.evaluations) == 1


def test_a_broken_collector_does_not_break_the_training(
    server: WireServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(settings, blank_registration("broken"))
    record(run, 2)

    def broken(*arguments: object) -> None:
        raise RuntimeError("planned")

    monkeypatch.setattr(run.session.steps.collector, "snapshot", broken)
    record(run, 3)
    assert run.watch("not a model") == 0  # type: ignore[arg-type]
    report = run.finish()
    assert report.errors == 4 and server.run.steps == [1, 2] and server.run.finish["errors"] == 4
