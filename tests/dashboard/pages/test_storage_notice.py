"""The pages report a full disk of the database."""

from __future__ import annotations

import pytest
from dashboard.helpers.visitors import Visitor
from django.db import OperationalError, connection
from django.test import Client

from fp8scope_dashboard.pages.views import home
from fp8scope_dashboard.telemetry import disk_space

BANNER = "disk of the server’s database is full"


@pytest.fixture(autouse=True)
def forget_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_space, "_refused_at", -disk_space.REMEMBERED_SECONDS)


def fail_with(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Make the home page fail with a PostgreSQL error with this SQLSTATE."""

    def failing(user: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"DO $$ BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = '{code}'; END $$")

    monkeypatch.setattr(home, "projects_of", failing)


@pytest.fixture
def browser(admin: Visitor) -> Client:
    admin.client.raise_request_exception = False
    return admin.client


def test_it_works(browser: Client, admin: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    assert BANNER not in browser.get(admin.address("settings/")).content.decode()
    fail_with(monkeypatch, "53100")
    answer = browser.get("/")
    assert answer.status_code == 507
    assert "The change was not saved" in answer.content.decode()


@pytest.mark.django_db(transaction=True)
def test_every_page_warns_for_a_minute(
    browser: Client, admin: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(monkeypatch, "53100")
    browser.get("/")
    for address in (admin.address("settings/"), "/account/"):
        assert BANNER in browser.get(address).content.decode()
    monkeypatch.setattr(disk_space, "_refused_at", disk_space._refused_at - disk_space.REMEMBERED_SECONDS)
    assert BANNER not in browser.get(admin.address("settings/")).content.decode()


def test_other_failures_are_not_reported_as_a_full_disk(
    browser: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(monkeypatch, "57014")
    answer = browser.get("/")
    assert answer.status_code == 500
    assert "Server error" in answer.content.decode()
    assert not disk_space.is_disk_full(OperationalError("connection lost"))
    assert not disk_space.is_disk_full(None)
