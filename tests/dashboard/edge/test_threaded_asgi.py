"""The threaded handler responds like the handler of Django and closes its connections and streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from dashboard.helpers import asgi_views
from dashboard.helpers.asgi_views import Answer, ask, events, held, request, run
from django.core import signals
from django.core.handlers.asgi import ASGIHandler
from django.test import Client

from fp8scope_dashboard.accounts.models import User
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.edge import callers
from fp8scope_dashboard.edge.thread_pools import ThreadPools
from fp8scope_dashboard.edge.threaded_asgi import Handler, ThreadHandler, make_handler

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def views(settings: Any) -> Iterator[None]:
    settings.ROOT_URLCONF = asgi_views.__name__
    events.clear()
    held.clear()
    yield
    for holder in held:
        assert holder.connection is None, "a connection was not returned to the pool"


def test_it_works() -> None:
    handler = Handler()
    answer = ask(handler, "/signin/")
    assert answer.status == 200 and b"<h1" in answer.body
    answer = ask(handler, "/api/v1/openapi.json")
    assert answer.status == 200 and answer.body.startswith(b"{")


def test_a_coroutine_view_runs_on_the_event_loop() -> None:
    handler = Handler()
    assert ask(handler, "/where").body.startswith(b"request")
    # Not in a request thread: on the event loop, which `run` starts in another thread.
    assert b"request" not in ask(handler, "/awaited").body
    assert ask(handler, "/x/where", root="").status == 404
    assert ask(handler, "/awaited", root="/x").status == 200


def test_an_untested_version_of_django_gets_its_own_handler(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(make_handler(ThreadPools()), Handler)
    with caplog.at_level(logging.WARNING):
        handler = make_handler(ThreadPools(), tested=[(4, 2)])
    assert type(handler) is ASGIHandler and "not tested with Django" in caplog.text
    assert ask(handler, "/signin/").status == 200


@pytest.mark.parametrize("tested", [[(5, 2)], []])
def test_both_handlers_remember_sessions(tested: list[tuple[int, int]]) -> None:
    create_project("default", "Default")
    client = Client()
    client.force_login(User.objects.create(username="ada", is_superuser=True))
    session = client.cookies["sessionid"].value
    assert session not in callers.sessions
    headers = {"cookie": f"sessionid={session}"}
    assert ask(make_handler(ThreadPools(), tested=tested), "/p/default/", headers=headers).status == 200
    assert session in callers.sessions


SECURE = {"SECURE_SSL_REDIRECT": True, "SECURE_HSTS_SECONDS": 60}


@pytest.mark.parametrize(
    ("target", "options", "changed", "status"),
    [
        ("/api/v1/openapi.json", {}, {}, 200),
        ("/api/v1/no/such", {}, {}, 404),
        ("/no/such", {}, {}, 404),
        ("/api/v1/runs/none/series", {"headers": {"authorization": "Bearer TOKEN"}}, {}, 422),
        ("/api/v1/runs/0198c0de-0000-7000-8000-000000000000/series", {}, {}, 401),
        (
            "/api/v1/runs/0198c0de-0000-7000-8000-000000000000/series?scalar=loss",
            {"headers": {"authorization": "Bearer TOKEN"}},
            {},
            404,
        ),
        ("/api/v1/openapi.json", {"method": "POST"}, {}, 403),
        ("/api/v1/runs/0198c0de-0000-7000-8000-000000000000/series", {"method": "POST"}, {}, 405),
        ("/signin/", {"method": "POST", "pieces": (b"username=a&password=b",)}, {}, 403),
        ("/p/default/", {}, {}, 302),
        ("/p/default/", {"headers": {"cookie": "COOKIE"}}, {}, 200),
        ("/p/other/", {"headers": {"cookie": "COOKIE"}}, {}, 404),
        ("/p/default/settings/tokens/new", {"method": "POST", "headers": {"cookie": "COOKIE"}}, {}, 403),
        ("/signin/", {}, {"ALLOWED_HOSTS": ["elsewhere"]}, 400),
        ("/api/v1/openapi.json", {}, {"ALLOWED_HOSTS": ["elsewhere"]}, 400),
        ("/signin/", {}, SECURE, 301),
        ("/api/v1/openapi.json", {}, SECURE, 301),
        ("/where", {"method": "HEAD"}, {}, 200),
        ("/echo", {"method": "POST", "pieces": (b"a",)}, {}, 403),
        ("/file", {}, {}, 200),
        ("/bug", {}, {}, 500),
    ],
)
def test_responds_like_the_handler_of_django(
    settings: Any, target: str, options: dict[str, Any], changed: dict[str, Any], status: int
) -> None:
    project = create_project("default", "Default")
    client = Client()
    client.force_login(User.objects.create(username="ada", is_superuser=True))
    secrets = {
        "Bearer TOKEN": f"Bearer {create_token(project, 'tests', scopes=('write', 'read'))[1]}",
        "COOKIE": f"sessionid={client.cookies['sessionid'].value}",
    }
    if "headers" in options:
        options = {**options, "headers": {name: secrets[value] for name, value in options["headers"].items()}}
    for name, value in changed.items():
        setattr(settings, name, value)
    actual, expected = (ask(make(), target, **options) for make in (ThreadHandler, ASGIHandler))
    assert actual.status == expected.status == status
    # These are random in each response.
    random = (b"set-cookie", b"content-length")
    assert _lowered(actual, random) == _lowered(expected, random)
    if b"csrfmiddlewaretoken" not in actual.body and b"X-CSRFToken" not in actual.body:
        assert (actual.body == expected.body) == (target != "/where")


def _lowered(answer: Answer, without: tuple[bytes, ...]) -> list[tuple[bytes, bytes]]:
    lowered = ((name.lower(), value) for name, value in answer.headers)
    # `Expires` depends on the second of the response.
    timeless = ((name, b"" if name == b"expires" else value) for name, value in lowered)
    return sorted((name, value) for name, value in timeless if name not in without)


def test_a_request_is_finished_before_the_response_is_sent() -> None:
    def finished(**_: Any) -> None:
        events.append("finished")

    signals.request_finished.connect(finished)
    try:
        answer = ask(ThreadHandler(), "/database")
    finally:
        signals.request_finished.disconnect(finished)
    assert answer.body == b"0" and answer.done == ["finished"] == events
    assert held[0].connection is None


def test_requests_do_not_wait_for_each_other() -> None:
    handler = ThreadHandler()

    async def both() -> list[Answer]:
        return list(await asyncio.gather(request(handler, "/meet"), request(handler, "/meet")))

    assert [answer.body for answer in run(both)] == [b"met", b"met"]


def test_a_thread_keeps_no_state_of_the_previous_request() -> None:
    handler = ThreadHandler()

    async def in_turn() -> list[bytes]:
        return [(await request(handler, "/address", root=root)).body for root in ("/x", "", "")]

    assert run(in_turn) == [b"/x/address en", b"/address en", b"/address en"]


@pytest.mark.parametrize("size", [0, 10, 3_000_000])
def test_receives_the_whole_body(size: int) -> None:
    client = Client(enforce_csrf_checks=True)
    token = client.get("/signin/").cookies["csrftoken"].value
    body = bytes(range(250)) * (size // 250)
    headers = {"cookie": f"csrftoken={token}", "x-csrftoken": token, "content-type": "text/plain"}
    answer = ask(
        ThreadHandler(),
        "/echo",
        method="POST",
        headers={**headers, "content-length": str(len(body))},
        pieces=(body[:1000], body[1000:]),
    )
    assert (answer.status, answer.body) == (200, body)


def test_a_client_that_disconnects_while_sending_gets_no_response() -> None:
    async def ask_and_leave() -> list[Any]:
        sent: list[Any] = []

        async def receive() -> Mapping[str, Any]:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await ThreadHandler()({"type": "http", "path": "/where", "method": "POST"}, receive, send)
        return sent

    assert run(ask_and_leave) == []


def test_a_stream_is_sent_part_by_part_and_closed() -> None:
    answer = ask(ThreadHandler(), "/parts?count=5")
    assert answer.parts == [b"0 ", b"1 ", b"2 ", b"3 ", b"4 ", b""]
    assert events == ["stream ended"]


def test_a_stream_ends_when_the_client_disconnects() -> None:
    answer = ask(ThreadHandler(), "/parts?count=1000000", leaves_after=3)
    assert 3 <= len(answer.parts) < 1000 and events == ["stream ended"]


def test_a_stream_that_fails_is_aborted() -> None:
    with pytest.raises(ValueError, match="in the middle of the stream"):
        ask(ThreadHandler(), "/parts?count=2&fail=1")
    assert events == ["stream ended"]


def test_a_server_that_stops_ends_its_streams() -> None:
    async def stop() -> None:
        answer = Answer()
        task = asyncio.create_task(request(ThreadHandler(), "/parts?count=1000000000", answer=answer))
        async with asyncio.timeout(60):
            while not answer.parts:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    run(stop)
    assert events == ["stream ended"]
