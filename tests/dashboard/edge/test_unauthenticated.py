"""Unauthenticated requests do not slow down agents and signed-in users."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import urllib3
from contract.helpers.refusals import registered
from contract.helpers.wire_client import Answer, WireClient
from dashboard.helpers.unauthenticated import (
    CSRF,
    connect,
    raw,
    sign_in,
    sign_in_flood,
    temporary_bytes,
    upload,
)
from django.contrib.sessions.models import Session
from helpers.live_servers import Server, web_server
from helpers.waiting import PATIENCE_SECONDS, wait_until

from fp8scope_dashboard.accounts.models import User
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.edge import limits
from fp8scope_dashboard.wire.limits import MIB

PASSWORD = "correct horse battery"
TESTS = Path(__file__).resolve().parents[2]


@pytest.fixture
def production(transactional_db: None, tmp_path: Path) -> Iterator[Server]:
    """A separate web server with slow password hashes and a pool of database connections."""
    project = create_project("default", "Default")
    token = create_token(project, "tests", scopes=("write", "read"))[1]
    log = tmp_path / "web.log"
    with web_server(
        log,
        DJANGO_SETTINGS_MODULE="dashboard.helpers.production_settings",
        PYTHONPATH=f"{TESTS}:{os.environ.get('PYTHONPATH', '')}",
        FP8SCOPE_TRUSTED_PROXIES="127.0.0.1",
    ) as (url, process):
        yield Server(url, token, project, process, log)


def beat(client: WireClient) -> Answer:
    """The response to a heartbeat."""
    return client.request("POST", "/heartbeat", json={"writer": str(client.writer)})


def test_it_works(production: Server) -> None:
    """Heartbeats and /healthz are answered during a flood of sign-in attempts."""
    client = registered(production)
    assert beat(client).status == 200
    with sign_in_flood(production.url, 30) as statuses:
        time.sleep(1)
        beats = []
        until = time.monotonic() + 3
        while time.monotonic() < until or sum(statuses.values()) <= 100:
            assert time.monotonic() < until + PATIENCE_SECONDS
            beats.append(beat(client).status)
            healthz = urllib3.request("GET", f"{production.url}/healthz", retries=False, timeout=30)
            assert healthz.status == 200
            time.sleep(0.1)
    assert set(beats) == {200}
    # Requests beyond the limit are refused at once.
    assert sum(statuses.values()) > 100 and set(statuses) <= {200, 429, 503, 0}


def test_a_flood_from_many_addresses_gets_503(production: Server) -> None:
    """Sign-ins that find the threads for passwords and their queue full are refused at once."""
    client = registered(production)
    statuses: list[int] = []

    def attack(number: int) -> None:
        for attempt in range(3):
            headers = {"X-Forwarded-For": f"203.0.{number}.{attempt}"}
            statuses.append(sign_in(production.url, f"name-{number}-{attempt}", headers=headers))

    threads = [threading.Thread(target=attack, args=(i,)) for i in range(40)]
    for thread in threads:
        thread.start()
    assert beat(client).status == 200
    for thread in threads:
        thread.join(120)
    assert set(statuses) == {200, 503}


def test_a_signed_in_user_is_authenticated(production: Server) -> None:
    User.objects.create_user("ada", password=PASSWORD)
    body = f"username=ada&password={PASSWORD.replace(' ', '+')}&csrfmiddlewaretoken={CSRF}"
    connection = connect(production.url)
    headers = {"Cookie": f"csrftoken={CSRF}", "Content-Type": "application/x-www-form-urlencoded"}
    connection.request("POST", "/signin/", body, headers)
    answer = connection.getresponse()
    assert answer.status == 302
    answer.read()
    cookies = [value for name, value in answer.getheaders() if name.lower() == "set-cookie"]
    session = next(value.partition(";")[0] for value in cookies if value.startswith("sessionid="))
    for _ in range(limits.UNAUTHENTICATED_BURST * 2):
        connection.request("GET", "/", headers={"Cookie": session})
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
    # After the sign-out, the same cookie authenticates nobody.
    Session.objects.all().delete()
    statuses = until_refused(lambda: connect_and_get(production.url, session))
    assert statuses[0] == 302 and 429 in statuses


def until_refused(send: Callable[[], int]) -> list[int]:
    """The statuses of requests up to the first one that is refused.

    A slow machine sends hardly faster than the allowance grows; then the burst lasts for longer.
    """
    statuses = [send()]
    while statuses[-1] != 429 and len(statuses) < 20 * limits.UNAUTHENTICATED_BURST:
        statuses.append(send())
    return statuses


def connect_and_get(url: str, cookie: str) -> int:
    headers = {"Cookie": cookie}
    return urllib3.request("GET", f"{url}/", headers=headers, retries=False, redirect=False).status


def test_anonymous_requests_are_limited_by_address(production: Server) -> None:
    def get(address: str, cookie: str = "") -> int:
        headers = {"X-Forwarded-For": address, "Cookie": cookie}
        return urllib3.request("GET", f"{production.url}/signin/", headers=headers, retries=False).status

    statuses = until_refused(lambda: get("203.0.113.1"))
    assert statuses[:50] == [200] * 50 and 429 in statuses
    assert get("203.0.113.2") == 200
    # A session that this process does not know yet, as after a restart, is counted separately.
    assert get("203.0.113.1", "sessionid=abcdefghijklmnopqrstuvwxyz012345") == 200


def test_ignores_the_address_headers_of_unauthenticated_clients(server: Server) -> None:
    addresses = itertools.count()

    def get() -> int:
        third, fourth = divmod(next(addresses), 250)
        headers = {"X-Forwarded-For": f"203.0.{third}.{fourth}"}
        return urllib3.request("GET", f"{server.url}/signin/", headers=headers, retries=False).status

    assert 429 in until_refused(get)


def test_unknown_tokens_are_limited_and_known_ones_are_not(production: Server) -> None:
    client = registered(production)
    unknown = WireClient(client.url, f"fp8s_{'a' * 8}_{'b' * 43}", run=client.run)
    codes: set[str | None] = set()

    def beat_unknown() -> int:
        answer = beat(unknown)
        codes.add(answer.code)
        return answer.status

    assert set(until_refused(beat_unknown)) == {401, 429}
    assert codes == {"bad_token", "slow_down"}
    assert beat(client).status == 200


@pytest.mark.parametrize("token", [None, "nonsense", f"fp8s_{'a' * 8}_{'b' * 43}"])
def test_a_body_without_a_good_token_is_not_read(server: Server, token: str | None) -> None:
    headers = "" if token is None else f"Authorization: Bearer {token}\r\n"
    path = "/api/v1/runs/0198c0de-0000-7000-8000-000000000000/batches"
    # The end of the body is never sent.
    _, answer = upload(server.url, path, 31_000_000, headers)
    assert answer.startswith(b"HTTP/1.1 401") and b"connection: close" in answer
    code = "no_token" if token is None else "bad_token"
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == code
    assert temporary_bytes(server.process.pid) == 0


def test_large_bodies_of_unauthenticated_clients_take_no_memory(server: Server) -> None:
    before = psutil.Process(server.process.pid).memory_info().rss
    path = "/api/v1/runs/0198c0de-0000-7000-8000-000000000000/batches"
    threads = [threading.Thread(target=upload, args=(server.url, path, 31_000_000)) for _ in range(60)]
    for thread in threads:
        thread.start()
    most = 0
    while any(thread.is_alive() for thread in threads):
        most = max(most, temporary_bytes(server.process.pid))
        time.sleep(0.02)
    assert most == 0
    assert psutil.Process(server.process.pid).memory_info().rss - before < 64 * MIB


def test_refuses_a_large_form_of_an_unauthenticated_client(server: Server) -> None:
    _, answer = upload(server.url, "/signin/", limits.UNAUTHENTICATED_BODY_BYTES + 1)
    assert answer.startswith(b"HTTP/1.1 413")


def test_refuses_a_known_token_after_its_revocation(server: Server) -> None:
    from fp8scope_dashboard.accounts.models import ApiToken

    client = registered(server)
    assert beat(client).status == 200
    ApiToken.objects.update(revoked_at="2026-01-01T00:00:00Z")
    assert beat(client).code == beat(client).code == "bad_token"


def test_slow_headers_and_slow_bodies_time_out(server: Server) -> None:
    slow = {
        "headers": b"GET /signin/ HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ",
        "nothing but line ends": b"\r\n",
        "second request": b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\nGET /healthz HTTP/1.1\r\nX-Slow: ",
        "body": b"POST /signin/ HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 50000\r\n\r\n",
        "agent's body": (
            f"POST /api/v1/runs/0198c0de-0000-7000-8000-000000000000/batches HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Authorization: Bearer {server.token}\r\nContent-Length: 5000000\r\n\r\n"
        ).encode(),
    }
    connections = {name: raw(server.url, start) for name, start in slow.items()}
    until = time.monotonic() + limits.BODY_SECONDS + PATIENCE_SECONDS
    answers = dict.fromkeys(connections, b"")
    try:
        opened = dict(connections)
        while opened and time.monotonic() < until:
            time.sleep(0.5)
            for name, connection in list(opened.items()):
                try:
                    connection.sendall(b"\r\n" if "line ends" in name else b"x")
                    connection.settimeout(0.01)
                    piece = connection.recv(65536)
                    answers[name] += piece
                    if not piece:
                        del opened[name]
                except TimeoutError:
                    pass
                except OSError:
                    del opened[name]
        assert list(opened) == []
    finally:
        for connection in connections.values():
            connection.close()
    for name, answer in answers.items():
        assert b"408 Request Timeout" in answer or name == "nothing but line ends", (name, answer)
    assert b'"too_slow"' in answers["agent's body"]


def test_endless_headers_close_the_connection(server: Server) -> None:
    for start in (
        b"GET /signin/ HTTP/1.1\r\n",
        # Trailers count as well.
        b"POST /signin/ HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
    ):
        with raw(server.url, start) as connection:
            sent = 0
            with pytest.raises(OSError):
                while sent < 64 * MIB:
                    connection.sendall(b"X-Header: " + b"x" * 1000 + b"\r\n")
                    sent += 1012
        assert sent < 32 * MIB


def test_connections_are_limited_by_address(server: Server) -> None:
    client = registered(server)
    start = b"GET /signin/ HTTP/1.1\r\nX-Slow: "
    connections = [raw(server.url, start) for _ in range(limits.UNAUTHENTICATED_PER_ADDRESS + 20)]
    try:
        refused, waiting = 0, list(connections)
        deadline = time.monotonic() + limits.HEADER_SECONDS - 2
        while refused < 20 and time.monotonic() < deadline:
            time.sleep(0.2)
            for connection in list(waiting):
                connection.setblocking(False)
                try:
                    refused += connection.recv(65536).startswith(b"HTTP/1.1 503")
                except BlockingIOError:
                    continue
                except ConnectionError:
                    refused += 1
                waiting.remove(connection)
        assert 20 <= refused <= 25
    finally:
        for connection in connections:
            connection.close()
    wait_until(lambda: beat(client).status != 503, "room for another connection", pause=0.2)
    assert beat(client).status == 200
