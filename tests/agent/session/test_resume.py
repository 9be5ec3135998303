"""A run is continued: after a crash, on another machine, from a checkpoint, or by going back to a step."""

import os
import subprocess
import sys
import threading
import uuid
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agent.helpers.models import tiny_model, train_step
from agent.helpers.wire_server import WireServer
from helpers.waiting import wait_until

import fp8scope
from fp8scope.config import ConfigurationError, Settings
from fp8scope.recording.registration import blank_registration
from fp8scope.recording.spool import find_spools
from fp8scope.run import Run
from fp8scope.session.resume import Identity, identify, read_ledger, write_ledger


def record(run: Run, count: int, **options: Any) -> None:
    for _ in range(count):
        with run.step(tokens=10, **options) as step:
            step.log(loss=1.0)


def begin(settings: Settings, resume: Any = None, environment: dict[str, str] | None = None) -> Run:
    identity = identify(resume, settings, environment or {})
    return Run(settings, blank_registration("continued"), identity=identity)


def steps_by_attempt(server: WireServer) -> dict[int, list[int]]:
    """The stored steps of each attempt, in the order of storing."""
    found: dict[int, list[int]] = defaultdict(list)
    for row in server.run.rows:
        found[server.run.places[row["writer"]]["attempt"]].append(row["step"])
    return dict(found)


def test_it_works(server: WireServer, settings: Settings) -> None:
    """From a checkpoint, as the same run and the next attempt."""
    first = begin(settings)
    record(first, 6)
    checkpoint = first.state_dict()
    record(first, 4)
    first.finish()
    second = begin(settings, checkpoint)
    assert (second.id, second.attempt) == (first.id, 1)
    record(second, 5)
    assert second.finish().complete
    assert steps_by_attempt(server) == {0: list(range(1, 11)), 1: list(range(7, 12))}
    # Tokens go on where the checkpoint was.
    assert server.run.rows[10]["scalars"]["tokens"] == 70
    assert len({writer for writer, _ in server.run.receipts}) == 2


def test_a_state_is_what_a_checkpoint_can_hold(settings: Settings, tmp_path: Path) -> None:
    import torch

    run = begin(settings)
    record(run, 3)
    torch.save({"fp8scope": run.state_dict()}, tmp_path / "checkpoint.pt")
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["fp8scope"]
    assert state == run.state_dict()
    assert state == {"version": 1, "run": run.id, "attempt": 0, "step": 3, "tokens": 30}


def test_load_state_dict_right_after_init(server: WireServer, settings: Settings) -> None:
    first = begin(settings)
    record(first, 5)
    state = first.state_dict()
    first.finish()
    second = begin(replace(settings, introduce_seconds=60))
    model = tiny_model()
    second.watch(model)
    second.load_state_dict(state)
    with second.step(tokens=10):
        train_step(model)
    assert second.finish().complete
    # Of the run that `init` had begun there is no trace, neither there nor here.
    assert list(server.runs) == [first.id]
    assert steps_by_attempt(server) == {0: [1, 2, 3, 4, 5], 1: [6]}
    assert server.run.rows[-1]["tensors"]["numel"][0] == 8 * 32


def test_load_state_dict_after_the_server_was_told(server: WireServer, settings: Settings) -> None:
    first = begin(settings)
    record(first, 2)
    state = first.state_dict()
    first.finish()
    second = begin(settings)
    record(second, 1)
    unrelated = second.id
    second.load_state_dict(state)
    record(second, 1)
    assert second.finish().complete
    assert server.runs[unrelated].steps == [1] and server.runs[unrelated].finish["state"] == "finished"
    assert server.runs[first.id].steps == [1, 2, 3]


