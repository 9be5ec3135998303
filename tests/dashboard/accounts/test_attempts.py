"""Password attempts are throttled by name and by address, and correct passwords reset the count."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
import redis
from django.conf import settings
from django.test import Client
from django.urls import reverse

from fp8scope_dashboard.accounts import attempts, services, views
from fp8scope_dashboard.accounts.attempts import (
    EXPIRY_SECONDS,
    FREE_ATTEMPTS,
    FREE_ATTEMPTS_PER_ADDRESS,
    MAX_WAIT_SECONDS,
    Attempts,
    MemoryCounts,
    RedisCounts,
)
from fp8scope_dashboard.accounts.models import User

PASSWORD = "correct horse battery"
HERE, THERE = "192.0.2.1", "198.51.100.7"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def post(client: Client, password: str, name: str = "ada", address: str = HERE) -> int:
    form = {"username": name, "password": password}
    return client.post(reverse("signin"), form, REMOTE_ADDR=address).status_code


def shared_attempts() -> Attempts:
    return Attempts(RedisCounts(settings.REDIS_URL))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Make the sign-in page count in memory, with a clock that the test sets."""
    clock = Clock()
    monkeypatch.setattr(views, "attempts", Attempts(clock=clock))
    return clock


@pytest.mark.django_db
def test_it_works(client: Client) -> None:
    user = User.objects.create_user("ada", password=PASSWORD)
    assert [post(client, "wrong") for _ in range(FREE_ATTEMPTS + 1)] == [200] * FREE_ATTEMPTS + [429]
    refused = client.post(reverse("signin"), {"username": " ADA", "password": PASSWORD})
    assert refused.status_code == 429 and refused.headers["Retry-After"] == "1"
    assert b"Try again in 1 second." in refused.content
    assert "_auth_user_id" not in client.session
    assert post(client, "wrong", name="bob") == 200
    time.sleep(1.0)
    assert post(client, PASSWORD) == 302
    assert client.session["_auth_user_id"] == str(user.pk)


@pytest.mark.django_db
def test_a_link_signs_in_a_throttled_user(client: Client) -> None:
    user = User.objects.create_user("ada", password=PASSWORD)
    while post(client, "wrong") == 200:
        pass
    link = urlsplit(services.create_sign_in_link(user, "http://testserver")).path
    assert client.post(link).status_code == 302
    assert client.session["_auth_user_id"] == str(user.pk)


@pytest.mark.django_db
def test_the_right_password_resets_the_name(client: Client) -> None:
    User.objects.create_user("ada", password=PASSWORD)
    for _ in range(3):
        assert [post(client, "wrong") for _ in range(FREE_ATTEMPTS - 1)] == [200] * (FREE_ATTEMPTS - 1)
        assert post(client, PASSWORD) == 302
        client.logout()


