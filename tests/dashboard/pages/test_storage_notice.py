"""The pages report a full disk of the database."""

from __future__ import annotations

import psycopg
import pytest
from dashboard.helpers.visitors import Visitor
from django.db import OperationalError, connection
from django.test import Client

from fp8scope_dashboard.pages.project import home
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


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("code", ["57P03", "08006", "53300", "57014"])
def test_a_database_that_is_away_is_not_called_an_error(
    browser: Client, admin: Visitor, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    fail_with(monkeypatch, code)
    answer = browser.get("/?page=2")
    assert answer.status_code == 503 and answer["Retry-After"] == "10"
    page = answer.content.decode()
    assert "database does not answer" in page and 'href="/?page=2"' in page and "not saved" not in page


@pytest.mark.django_db(transaction=True)
def test_without_a_database_the_page_needs_none(
    browser: Client, admin: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No connection at all, not even for the session: the pool gives up."""

    def refused(*args: object, **options: object) -> None:
        raise OperationalError("connection refused") from psycopg.OperationalError("connection refused")

    monkeypatch.setattr("django.db.backends.base.base.BaseDatabaseWrapper.cursor", refused)
    for answer in (browser.get("/account/"), browser.post("/account/", {})):
        assert answer.status_code == 503 and "database does not answer" in answer.content.decode()
    assert "What you sent was not saved." in answer.content.decode()


def test_other_failures_are_not_reported_as_a_full_disk(
    browser: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(monkeypatch, "40001")
    answer = browser.get("/")
    assert answer.status_code == 500
    assert "This page failed" in answer.content.decode()
    assert not disk_space.is_disk_full(OperationalError("connection lost"))
    assert not disk_space.is_disk_full(None)
