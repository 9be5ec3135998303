"""A token expires while a run is recorded, and is rotated: the agent says so, and nothing is lost."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone
from helpers.live_servers import Server
from helpers.waiting import wait_until

import fp8scope
from fp8scope.cli import main as cli
from fp8scope.config import Settings
from fp8scope.delivery.resend import send_spool
from fp8scope.recording.spool import find_spools
from fp8scope_dashboard.accounts.models import ApiToken
from fp8scope_dashboard.accounts.tokens import create_token, rotate_token
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries


def losses(run_id: str) -> list[float]:
    return list(queries.scalar(Run.objects.get(pk=run_id).id, "loss").values)


def test_it_works(server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    token, secret = create_token(server.project, "cluster", lifetime=timedelta(days=1))
    caplog.set_level(logging.WARNING, logger="fp8scope")
    with fp8scope.init(name="r", url=server.url, token=secret, directory=tmp_path) as run:
        run_id = str(run.id)
        with run.step() as step:
            step.log(loss=1.0)
        wait_until(lambda: Run.objects.filter(pk=run_id, last_step__isnull=False).exists())
        ApiToken.objects.filter(pk=token.pk).update(expires_at=timezone.now() - timedelta(minutes=1))
        with run.step() as step:
            step.log(loss=2.0)
    said = " ".join(record.getMessage() for record in caplog.records)
    assert f"The token “cluster” ({token.prefix}…) expired on" in said
    assert "Create a token on the project's settings page" in said
    assert str(tmp_path) in said and secret not in said
    assert losses(run_id) == [1.0]
    # What is kept is sent with another token of the project.
    (spool,) = find_spools(tmp_path)
    send_spool(spool, Settings(url=server.url, token=server.token, directory=tmp_path), 60.0)
    assert losses(run_id) == [1.0, 2.0]


def test_a_rotated_token_goes_on_in_running_trainings(server: Server, tmp_path: Path) -> None:
    token, secret = create_token(server.project, "cluster")
    with fp8scope.init(name="r", url=server.url, token=secret, directory=tmp_path) as run:
        with run.step() as step:
            step.log(loss=1.0)
        rotate_token(token)
        with run.step() as step:
            step.log(loss=2.0)
    assert losses(str(run.id)) == [1.0, 2.0]


def test_doctor_says_why(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    token, secret = create_token(server.project, "cluster", lifetime=timedelta(days=1))
    ApiToken.objects.filter(pk=token.pk).update(expires_at=timezone.now() - timedelta(minutes=1))
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", secret)
    cli.main(["doctor"])
    assert f"The token “cluster” ({token.prefix}…) expired on" in capsys.readouterr().out