@pytest.mark.django_db
@pytest.mark.parametrize("in_memory", [True, False])
def test_an_address_is_throttled_over_all_names(
    client: Client, in_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_memory:
        monkeypatch.setattr(views, "attempts", Attempts())
    statuses = [post(client, "wrong", f"name {i}") for i in range(FREE_ATTEMPTS_PER_ADDRESS + 1)]
    assert statuses == [200] * FREE_ATTEMPTS_PER_ADDRESS + [429]
    assert post(client, "wrong", "another", address=THERE) == 200


@pytest.mark.django_db
def test_addresses_of_one_ipv6_network_are_one_client(client: Client) -> None:
    for i in range(FREE_ATTEMPTS_PER_ADDRESS):
        assert post(client, "wrong", f"name {i}", address=f"2001:db8:1:2::{i:x}") == 200
    assert post(client, "wrong", "next", address="2001:db8:1:2:ffff::1") == 429
    assert post(client, "wrong", "next", address="2001:db8:1:3::1") == 200


@pytest.mark.django_db
def test_signing_in_costs_the_address_nothing(client: Client) -> None:
    User.objects.create_user("ada", password=PASSWORD)
    for _ in range(FREE_ATTEMPTS_PER_ADDRESS + 5):
        assert post(client, PASSWORD) == 302
        client.logout()


def test_web_processes_share_the_limit() -> None:
    first, second = shared_attempts(), shared_attempts()
    for _ in range(FREE_ATTEMPTS):
        assert first.admit("ada", HERE) == 0
    assert second.admit("ada", THERE) == first.admit("ada", HERE) == 1
    second.succeeded("ada", THERE)
    assert first.admit("ada", HERE) == 0


def test_concurrent_attempts_all_count() -> None:
    """An attempt counts before its password is checked: of ten at once only the free ones are admitted."""
    throttle = shared_attempts()
    assert [throttle.admit("ada", HERE) for _ in range(10)] == [0] * FREE_ATTEMPTS + [1] * 5


def waits_of(counts: RedisCounts | MemoryCounts, sleep: Callable[[float], None], rounds: int) -> list[float]:
    key = attempts.Key("name:ada", FREE_ATTEMPTS)
    waits = []
    for _ in range(rounds):
        wait, _ = counts.admit([key])
        waits.append(wait)
        if wait:
            sleep(wait)
            assert counts.admit([key])[0] == 0
    return waits


def test_waits_double_up_to_a_minute_and_expire() -> None:
    clock = Clock()
    counts = MemoryCounts(clock)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    waits = waits_of(counts, sleep, FREE_ATTEMPTS + 8)
    assert waits == [0.0] * FREE_ATTEMPTS + [
        1.0,
        2.0,
        4.0,
        8.0,
        16.0,
        32.0,
        MAX_WAIT_SECONDS,
        MAX_WAIT_SECONDS,
    ]
    clock.now += EXPIRY_SECONDS
    assert counts.admit([attempts.Key("name:ada", FREE_ATTEMPTS)])[0] == 0.0


def test_waits_in_redis_equal_those_in_memory() -> None:
    counts = RedisCounts(settings.REDIS_URL, expiry=2.5)
    waits = waits_of(counts, time.sleep, FREE_ATTEMPTS + 2)
    *free, first, second = waits
    assert free == [0.0] * FREE_ATTEMPTS
    # Shorter by the time since the attempt before, which a busy machine makes longer.
    assert 0.5 < first <= 1.0 < second <= 2.0
    time.sleep(2.6)
    assert counts.admit([attempts.Key("name:ada", FREE_ATTEMPTS)])[0] == 0.0


def test_redis_stores_names_and_addresses_hashed() -> None:
    shared_attempts().admit("ada", HERE)
    with redis.Redis.from_url(settings.REDIS_URL) as client:
        keys = list(client.scan_iter(f"{attempts.KEY_PREFIX}*"))
        assert len(keys) == 2 and all(0 < client.pttl(key) <= 1000 * EXPIRY_SECONDS for key in keys)
    assert not any(b"ada" in key or HERE.encode() in key for key in keys)


def accepted(server: socket.socket) -> int:
    """The number of connections that wait to be accepted."""
    server.setblocking(False)
    count = 0
    with suppress(BlockingIOError):
        while True:
            server.accept()[0].close()
            count += 1
    return count


def test_counts_in_memory_without_waiting_if_redis_hangs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        # Accepts the connection and never answers.
        throttle = Attempts(RedisCounts(f"redis://127.0.0.1:{silent.getsockname()[1]}/0"))
        assert [throttle.admit("ada", HERE) for _ in range(FREE_ATTEMPTS + 1)] == [0] * FREE_ATTEMPTS + [1]
        # Redis was not asked again and again: each time is a wait.
        assert 1 <= accepted(silent) <= 2


def test_remembers_a_refused_address_without_redis() -> None:
    throttle = shared_attempts()
    for i in range(FREE_ATTEMPTS_PER_ADDRESS):
        assert throttle.admit(f"name {i}", HERE) == throttle.refused_for(HERE) == 0
    assert throttle.admit("next", HERE) == throttle.refused_for(HERE) == 1
    assert throttle.refused_for(THERE) == 0
    # A throttled name does not throttle the addresses that tried it.
    for _ in range(FREE_ATTEMPTS + 1):
        throttle.admit("ada", THERE)
    assert throttle.refused_for(THERE) == 0


def test_memory_is_bounded() -> None:
    counts = MemoryCounts(Clock(), max_keys=10)
    for i in range(100):
        counts.admit(attempts.keys_of(f"name{i}" + "x" * 1000, f"192.0.2.{i}"))
    assert len(counts) == 10
    assert all(len(key.text) < 50 for key in attempts.keys_of("x" * 1000, HERE))
