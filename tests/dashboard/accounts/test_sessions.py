"""Where a user is signed in, and the time zone of pages."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from dashboard.helpers.recording import make_run
from django.contrib.sessions.models import Session
from django.test import Client
from django.urls import reverse

from fp8scope_dashboard.accounts.models import User
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.accounts.sessions import browser_name, sessions_of, sign_out

pytestmark = pytest.mark.django_db
FIREFOX = "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"
CHROME = "Mozilla/5.0 (Windows NT 10.0) AppleWebKit/537.36 Chrome/140.0 Safari/537.36"
PASSWORD = "correct horse battery"


@pytest.fixture
def user() -> User:
    return User.objects.create_user("ada", password=PASSWORD)


def browser(agent: str = FIREFOX) -> Client:
    """Sign in with the form."""
    client = Client(headers={"User-Agent": agent})
    client.post(reverse("signin"), {"username": "ada", "password": PASSWORD})
    return client


def is_signed_in(client: Client) -> bool:
    return client.get(reverse("account")).status_code == 200


def test_it_works(user: User) -> None:
    mine, other, third = browser(), browser(CHROME), browser(CHROME)
    listed = sessions_of(user, mine.session.session_key)
    assert [(each.browser, each.is_this) for each in listed] == [
        ("Firefox on Linux", True), ("Chrome on Windows", False), ("Chrome on Windows", False)
    ]  # fmt: skip
    page = mine.get(reverse("account")).content.decode()
    assert "This browser" in page and "Chrome on Windows" in page
    number = next(each.number for each in listed if not each.is_this)
    mine.post(reverse("account_sign_out"), {"number": number})
    assert is_signed_in(mine) and is_signed_in(other) != is_signed_in(third)
    mine.post(reverse("account_sign_out"))
    assert is_signed_in(mine) and not is_signed_in(other) and not is_signed_in(third)


def test_nobody_ends_the_sessions_of_others(user: User) -> None:
    mine = browser()
    stranger = User.objects.create_user("eve")
    assert sign_out(stranger, None) == 0
    (session,) = sessions_of(user, None)
    assert sign_out(stranger, None, session.number) == 0 and is_signed_in(mine)


def test_an_unknown_number_ends_no_session(user: User) -> None:
    mine, other = browser(), browser()
    for number in ("0" * 16, "é"):
        answer = mine.post(reverse("account_sign_out"), {"number": number})
        assert answer.status_code == 302 and is_signed_in(other)


def test_keys_are_not_shown(user: User) -> None:
    mine, other = browser(), browser(CHROME)
    page = mine.get(reverse("account")).content.decode()
    assert str(other.session.session_key) not in page


def test_sessions_from_before_a_new_password_are_not_listed(user: User) -> None:
    browser()
    user.set_password("another staple entirely")
    user.save()
    assert Session.objects.count() == 1 and sessions_of(user, None) == []


@pytest.mark.parametrize(
    ("agent", "name"),
    [
        (CHROME + " Edg/140.0", "Edge on Windows"),
        ("Mozilla/5.0 (iPhone; CPU like Mac OS X) Version/18.0 Safari/604.1", "Safari on iOS"),
        ("curl/8", "An unknown browser"),
        ("", "An unknown browser"),
    ],
)
def test_names_of_browsers(agent: str, name: str) -> None:
    assert browser_name(agent) == name


def test_times_are_shown_in_the_chosen_zone(user: User) -> None:
    project = create_project("research", "Research", owner=user)
    make_run(project, "r", created_at=datetime(2026, 1, 15, 11, 30, tzinfo=UTC))
    client = browser()
    address = reverse("project", args=[project.slug])
    assert "11:30:00 UTC" in client.get(address).content.decode()
    client.post(reverse("account_time_zone"), {"time_zone": "Asia/Tokyo"})
    assert "20:30:00 JST" in client.get(address).content.decode()
    # A new session knows it as well; without a session it is UTC again.
    assert "20:30:00 JST" in browser(CHROME).get(address).content.decode()
    page = client.post(reverse("account_time_zone"), {"time_zone": "Mars/Base"}, follow=True)
    assert "no such time zone" in page.content.decode()
    client.post(reverse("account_time_zone"), {"time_zone": ""})
    assert "11:30:00 UTC" in client.get(address).content.decode()
