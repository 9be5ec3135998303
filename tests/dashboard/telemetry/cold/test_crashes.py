"""A worker that is killed at any moment loses nothing, and leaves at most a file that a sweep deletes."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from dashboard.helpers.object_stores import ColdFolder, cold_bodies, everything, old_run, warm_bodies
from django.db import connection
from django.db.models import F
from helpers.live_servers import process_environment
from helpers.waiting import wait_until

from fp8scope_dashboard.cold_store.object_store import object_store
from fp8scope_dashboard.telemetry.cold import checking, files, moving
from fp8scope_dashboard.telemetry.models import ColdFile, ColdFileState

pytestmark = pytest.mark.django_db(transaction=True)

TESTS = Path(__file__).parents[3]
PROGRAM = TESTS / "dashboard" / "helpers" / "crashing_move.py"


def is_unlocked() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
        return bool(cursor.fetchone() == (0,))


def an_hour_passes() -> None:
    ColdFile.objects.update(changed_at=F("changed_at") - timedelta(hours=2))


def test_it_works(any_cold: ColdFolder) -> None:
    """Each moment of a move kills one worker."""
    recorder = old_run(330)
    before, bodies = everything(recorder), warm_bodies()
    environment = process_environment() | {
        "PYTHONPATH": f"{TESTS}:{':'.join(sys.path)}",
        "FP8SCOPE_COLD_STORE": any_cold.settings.url,
        "FP8SCOPE_DATA_DIR": str(any_cold.settings.folder),
    }
    command = [sys.executable, str(PROGRAM), str(recorder.run.pk)]
    seen: set[tuple[str, int, bool]] = set()
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        for moment in range(1, 200):
            worker.stdin.write(f"{moment}\n")
            worker.stdin.flush()
            answer = worker.stdout.readline().strip()
            # PostgreSQL releases the lock when it detects that the client is gone.
            wait_until(is_unlocked, "PostgreSQL releases the lock")
            state = ColdFile.objects.values_list("state", flat=True).first() or ""
            seen.add((state, len(any_cold.names()), bool(warm_bodies())))
            assert (warm_bodies(), cold_bodies()) in ((bodies, 0), (0, bodies))
            if not warm_bodies():
                break
            assert answer == "killed"
            an_hour_passes()
            files.delete_unneeded()
            assert any_cold.names() == [] and not ColdFile.objects.exists()
        worker.kill()
    # Before and after it is registered, written, and referred to.
    assert {("", 0, True), ("writing", 0, True), ("writing", 1, True), ("stored", 1, False)} <= seen
    assert moment > 10
    assert everything(recorder) == before
    result = checking.check_store()
    assert (result.files, result.bodies, result.unknown, not result.lost) == (1, bodies, 0, True)


def test_what_a_killed_worker_left_is_taken_over(
    any_cold: ColdFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is deleted, or finished, but only once nobody can be writing it."""
    recorder = old_run(330)
    before, bodies = everything(recorder), warm_bodies()

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(moving, "_refer", die)
        moving.move_run(recorder.run.pk)
    (name,) = any_cold.names()
    assert files.delete_unneeded() == 0 and moving.move_run(recorder.run.pk).bodies == 0
    an_hour_passes()
    # What another worker left may be only the beginning.
    any_cold.write(name, b"the beginning")
    assert moving.move_run(recorder.run.pk) == moving.Moved(bodies, is_all=True)
    assert any_cold.names() == [name] and everything(recorder) == before
    assert ColdFile.objects.get().state == ColdFileState.STORED


def test_a_worker_whose_claim_was_lost_changes_nothing(
    cold: ColdFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was suspended for hours, and a sweep has deleted its file."""
    recorder = old_run(330)
    put = object_store().put

    def put_late(*arguments: object) -> None:
        put(*arguments)  # type: ignore[arg-type]
        an_hour_passes()
        assert files.delete_unneeded() == 1

    monkeypatch.setattr(object_store(), "put", put_late)
    assert moving._move_file(recorder.run.pk) == 0
    assert warm_bodies() and not cold_bodies() and cold.names() == []
