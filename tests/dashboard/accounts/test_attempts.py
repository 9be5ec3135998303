"""Passwords can be tried only so fast, and people who know theirs hardly notice."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from django.test import Client
from django.urls import reverse

from fp8scope_dashboard.accounts import attempts, services, views
from fp8scope_dashboard.accounts.attempts import FREE_ATTEMPTS, LONGEST_WAIT, MEMORY_SECONDS, Attempts
from fp8scope_dashboard.accounts.models import User

PASSWORD = "correct horse battery"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """The sign-in page's own attempts, by a clock that the test moves."""
    clock = Clock()
    monkeypatch.setattr(views, "attempts", Attempts(clock))
    yield clock


def post(client: Client, password: str, name: str = "ada") -> int:
    return client.post(reverse("signin"), {"username": name, "password": password}).status_code


@pytest.mark.django_db
def test_it_works(client: Client, clock: Clock) -> None:
    user = User.objects.create_user("ada", password=PASSWORD)
    assert [post(client, "wrong") for _ in range(FREE_ATTEMPTS + 1)] == [200] * FREE_ATTEMPTS + [429]
    refused = client.post(reverse("signin"), {"username": " ADA", "password": PASSWORD})
    assert refused.status_code == 429 and refused.headers["Retry-After"] == "1"
    assert b"wait 1 second, then try again" in refused.content
    assert "_auth_user_id" not in client.session
    assert post(client, "wrong", name="bob") == 200
    clock.now += 1.0
    assert post(client, PASSWORD) == 302
    assert client.session["_auth_user_id"] == str(user.pk)


@pytest.mark.django_db
def test_a_link_signs_in_all_the_same(client: Client, clock: Clock) -> None:
    user = User.objects.create_user("ada", password=PASSWORD)
    while post(client, "wrong") == 200:
        pass
    link = urlsplit(services.create_sign_in_link(user, "http://testserver")).path
    assert client.post(link).status_code == 302
    assert client.session["_auth_user_id"] == str(user.pk)


@pytest.mark.django_db
def test_the_right_password_forgives(client: Client, clock: Clock) -> None:
    User.objects.create_user("ada", password=PASSWORD)
    for _ in range(3):
        assert [post(client, "wrong") for _ in range(FREE_ATTEMPTS - 1)] == [200] * (FREE_ATTEMPTS - 1)
        assert post(client, PASSWORD) == 302
        client.logout()


def test_waits_double_up_to_a_minute_and_are_forgotten() -> None:
    clock = Clock()
    tried = Attempts(clock)
    waits = []
    for _ in range(FREE_ATTEMPTS + 8):
        waits.append(tried.wait("ada"))
        clock.now += waits[-1]
        tried.failed("ada")
    assert waits == [0.0] * FREE_ATTEMPTS + [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_WAIT, LONGEST_WAIT]
    clock.now += MEMORY_SECONDS
    assert tried.wait("ada") == 0.0


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MOST_NAMES", 10)
    tried = Attempts(Clock())
    for i in range(100):
        tried.failed(f"name{i}" + "x" * 1000)
    assert len(tried._wrong) == 10
    assert all(len(name) <= attempts.NAME_LENGTH for name in tried._wrong)
