"""Pages of runs and alerts, one alert, times of a series, notes and commands."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from agent.helpers.answer_server import Prepared, answer_server
from agent.helpers.stored_rows import RUN, row

from fp8scope.client import Client, ClientError, reading

ALERT: dict[str, Any] = {
    "id": 7, "run": {"id": RUN, "name": "a run", "url": "https://example.org/"}, "kind": "loss_spike",
    "title": "Spike", "severity": "warning", "state": "open", "step": 5, "onset_step": 4, "earliest_step": 3,
    "value": 1.5, "threshold": None, "message": "Up.", "tensors": ["a"], "opened_at": "2026-01-01T00:00:00Z",
    "resolved_at": None, "acknowledged_at": None, "acknowledged_by": "", "url": "https://example.org/7/",
}  # fmt: skip
COMMAND: dict[str, Any] = {
    "id": 3, "kind": "pause", "arguments": {"seconds": 5}, "reason": "r", "given_by": "ada",
    "given_at": "2026-01-01T00:00:00Z", "state": "done", "message": "", "step": 9,
}  # fmt: skip


def client_of(url: str) -> Client:
    return Client(url, "fp8s_secret", patience=0.0)


def test_a_page_of_runs() -> None:
    body = {"runs": [row(), row(id=RUN[:-1] + "2")], "total": 9, "problems": [], "next": RUN}
    with answer_server([Prepared(body=body)]) as server:
        page = client_of(server.url).runs("loss<1", sort="name").page(2, after=RUN)
        assert (
            "after=" + RUN in server.asked[0]
            and "limit=2" in server.asked[0]
            and "sort=name" in server.asked[0]
        )
    assert (len(page.runs), page.total, page.next) == (2, 9, RUN) and page.runs[0].name == "a run"


def test_a_page_of_a_search_that_is_not_understood_is_an_error() -> None:
    body = {"runs": [], "total": 0, "problems": ["No such field."], "next": None}
    with answer_server([Prepared(body=body)]) as server, pytest.raises(ClientError, match="No such field"):
        client_of(server.url).runs("x:y").page()


def test_a_page_of_alerts_of_a_run() -> None:
    body = {"alerts": [ALERT], "total": 5, "next": 7}
    with answer_server([Prepared(body=row()), Prepared(body=body)]) as server:
        page = client_of(server.url).alert_page(run=RUN, state="all", limit=1, after=8)
        assert (
            f"run={RUN}" in server.asked[1]
            and "after=8" in server.asked[1]
            and "state=all" in server.asked[1]
        )
    assert (page.total, page.next, page.alerts[0].id) == (5, 7, 7) and page.alerts[0].run == "a run"


def test_one_alert_with_its_evidence() -> None:
    body = {**ALERT, "evidence": {"z": 4.5}, "history": [{"kind": "opened", "at": "x", "by": "", "text": ""}]}
    with answer_server([Prepared(body=body), Prepared(body={"empty": "No data."})]) as server:
        details = client_of(server.url).alert(7)
        assert client_of(server.url).alert_table(7) == {"empty": "No data."}
        assert server.asked == ["/api/v1/alerts/7", "/api/v1/alerts/7/figure?format=json"]
    assert details.evidence == {"z": 4.5} and details.history[0]["kind"] == "opened"
    assert details.alert.opened_at == datetime(2026, 1, 1, tzinfo=UTC) and details.alert.threshold is None


def test_times_of_a_series_are_datetimes_and_may_be_missing() -> None:
    body = {"steps": [1, 2], "values": [1.0, 2.0], "thinned": False, "times": [1, None]}
    with answer_server([Prepared(body=row()), Prepared(body=body)]) as server:
        history = client_of(server.url).run(RUN).history("loss", points=100, times=True)
        assert "times=true" in server.asked[1]
    assert history.times is not None and history.times.dtype == np.dtype("datetime64[us]")
    assert history.times[0] == np.datetime64(1, "us") and np.isnat(history.times[1])


def test_times_of_a_series_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_POINTS", 8)
    whole = {"steps": [1, 16], "values": [1.0, 2.0], "thinned": True, "how": "some", "times": [1, 16]}
    parts = [{"steps": [low], "values": [1.0], "thinned": False, "times": [low]} for low in (1, 9)]
    with answer_server([Prepared(body=body) for body in (row(), whole, *parts)]) as server:
        history = client_of(server.url).run(RUN).history("loss", times=True)
    assert history.steps.tolist() == [1, 9] and not history.thinned
    assert history.times is not None and history.times.astype(np.int64).tolist() == [1, 9]


def test_commands_and_their_results() -> None:
    history = {"accepts": ["fallback", "pause"], "commands": [COMMAND], "reports": []}
    answers = [Prepared(body=row()), Prepared(body=history), Prepared(body=history)]
    with answer_server([*answers, Prepared(status=201, body=COMMAND)]) as server:
        run = client_of(server.url).run(RUN)
        assert run.accepted_commands() == ["fallback", "pause"]
        (command,) = run.commands()
        given = run.give_command("pause", {"seconds": 5}, reason="r")
        assert json.loads(server.bodies[0]) == {"kind": "pause", "arguments": {"seconds": 5}, "reason": "r"}
    assert given == command and (command.state, command.step, command.given_by) == ("done", 9, "ada")


def test_notes_are_read_with_the_run() -> None:
    note = {"step": 3, "text": "Seen.", "written_by": "", "written_at": "2026-01-01T00:00:00Z"}
    with answer_server([Prepared(body=row()), Prepared(body=row(step_notes=[note]))]) as server:
        (read,) = client_of(server.url).run(RUN).notes()
    assert (read.step, read.text, read.written_by) == (3, "Seen.", "")


def test_a_ranking_can_begin_later() -> None:
    body = {"statistic": "amax", "limit": 1.0, "total": 0, "out_of_range": 0, "still": 0, "tensors": []}
    with answer_server([Prepared(body=row()), Prepared(body=body)]) as server:
        assert client_of(server.url).run(RUN).ranking(offset=40).tensors == ()
        assert "offset=40" in server.asked[1]
