"""Requests of the client: repeated while the server is away, refused with a sentence, bounded in time."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from agent.helpers.answer_server import AnswerServer, Prepared, answer_server
from agent.helpers.stored_rows import RUN, row

from fp8scope.client import Client, ClientError, RunNotFoundError, UnreachableError
from fp8scope.config import ConfigurationError
from fp8scope.credentials import Login, credentials_path, save_login

TOKEN = "fp8s_secret"
PROJECT = Prepared(body={"slug": "default"})


def error(status: int, code: str, message: str = "No.", **headers: str) -> Prepared:
    body = {"error": {"code": code, "message": message, "hint": "Do this."}}
    return Prepared(
        status=status, body=body, headers=tuple((k.replace("_", "-"), v) for k, v in headers.items())
    )


def ask(answers: Sequence[Prepared], timeout: float = 30.0) -> AnswerServer:
    """Ask for the project until it is answered."""
    with answer_server(answers) as server, Client(server.url, TOKEN, timeout=timeout) as client:
        assert client.project() == {"slug": "default"}
        return server


def test_it_works() -> None:
    server = ask([PROJECT])
    assert server.asked == ["/api/v1/project"]
    assert server.headers[0]["Authorization"] == f"Bearer {TOKEN}"


@pytest.mark.parametrize(
    "fault",
    [
        error(503, "unavailable", Retry_After="0"),
        error(429, "slow_down", Retry_After="0"),
        error(500, "internal"),
        Prepared(status=502, body=b"<html>bad gateway</html>", kind="text/html"),
        Prepared(status=200, body=b"<html>sign in</html>", kind="text/html"),
        Prepared(status=200, body=b"", kind="application/json"),
        Prepared(drops=True),
    ],
    ids=str,
)
def test_asks_again(fault: Prepared) -> None:
    assert len(ask([fault, fault, PROJECT]).asked) == 3


def test_waits_as_long_as_the_server_asks() -> None:
    began = time.monotonic()
    ask([error(503, "unavailable", Retry_After="1"), PROJECT])
    assert time.monotonic() - began >= 1.0


def test_gives_up_when_its_patience_ends() -> None:
    with answer_server(
        [error(503, "unavailable", "The database is not available.", Retry_After="60")]
    ) as server:
        began = time.monotonic()
        with pytest.raises(UnreachableError, match="The database is not available"):
            Client(server.url, TOKEN, patience=5.0).project()
        assert time.monotonic() - began < 5.0 and len(server.asked) == 1


def test_a_server_that_does_not_answer_in_time_is_asked_again() -> None:
    assert len(ask([Prepared(waits=2.0, body={}), PROJECT], timeout=0.3).asked) == 2


def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(UnreachableError, match="does not answer") as caught:
        Client(f"http://127.0.0.1:{port}", TOKEN, patience=0.0).project()
    assert caught.value.status == 0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (error(401, "bad_token", "The token is unknown."), "The token is unknown. Do this."),
        (error(403, "forbidden", "It may not read."), "may not read"),
        (error(422, "invalid", "sort: no."), "sort: no"),
        (Prepared(status=404, body=b"<html>", kind="text/html"), "no dashboard is at this address"),
        (
            Prepared(status=302, body=b"", headers=(("Location", "https://sso.example.org/"),)),
            "redirects to https://sso",
        ),
    ],
    ids=str,
)
def test_a_refusal_is_not_repeated(answer: Prepared, message: str) -> None:
    with answer_server([answer]) as server:
        with pytest.raises(ClientError, match=message) as caught:
            Client(server.url, TOKEN).project()
        assert len(server.asked) == 1 and TOKEN not in str(caught.value)


NOTE = {"step": 3, "text": "x", "written_by": "ada", "written_at": "2026-01-01T00:00:00Z"}


def test_what_is_written_is_sent_once_as_json() -> None:
    with answer_server([Prepared(body=row()), Prepared(status=201, body=NOTE)]) as server:
        note = Client(server.url, TOKEN).run(RUN).write_note(3, "x")
        assert (note.step, note.text, note.written_by) == (3, "x", "ada")
        assert server.asked[1:] == [f"/api/v1/runs/{RUN}/step_notes"]
        assert json.loads(server.bodies[0]) == {"step": 3, "text": "x"}
        assert server.headers[1]["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Prepared(drops=True), "look before you repeat it"),
        (error(503, "unavailable", "The database is not available."), "not available"),
        (error(403, "forbidden", "It may not write."), "may not write"),
        (Prepared(status=502, body=b"<html>", kind="text/html"), "HTTP 502"),
    ],
    ids=str,
)
def test_what_is_written_is_never_repeated(fault: Prepared, message: str) -> None:
    with answer_server([Prepared(body=row()), fault, Prepared(status=201, body=NOTE)]) as server:
        with pytest.raises(ClientError, match=message):
            Client(server.url, TOKEN).run(RUN).write_note(3, "x")
        assert len(server.asked) == 2


def test_an_older_server_has_no_list_of_accepted_commands() -> None:
    with answer_server([Prepared(body=row()), Prepared(body={"commands": [], "reports": []})]) as server:
        run = Client(server.url, TOKEN).run(RUN)
        with pytest.raises(ClientError, match="older than this client"):
            run.accepted_commands()
        assert run.commands() == []


def test_an_unknown_run_is_a_lookup_error() -> None:
    with answer_server([error(404, "unknown_run", "The project has no run.")]) as server:
        with pytest.raises(RunNotFoundError, match="has no run") as caught:
            Client(server.url, TOKEN).run(RUN)
        assert isinstance(caught.value, LookupError)
    with (
        answer_server([Prepared(body={"runs": [], "total": 0, "problems": [], "next": None})]) as server,
        pytest.raises(RunNotFoundError, match="no run with the name or id 'gpt'"),
    ):
        Client(server.url, TOKEN).run("gpt")


def test_a_search_that_is_not_understood_is_an_error() -> None:
    answer = {"runs": [row()], "total": 1, "problems": ["There is no field “x”."], "next": None}
    with answer_server([Prepared(body=answer)]) as server:
        client = Client(server.url, TOKEN)
        for read in (
            lambda: list(client.runs("x:1")),
            lambda: len(client.runs("x:1")),
            client.runs("x:1").first,
        ):
            with pytest.raises(ClientError, match="There is no field “x”"):
                read()


def test_an_answer_of_an_older_server_says_so() -> None:
    older = {"runs": [{"id": RUN, "name": "a"}], "total": 1, "problems": []}
    with answer_server([Prepared(body={"alerts": [], "next": None}), Prepared(body=older)]) as server:
        client = Client(server.url, TOKEN)
        assert list(client.alerts()) == []
        with pytest.raises(ClientError, match="older than this client"):
            list(client.runs())


def test_an_answer_may_have_an_entry_of_the_name_error() -> None:
    with answer_server([Prepared(body={"error": {"mean": 0.1}, "headline": "x"})]) as server:
        assert Client(server.url, TOKEN).project()["error"] == {"mean": 0.1}


def test_a_huge_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8scope.client.connection.MAX_BYTES", 1 << 20)
    with answer_server([Prepared(body=b'{"x": "' + b"y" * (2 << 20) + b'"}')]) as server:
        with pytest.raises(ClientError, match="exceeds 1 MiB"):
            Client(server.url, TOKEN).project()
        assert len(server.asked) == 1


def test_the_login_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("FP8SCOPE_URL", "FP8SCOPE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match="fp8scope login"):
        Client()
    with answer_server([PROJECT]) as server:
        save_login(credentials_path(), Login(server.url, "fp8s_stored"))
        save_login(credentials_path(), Login("https://other.example.org", "fp8s_other", "other"))
        # Where recordings are kept does not matter to a reader.
        monkeypatch.setenv("FP8SCOPE_DIR", "~nobody-of-this-name/x")
        Client(server.url).project()
        assert server.headers[-1]["Authorization"] == "Bearer fp8s_stored"
        assert Client(project="other").url == "https://other.example.org"
        monkeypatch.setenv("FP8SCOPE_TOKEN", "fp8s_of_the_environment")
        Client(server.url).project()
        assert server.headers[-1]["Authorization"] == "Bearer fp8s_of_the_environment"


def test_the_token_is_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with answer_server([PROJECT]) as server:
        client = Client(server.url, TOKEN)
        client.project()
        assert TOKEN not in f"{client!r} {vars(client)!r} {client.runs()!r} {caplog.text}"


@pytest.mark.parametrize(
    ("url", "token"),
    [("example.org", TOKEN), ("http://a/?b", TOKEN), ("http://u:p@a", TOKEN), ("http://a", "x y")],
)
def test_wrong_settings_are_refused(url: str, token: str) -> None:
    with pytest.raises(ConfigurationError):
        Client(url, token)
