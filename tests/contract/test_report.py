"""`fp8scope report RUN` against a server, for runs of which little is known."""

from __future__ import annotations

from pathlib import Path

import pytest
from contract.helpers.wire_client import WireClient
from helpers.live_servers import Server

from fp8scope.cli.main import main


def report(run: WireClient, server: Server, folder: Path, patch: pytest.MonkeyPatch) -> str:
    """The Markdown of the report."""
    patch.setenv("FP8SCOPE_URL", server.url)
    patch.setenv("FP8SCOPE_TOKEN", server.token)
    assert main(["report", str(run.run), "-o", str(folder / "report.md")]) == 0
    return (folder / "report.md").read_text().replace("\\", "")


def test_a_run_that_failed_before_its_first_step(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = WireClient(server.url, server.token)
    assert client.register().status == 201
    ending = {"writer": str(client.writer), "seq": 0, "state": "failed", "rows_sent": 0, "points_sent": 0}
    ending["error"] = "Traceback\n  ...\nRuntimeError: out of memory"
    assert client.request("POST", "/finish", json=ending).status == 201
    text = report(client, server, tmp_path, monkeypatch)
    assert "failed, no step was stored: RuntimeError: out of memory" in text
    assert "No alert was opened." in text and "nothing to diagnose" in text
    assert "| Baseline | none |" in text and "| Recipe | none |" in text


def test_a_run_without_alerts_or_baseline(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = WireClient(server.url, server.token)
    assert client.register().status == 201
    assert client.send(client.batch(0, [1, 2, 3], scalars={"loss": [2.0, 1.9, 1.8]})).status == 201
    text = report(client, server, tmp_path, monkeypatch)
    assert "running, last step 3" in text and "No alert was opened." in text
    assert "not diagnosed yet" in text and "report-loss.svg" in text
