"""Quotas of a running web server."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import urllib3
from dashboard.helpers.visitors import visitor_of
from django.conf import settings
from helpers.live_servers import web_server

from fp8scope_dashboard.accounts.models import Project, Role
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.edge.quotas import counts

QUOTAS = {"RUNS": "3", "TENSORS": "5", "CONSOLE_LINES": "6", "BYTES": "20000"}
WRITER = str(uuid.UUID(int=7))


class Client:
    def __init__(self, url: str, project: Project) -> None:
        self.token, secret = create_token(project, "a token")
        self._url, self._headers = url, {"Authorization": f"Bearer {secret}"}

    def send(self, method: str, path: str, document: Any) -> urllib3.BaseHTTPResponse:
        body = json.dumps(document).encode()
        headers = {**self._headers, "Content-Type": "application/json"}
        address = f"{self._url}/api/v1{path}"
        return urllib3.request(method, address, headers=headers, body=body, retries=False, timeout=60.0)

    def register(self) -> uuid.UUID:
        run = uuid.uuid4()
        assert self.send("PUT", f"/runs/{run}", {"name": "r"}).status == 201
        return run

    def beat(self, run: uuid.UUID, **more: str) -> urllib3.BaseHTTPResponse:
        return self.send("POST", f"/runs/{run}/heartbeat", {"writer": WRITER, **more})


@pytest.fixture
def url(transactional_db: None, tmp_path: Path) -> Iterator[str]:
    with redis.Redis.from_url(settings.REDIS_URL) as client:
        client.flushdb()
    variables = {f"FP8SCOPE_QUOTA_{name}": value for name, value in QUOTAS.items()}
    with web_server(tmp_path / "web.log", **variables) as (address, _):
        yield address


@pytest.fixture
def client(url: str) -> Client:
    return Client(url, create_project("default", "Default"))


def refused(answer: urllib3.BaseHTTPResponse) -> bool:
    """Whether a quota refuses, in the form that agents understand."""
    if answer.status != 429:
        assert answer.status in (200, 201), answer.data
        return False
    assert answer.json()["error"]["code"] == "slow_down" and int(answer.headers["Retry-After"]) >= 1
    return True


def test_it_works(url: str, client: Client) -> None:
    run = client.register()
    for _ in range(2):
        client.register()
    assert refused(client.send("PUT", f"/runs/{uuid.uuid4()}", {"name": "r"}))
    assert not refused(client.send("PUT", f"/runs/{run}", {"name": "r"})), "it is registered already"
    other = Client(url, create_project("other", "Other"))
    assert not refused(other.beat(other.register())), "a project has its own quotas"


def test_tensors_lines_and_bytes(client: Client) -> None:
    run = client.register()
    path = f"/runs/{run}/writers/{WRITER}/tensors"
    tensors = [{"name": f"t{i}"} for i in range(5)]
    assert not refused(client.send("POST", path, {"tensors": tensors}))
    assert refused(client.send("POST", path, {"offset": 5, "tensors": [{"name": "more"}]}))
    line = {"time": "2026-01-01T00:00:00Z", "text": "x"}
    lines = {"kind": "console", "writer": WRITER, "lines": [{**line, "number": i} for i in range(6)]}
    # A minute may end between two of them.
    sent = [client.send("POST", f"/runs/{run}/reports", {**lines, "seq": seq}) for seq in range(3)]
    assert [refused(answer) for answer in sent].count(True) >= 1
    assert not refused(client.beat(run))
    assert any(refused(client.beat(run, more="x" * 30_000)) for _ in range(4))


def test_the_settings_page_shows_the_use(db: None) -> None:
    member = visitor_of(create_project("default", "Default"), "mia", Role.MEMBER)
    token, _ = create_token(member.project, "nightly")
    counts.take(token.pk, token.project_id, requests=123, bytes=5_000_000, console_lines=7)
    counts.swap()
    page = member.client.get(member.address("settings/")).content.decode()
    assert "nightly: 123" in page and "Console lines a minute" in page