@pytest.mark.parametrize(
    "state", [{}, {"run": "x"}, {"run": str(uuid.uuid4()), "attempt": -1, "step": 1}, []]
)
def test_a_state_that_is_none(state: Any, settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    run = begin(settings)
    run.load_state_dict(state)
    record(run, 1)
    assert run.guard.errors == 1 and "loading the run's state" in caplog.text
    with pytest.raises(ConfigurationError):
        begin(settings, state)


CRASHING = """
import os, fp8scope
run = fp8scope.init(name="crashing", resume="auto")
print(run.id, run.attempt, flush=True)
for _ in range(20):
    with run.step() as step:
        step.log(loss=1.0)
os._exit(9)
"""


def crash(server: WireServer, directory: Path) -> tuple[str, int]:
    environment = {**os.environ, "FP8SCOPE_URL": server.url, "FP8SCOPE_TOKEN": server.token}
    environment |= {"FP8SCOPE_DIR": str(directory), "FP8SCOPE_INTERVAL": "60"}
    command = [sys.executable, "-c", CRASHING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 9, done.stderr
    run, attempt = done.stdout.split()
    return run, int(attempt)


def test_after_a_crash_what_is_left_is_sent_along(server: WireServer, settings: Settings) -> None:
    run, attempt = crash(server, settings.directory)
    assert attempt == 0 and crash(server, settings.directory) == (run, 1)
    third = begin(settings, "auto")
    assert (third.id, third.attempt) == (run, 2)
    record(third, 1, number=7)
    assert third.finish().complete
    wait_until(lambda: not list(find_spools(settings.directory)), "all spools are sent")
    stored = steps_by_attempt(server)
    assert stored.keys() == {0, 1, 2} and stored[2] == [7]
    assert all(steps in (list(range(1, 20)), list(range(1, 21))) for steps in (stored[0], stored[1]))


def test_auto_begins_anew_when_the_last_run_ended_well(server: WireServer, settings: Settings) -> None:
    first = begin(settings, "auto")
    record(first, 1)
    first.finish()
    assert begin(settings, "auto").id != first.id


def test_auto_continues_a_run_that_failed(server: WireServer, settings: Settings) -> None:
    with pytest.raises(ZeroDivisionError), begin(settings, "auto") as first:
        1 / 0  # noqa: B018
    second = begin(settings, "auto")
    assert (second.id, second.attempt) == (first.id, 1)


def test_on_another_machine_the_server_knows_the_last_attempt(
    server: WireServer, settings: Settings, tmp_path: Path
) -> None:
    first = begin(settings)
    record(first, 3)
    first.finish()
    elsewhere = replace(settings, directory=tmp_path / "elsewhere")
    for attempt in (1, 2):
        run = (
            begin(elsewhere, first.id)
            if attempt == 1
            else begin(settings, None, {"FP8SCOPE_RUN_ID": first.id})
        )
        assert (run.id, run.attempt) == (first.id, attempt)
        record(run, 1, number=4)
        run.finish()
    assert steps_by_attempt(server) == {0: [1, 2, 3], 1: [4], 2: [4]}


def test_without_a_server_the_directory_knows(server: WireServer, settings: Settings) -> None:
    server.stop()
    first = begin(settings)
    assert begin(settings, first.id).attempt == 1
    assert begin(replace(settings, mode="offline"), first.id).attempt == 2


@pytest.mark.parametrize("resume", ["not a uuid", "0", 7, "AUTO"])
def test_a_resume_that_cannot_be_meant(resume: Any, settings: Settings) -> None:
    with pytest.raises(ConfigurationError):
        identify(resume, settings, {})


def test_init_takes_it(server: WireServer, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    given = str(uuid.uuid4())
    where: dict[str, Any] = {"url": server.url, "token": server.token, "directory": settings.directory}
    first = fp8scope.init(**where, resume=given)
    assert (first.id, first.attempt) == (given, 0)
    first.finish()
    monkeypatch.setenv("FP8SCOPE_RUN_ID", given)
    second = fp8scope.init(**where)
    assert (second.id, second.attempt) == (given, 1)
    second.finish()
    with pytest.raises(ConfigurationError, match="UUID"):
        fp8scope.init(**where, resume="mine")


def test_going_back_within_a_process_is_a_new_attempt(server: WireServer, settings: Settings) -> None:
    run = begin(settings)
    model = tiny_model()
    run.watch(model)
    run.guard.drop(3, "a test")
    for number in (1, 2, 3, 4, 4, 3, 4, 5, 2):
        with run.step(number=number):
            train_step(model)
    report = run.finish()
    assert report.complete and report.rows_sent == 9 and report.points_sent == server.run.points
    assert steps_by_attempt(server) == {0: [1, 2, 3, 4, 4], 1: [3, 4, 5], 2: [2]}
    ends = [(end["ends_run"], end["rows_sent"], end["dropped"]) for end in server.run.finishes]
    # What was dropped before is not counted again.
    assert sorted(ends) == [(False, 3, 0), (False, 5, 3), (True, 1, 0)]


def test_going_back_for_ever_is_bounded(server: WireServer, settings: Settings) -> None:
    run = begin(replace(settings, mode="offline"))
    run.session.rewinds = 98
    for _ in range(5):
        record(run, 2, number=2)
        record(run, 1, number=1)
    assert run.attempt == 2
    run.finish()


def test_the_ledger_survives_nonsense(tmp_path: Path) -> None:
    assert read_ledger(tmp_path) is None
    for text in ("", "{", "[]", '{"run": "x"}', "\0" * 10_000):
        (tmp_path / "latest.json").write_text(text)
        assert read_ledger(tmp_path) is None
    identity = Identity(str(uuid.uuid4()), 3)
    write_ledger(tmp_path, identity, over=True)
    found = read_ledger(tmp_path)
    assert found is not None and (found.run, found.attempt, found.over) == (identity.run, 3, True)
    write_ledger(tmp_path / "latest.json" / "below a file", identity, over=True)


def test_runs_that_begin_at_once_in_one_process_share_no_draft(tmp_path: Path) -> None:
    """Otherwise one renames the other's draft, which then fails."""
    failures: list[Exception] = []
    start = threading.Barrier(8)

    def write(number: int) -> None:
        start.wait()
        for _ in range(100):
            identity = Identity(str(uuid.UUID(int=number)))
            write_ledger(tmp_path, identity, over=False, failed=lambda _, error: failures.append(error))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [path.name for path in tmp_path.iterdir()] == ["latest.json"]
