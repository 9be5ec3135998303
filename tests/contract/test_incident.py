"""From a critical alert of a real server to an incident on the run's page, and to the post-mortem."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from helpers.live_servers import Server, Worker

import fp8scope
from fp8scope.cli.main import main
from fp8scope.incidents.folder import StoredIncident
from fp8scope_dashboard.control import commands
from fp8scope_dashboard.control.models import Report
from fp8scope_dashboard.runs.models import Run

DEADLINE_SECONDS = 60.0


def test_an_alert_becomes_an_incident_and_a_post_mortem(
    server: Server,
    worker: Worker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)
    run = fp8scope.init(name="diverges", directory=tmp_path / "spool")
    run.on_command("checkpoint", lambda command: "written to step-31.pt")
    reports = Report.objects.filter(run_id=run.id, document__has_key="incident")
    deadline, number = time.monotonic() + DEADLINE_SECONDS, 0
    while not reports.exists():
        assert time.monotonic() < deadline, "no incident arrived in time"
        number += 1
        with run.step() as step:
            step.log(loss=float("nan") if number >= 30 else 2.0)
        time.sleep(0.02)
    commands.give(Run.objects.get(pk=run.id), "checkpoint", reason="before it is too late")
    while not run.session.sent_reports or run.session.sent_reports[-1]["kind"] != "command":
        assert time.monotonic() < deadline, "the command did not arrive in time"
        with run.step() as step:
            step.log(loss=float("nan"))
        time.sleep(0.02)
    assert run.finish().complete
    facts = reports.get().document["incident"]
    incident = StoredIncident(Path(facts["folder"]))
    assert (incident.target, facts["target"], facts["reason"]) == (30, 30, "alert")
    assert [row.step for row in incident.rows[:30]] == list(range(1, 31))
    assert main(["report", run.id, "-o", str(tmp_path / "report.md")]) == 0
    text = (tmp_path / "report.md").read_text().replace("\\", "")
    assert "step 30: Loss not finite (critical)" in text
    assert "somebody gave the command checkpoint (before it is too late): done, written to step-31.pt" in text
    assert "Incident kept: steps 1 to" in text
    assert (tmp_path / "report-loss.svg").is_file()
