"""Passwords are hashed with Argon2id, and hashes of older versions are replaced at a sign-in."""

from __future__ import annotations

import pytest
from django.contrib.auth.hashers import identify_hasher, make_password
from django.test import Client
from pytest_django import Settings

from fp8scope_dashboard.accounts.attempts import Attempts
from fp8scope_dashboard.accounts.hashers import Argon2
from fp8scope_dashboard.accounts.models import User
from fp8scope_dashboard.settings import base

pytestmark = pytest.mark.django_db
PASSWORD = "correct horse battery"


@pytest.fixture(autouse=True)
def hashers(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.PASSWORD_HASHERS = base.PASSWORD_HASHERS
    monkeypatch.setattr("fp8scope_dashboard.accounts.views.attempts", Attempts())


def test_it_works(client: Client) -> None:
    user = User.objects.create_user("ada", password=PASSWORD)
    assert user.password.startswith("argon2$argon2id$v=19$m=47104,t=1,p=1$")
    client.post("/signin/", {"username": "ada", "password": PASSWORD})
    assert client.session["_auth_user_id"] == str(user.pk)
    assert User.objects.get().password == user.password


@pytest.mark.parametrize("algorithm", ["pbkdf2_sha256", "scrypt"])
def test_a_sign_in_replaces_the_hash_of_an_older_version(client: Client, algorithm: str) -> None:
    user = User.objects.create(username="ada", password=make_password(PASSWORD, hasher=algorithm))
    client.post("/signin/", {"username": "ada", "password": "wrong"})
    assert User.objects.get().password == user.password
    client.post("/signin/", {"username": "ada", "password": PASSWORD})
    assert isinstance(identify_hasher(User.objects.get().password), Argon2)
    assert client.session["_auth_user_id"] == str(user.pk)
    again = Client()
    again.post("/signin/", {"username": "ada", "password": PASSWORD})
    assert again.session["_auth_user_id"] == str(user.pk)


def test_weaker_parameters_are_replaced(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Argon2, "memory_cost", 8_192)
    weak = User.objects.create_user("ada", password=PASSWORD).password
    monkeypatch.undo()
    monkeypatch.setattr("fp8scope_dashboard.accounts.views.attempts", Attempts())
    client.post("/signin/", {"username": "ada", "password": PASSWORD})
    assert "m=8192" in weak and "m=47104" in User.objects.get().password
