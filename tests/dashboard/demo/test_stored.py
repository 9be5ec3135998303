"""Queries of the demo for the stored data of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import ClassVar

import pytest

from fp8scope_dashboard.demo.stored import Dashboard
from fp8scope_dashboard.embedded.processes import ServerError


class Answers(BaseHTTPRequestHandler):
    """Sends the prepared answers in order and then repeats the last one."""

    prepared: ClassVar[list[tuple[int, object]]] = []
    requests: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.requests.append((self.path, self.headers["Authorization"]))
        status, document = self.prepared.pop(0) if len(self.prepared) > 1 else self.prepared[0]
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dashboard]:
    monkeypatch.setattr("fp8scope_dashboard.demo.stored.POLL_SECONDS", 0.01)
    Answers.prepared, Answers.requests = [(200, {"rows_stored": 1})], []
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Dashboard(f"http://127.0.0.1:{server.server_port}", "fp8s_secret")
        server.shutdown()
        thread.join()


def test_it_works(dashboard: Dashboard) -> None:
    assert dashboard.run("abc") == {"rows_stored": 1}
    assert Answers.requests == [("/api/v1/runs/abc", "Bearer fp8s_secret")]


@pytest.mark.parametrize("status", [404, 500, 503])
def test_waits_through_temporary_errors(dashboard: Dashboard, status: int) -> None:
    Answers.prepared = [(status, {}), (status, {}), (200, {"rows_stored": 5})]
    assert dashboard.run("abc") is None
    assert dashboard.wait("abc", lambda run: run["rows_stored"] == 5, 30)["rows_stored"] == 5


def test_does_not_wait_after_a_refusal(dashboard: Dashboard) -> None:
    Answers.prepared = [(401, {})]
    with pytest.raises(ServerError, match="status 401"):
        dashboard.run("abc")


def test_waits_until_ready(dashboard: Dashboard) -> None:
    Answers.prepared = [(200, {"rows_stored": number}) for number in range(5)]
    assert dashboard.wait("abc", lambda run: run["rows_stored"] == 3, 30) == {"rows_stored": 3}


def test_returns_the_latest_data_at_the_deadline(dashboard: Dashboard) -> None:
    assert dashboard.wait("abc", lambda run: False, 0.05) == {"rows_stored": 1}


def test_reports_an_unreachable_server() -> None:
    with pytest.raises(ServerError, match="returned no data about run abc"):
        Dashboard("http://127.0.0.1:1", "fp8s_secret").wait("abc", lambda run: True, 0.05)


def test_its_repr_does_not_contain_the_token(dashboard: Dashboard) -> None:
    assert "secret" not in repr(dashboard)
