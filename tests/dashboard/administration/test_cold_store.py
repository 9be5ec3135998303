"""`fp8scope admin cold`: check the cold store, move runs, bring them back."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from dashboard.helpers.object_stores import ColdFolder, cold_bodies, old_run, warm_bodies
from dashboard.helpers.recorder import Recorder
from django.conf import LazySettings

from fp8scope_dashboard.administration.command import _parser, _run_action
from fp8scope_dashboard.administration.errors import AdminError
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.servers.configuration import DataDir
from fp8scope_dashboard.telemetry.cold import moving

pytestmark = pytest.mark.django_db(transaction=True)


def run(*arguments: str) -> None:
    _run_action(_parser().parse_args(["cold", *arguments]), DataDir(Path("unused")), True)


def test_it_works(any_cold: ColdFolder, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = old_run(330)
    bodies = warm_bodies()
    run("move", str(recorder.run.pk))
    assert f"moved {bodies} blocks" in capsys.readouterr().err and cold_bodies() == bodies
    run("check")
    assert f"{bodies} blocks in 1 files" in capsys.readouterr().out
    run("return", str(recorder.run.pk))
    assert f"brought {bodies} blocks back" in capsys.readouterr().err and warm_bodies() == bodies


def test_all_runs_come_back(cold: ColdFolder) -> None:
    for recorder in (old_run(150), old_run(150)):
        moving.move_run(recorder.run.pk)
    run("return", "--all")
    assert cold_bodies() == 0 and warm_bodies()


def test_the_check_fails_if_something_is_lost(cold: ColdFolder, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = old_run(150)
    moving.move_run(recorder.run.pk)
    cold.write("unknown", bytes(2_000_000))
    (name,) = (name for name in cold.names() if name != "unknown")
    cold.remove(name)
    with pytest.raises(AdminError, match=f"{cold_bodies()} blocks of 1 files cannot be read, and 1 of these"):
        run("check")
    told = capsys.readouterr().out
    assert f"{name}: {cold_bodies()} blocks are missing, with their file." in told
    assert "1 files, 2.0 MB, belong to no run" in told


def test_mistakes_are_told(cold: ColdFolder, settings: LazySettings) -> None:
    for arguments, message in (
        (("move", str(uuid.uuid4())), "there is no run"),
        (("return",), "name the runs"),
        (("return", str(uuid.uuid4()), "--all"), "name the runs"),
    ):
        with pytest.raises(AdminError, match=message):
            run(*arguments)
    recorder = Recorder.of_new_run(["a"])
    with pytest.raises(AdminError, match="has not ended"):
        run("move", str(recorder.run.pk))
    settings.COLD_STORE = None
    Run.objects.update(state="finished")
    with pytest.raises(AdminError, match="FP8SCOPE_COLD_STORE is empty"):
        run("move", str(recorder.run.pk))
