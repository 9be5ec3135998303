"""Signing in and out with a browser."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from django.test import Client
from django.urls import reverse

from fp8scope_dashboard.accounts import services
from fp8scope_dashboard.accounts.models import SignInLink, User

pytestmark = pytest.mark.django_db
PASSWORD = "correct horse battery"


@pytest.fixture
def user() -> User:
    return User.objects.create_user("ada", password=PASSWORD)


@pytest.fixture
def link(user: User) -> str:
    return urlsplit(services.create_sign_in_link(user, "http://testserver")).path


def signed_in_user_id(client: Client) -> str | None:
    return client.session.get("_auth_user_id")


def test_it_works(client: Client, user: User) -> None:
    assert client.get(reverse("signin")).status_code == 200
    answer = client.post(reverse("signin"), {"username": "ada", "password": PASSWORD})
    assert (answer.status_code, answer.headers["Location"]) == (302, reverse("home"))
    assert signed_in_user_id(client) == str(user.pk)
    client.post(reverse("signout"))
    assert signed_in_user_id(client) is None


def test_rejects_a_wrong_password(client: Client, user: User) -> None:
    answer = client.post(reverse("signin"), {"username": "ada", "password": "wrong"})
    assert answer.status_code == 200
    assert signed_in_user_id(client) is None


def test_opening_a_link_does_not_use_it_up(client: Client, user: User, link: str) -> None:
    assert client.head(link).status_code == 200
    assert client.get(link).status_code == 200
    assert signed_in_user_id(client) is None
    answer = client.post(link)
    assert (answer.status_code, answer.headers["Location"]) == (302, reverse("home"))
    assert signed_in_user_id(client) == str(user.pk)


def test_rejects_a_used_link(client: Client, user: User, link: str) -> None:
    Client().post(link)
    assert client.get(link).status_code == 410
    assert client.post(link).status_code == 410
    assert signed_in_user_id(client) is None
    assert SignInLink.objects.count() == 1


@pytest.mark.parametrize("token", ["x", "A" * 43, "A" * 5000])
def test_rejects_an_unknown_link(client: Client, token: str) -> None:
    assert client.post(f"/signin/{token}/").status_code == 410


def test_another_site_cannot_sign_a_user_in(user: User, link: str) -> None:
    strict = Client(enforce_csrf_checks=True)
    assert strict.post(link).status_code == 403
    assert services.is_usable_link(link.split("/")[2])


def test_the_next_page_stays_on_this_site(client: Client, user: User) -> None:
    form = {"username": "ada", "password": PASSWORD, "next": "https://evil.example/"}
    assert client.post(reverse("signin"), form).headers["Location"] == reverse("home")
