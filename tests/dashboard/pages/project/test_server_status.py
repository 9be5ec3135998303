"""The state of the server: who may see it, what it measures, and what it advises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.visitors import Visitor
from django.conf import LazySettings
from django.test import Client

from fp8scope_dashboard.instrumentation.jobs import QUEUED_AT
from fp8scope_dashboard.monitoring import brokers, checks, database, status


@pytest.fixture(autouse=True)
def _measured_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "FRESH_SECONDS", 0.0)


@pytest.fixture
def superuser(admin: Visitor) -> Visitor:
    admin.user.is_superuser = True
    admin.user.save()
    return admin


def measured(visitor: Visitor) -> dict[str, Any]:
    return dict(visitor.client.get("/server/status.json").json())


def test_it_works(superuser: Visitor) -> None:
    recorder = Recorder(run=make_run(superuser.project, "r"))
    recorder.rows([0, 1], {"loss": [2.0, 1.0]})
    page = superuser.client.get("/server/").content.decode()
    assert "Server status" in page and superuser.project.name in page
    answer = measured(superuser)
    found = {check["key"]: check for check in answer["checks"]}
    assert found["postgresql"]["value"] == "answers"
    assert answer["database"]["per_minute"][0] == 1 and answer["database"]["sending"] == 1
    (project,) = answer["database"]["projects"]
    assert project["points"] == 2 and project["runs"] == 1
    assert answer["versions"]["PostgreSQL"]


def test_only_administrators_of_the_server_see_it(admin: Visitor) -> None:
    assert admin.client.get("/server/").status_code == 403
    assert admin.client.get("/server/status.json").status_code == 401
    assert Client().get("/server/").status_code == 302


def test_monitoring_has_a_token(db: None, settings: LazySettings) -> None:
    def answer(token: str) -> int:
        return Client().get("/server/status.json", headers={"Authorization": f"Bearer {token}"}).status_code

    assert answer("") == 401, "without a configured token nobody has it"
    settings.STATUS_TOKEN = "let me see"
    assert (answer("let me see"), answer("let me in"), answer("")) == (200, 401, 401)


def test_says_what_to_do_without_redis(superuser: Visitor, settings: LazySettings) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    answer = measured(superuser)
    redis = next(check for check in answer["checks"] if check["key"] == "redis")
    assert answer["status"] == redis["tone"] == "danger" and "REDIS_URL" in redis["advice"]
    assert "Needs action" in superuser.client.get("/server/").content.decode()


def test_a_slow_database_does_not_hold_the_page(superuser: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "STATEMENT_MILLISECONDS", 50)
    monkeypatch.setattr(database, "SIZES", "SELECT 'x', pg_sleep(30)::text")
    answer = measured(superuser)
    assert answer["database"] is None and answer["status"] == "danger"


def test_the_wait_of_a_task_is_from_its_header() -> None:
    message = json.dumps({"headers": {QUEUED_AT: 100.0}}).encode()
    assert brokers.waiting_since(message, 130.0) == 30.0
    for other in (None, b"", b"{", b"[]", json.dumps({"headers": {}}).encode(), b"x" * 100_000):
        assert brokers.waiting_since(other, 130.0) is None


@pytest.mark.parametrize(
    ("check", "tone"),
    [
        (checks.queue("evaluations", 0, None), "good"),
        (checks.queue("evaluations", 9, 30.0), "warning"),
        (checks.queue("evaluations", 9, 300.0), "danger"),
        (checks.workers(0, 5), "danger"),
        (checks.workers(0, 0), "warning"),
        (checks.workers(2, 5), "good"),
        (checks.compaction(3, 600.0), "good"),
        (checks.compaction(3, 8_000.0), "danger"),
        (checks.detectors(2, 1), "good"),
        (checks.detectors(50, 1), "warning"),
        (checks.disk("database", 100, 50), "good"),
        (checks.disk("database", 100, 5), "warning"),
        (checks.disk("database", 100, 1), "danger"),
        (checks.connections(99, 100), "danger"),
    ],
)
def test_each_check_has_advice_where_it_is_not_good(check: checks.Check, tone: str) -> None:
    assert check.tone == tone
    assert bool(check.advice) == (tone != "good")


def test_the_whole_is_as_good_as_its_worst_part() -> None:
    fine, bad = checks.ingest([0], 0), checks.workers(0, 1)
    assert checks.worst([fine]) == "good" and checks.worst([fine, bad]) == "danger"
