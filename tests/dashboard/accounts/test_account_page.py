"""Users set and change their password on the account page."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.contrib.auth.hashers import get_hasher
from django.contrib.messages import get_messages
from django.test import Client
from django.urls import reverse

from fp8scope_dashboard.accounts import account_page, services
from fp8scope_dashboard.accounts.models import User

pytestmark = pytest.mark.django_db
OLD, NEW = "correct horse battery", "another staple entirely"
NEW_FORM = {"new_password1": NEW, "new_password2": NEW}


@pytest.fixture
def user() -> User:
    """A user without a password."""
    return User.objects.create_user("ada")


@pytest.fixture
def known() -> User:
    """A user with a password."""
    return User.objects.create_user("bob", password=OLD)


def browser_of(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


def with_link(user: User) -> Client:
    client = Client()
    client.post(urlsplit(services.create_sign_in_link(user, "http://testserver")).path)
    return client


def is_signed_in(client: Client) -> bool:
    return client.get(reverse("account")).status_code == 200


def test_it_works(user: User) -> None:
    client = browser_of(user)
    answer = client.post(reverse("account"), NEW_FORM)
    assert (answer.status_code, answer.headers["Location"]) == (302, reverse("account"))
    client.post(reverse("signout"))
    assert not is_signed_in(client)
    client.post(reverse("signin"), {"username": "ada", "password": NEW})
    assert is_signed_in(client)


def test_redirects_visitors_to_sign_in(client: Client) -> None:
    for answer in (client.get(reverse("account")), client.post(reverse("account"), NEW_FORM)):
        assert answer.headers["Location"] == f"{reverse('signin')}?next={reverse('account')}"


def test_asks_for_the_current_password(known: User) -> None:
    client = browser_of(known)
    for old in ({}, {"old_password": "wrong"}):
        assert client.post(reverse("account"), {**NEW_FORM, **old}).status_code == 422
    assert User.objects.get(pk=known.pk).check_password(OLD)
    assert client.post(reverse("account"), {**NEW_FORM, "old_password": OLD}).status_code == 302
    assert User.objects.get(pk=known.pk).check_password(NEW)


def test_other_sessions_end_and_this_one_stays(known: User) -> None:
    here, elsewhere = browser_of(known), browser_of(known)
    here.post(reverse("account"), {**NEW_FORM, "old_password": OLD})
    assert is_signed_in(here)
    assert not is_signed_in(elsewhere)


def test_revokes_earlier_links(known: User) -> None:
    link = urlsplit(services.create_sign_in_link(known, "http://testserver")).path
    browser_of(known).post(reverse("account"), {**NEW_FORM, "old_password": OLD})
    assert Client().post(link).status_code == 410


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ("short", "short", "too short"),
        ("password123", "password123", "too common"),
        (NEW, NEW + "x", "didn’t match"),
        ("x" * 5000, "x" * 5000, "at most 4096"),
        ("", "", "required"),
    ],
)
def test_rejects_a_weak_password(user: User, first: str, second: str, reason: str) -> None:
    answer = browser_of(user).post(reverse("account"), {"new_password1": first, "new_password2": second})
    assert answer.status_code == 422
    assert reason in answer.content.decode()
    if first:
        assert f'value="{first}"' not in answer.content.decode()
    assert not User.objects.get(pk=user.pk).has_usable_password()


def test_a_used_link_recommends_a_password(user: User) -> None:
    client = with_link(user)
    services.create_project("default", "Default", owner=user)
    page = client.get(reverse("home"), follow=True).content.decode()
    assert f'<a href="{reverse("account")}">Set a password</a>' in page
    again = client.get(reverse("home"), follow=True)
    assert list(get_messages(again.wsgi_request)) == []


def test_a_link_replaces_a_forgotten_password(known: User) -> None:
    client = with_link(known)
    assert "Current password" not in client.get(reverse("account")).content.decode()
    assert client.post(reverse("account"), NEW_FORM).status_code == 302
    # Only once: the next change requires the new password.
    assert client.post(reverse("account"), NEW_FORM).status_code == 422


def test_an_old_session_still_asks_for_the_password(known: User) -> None:
    client = with_link(known)
    session = client.session
    session[account_page.LINK_AT] -= timedelta(hours=2).total_seconds()
    session.save()
    assert client.post(reverse("account"), NEW_FORM).status_code == 422
    assert User.objects.get(pk=known.pk).check_password(OLD)


def test_another_site_cannot_set_a_password(user: User) -> None:
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(user)
    assert strict.post(reverse("account"), NEW_FORM).status_code == 403


def test_every_page_links_to_the_account_page(user: User) -> None:
    services.create_project("default", "Default", owner=user)
    home = browser_of(user).get(reverse("home"), follow=True).content.decode()
    assert f'href="{reverse("account")}"' in home
    alone = browser_of(User.objects.create_user("eve")).get(reverse("home")).content.decode()
    assert f'href="{reverse("account")}"' in alone


def test_hashes_passwords_in_the_hashing_threads(known: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both checking the old password and setting the new one: only these threads bound the hashing."""
    threads = []

    def recording(method: Callable[..., Any]) -> Callable[..., Any]:
        def record(*arguments: Any, **options: Any) -> Any:
            threads.append(threading.current_thread().name)
            return method(*arguments, **options)

        return record

    hasher = type(get_hasher())
    browser = browser_of(known)
    for name in ("encode", "verify"):
        monkeypatch.setattr(hasher, name, recording(getattr(hasher, name)))
    assert browser.post(reverse("account"), {**NEW_FORM, "old_password": OLD}).status_code == 302
    assert len(threads) >= 2 and all(name.startswith("hash_") for name in threads)
