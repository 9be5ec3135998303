"""The audit log of a project and of the server: what it has, its filter, and its files."""

from __future__ import annotations

import csv
import io
import json
from datetime import timedelta
from typing import Any

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.visitors import Visitor, html, visitor_of
from django.test import Client
from django.utils import timezone
from pytest_django import Settings

from fp8scope_dashboard.accounts.models import Role, Scope, User
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.audit import queries, tasks
from fp8scope_dashboard.audit.log import Actor, record
from fp8scope_dashboard.audit.models import Action, Entry


@pytest.fixture
def superuser(db: None) -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    return client


# A thread with a connection of its own writes the files and sees only what is committed.
def content(answer: Any) -> str:
    return b"".join(answer).decode()


def rows_of(answer: Any) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(content(answer))))


def test_it_works(admin: Visitor) -> None:
    admin.client.post(admin.address("settings/tokens/new"), {"name": "cluster", "lifetime": "90 days"})
    page = html(admin, "settings/audit/")
    assert "Created a token" in page and "cluster" in page and "127.0.0.1" in page and "ada" in page
    assert "The whole audit log" in html(admin, "settings/")


def test_filters_by_person_action_and_day(admin: Visitor) -> None:
    eve, now = User.objects.create_user("eve"), timezone.now()
    for user, action, text, days in (
        (admin.user, Action.RULES, "alpha", 10),
        (eve, Action.RULES, "beta", 5),
        (eve, Action.CHANNEL, "gamma", 0),
    ):
        entry = record(Actor(user), admin.project, action, text)
        Entry.objects.filter(pk=entry.pk).update(at=now - timedelta(days=days))

    def shown(query: str) -> set[str]:
        page = html(admin, f"settings/audit/?{query}").partition("<tbody>")[2]
        return {text for text in ("alpha", "beta", "gamma") if text in page}

    day = f"{now - timedelta(days=5):%Y-%m-%d}"
    assert shown("") == {"alpha", "beta", "gamma"}
    assert shown("by=eve") == {"beta", "gamma"}
    assert shown("by=eve&action=rules") == {"beta"}
    assert shown(f"first={day}") == {"beta", "gamma"}
    assert shown(f"last={day}") == {"alpha", "beta"}
    assert shown(f"first={day}&last={day}") == {"beta"}
    assert "is no day" in html(admin, "settings/audit/?first=yesterday")
    assert "There is no such action" in html(admin, "settings/audit/?action=explode")
    for day in ("0001-01-01", "9999-12-31", "2026-02-30"):
        assert "is no day" in html(admin, f"settings/audit/?last={day}")


def test_shows_many_entries_in_pages(admin: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8scope_dashboard.pages.project.audit_log.ENTRIES_A_PAGE", 2)
    for number in range(3):
        record(Actor(admin.user), admin.project, Action.RULES, f"entry {number}")
    page = html(admin, "settings/audit/?by=ada")
    assert "entry 2" in page and "entry 1" in page and "entry 0" not in page
    older = page.partition(">Earlier entries<")[0].rpartition('href="')[2].strip('"').replace("&amp;", "&")
    page = html(admin, f"settings/audit/{older}")
    assert "entry 0" in page and "entry 1" not in page and "Newest entries" in page


@pytest.mark.django_db(transaction=True)
def test_a_file_has_all_that_match_and_no_formula(admin: Visitor) -> None:
    record(Actor(admin.user), admin.project, Action.RULES, "=HYPERLINK(1)\t;+1,\n-2")
    record(Actor(admin.user), create_project("elsewhere", "Elsewhere"), Action.RULES, "of another project")
    (row,) = rows_of(admin.client.get(admin.address("settings/audit/entries.csv?action=rules")))
    assert row["project"] == "research" and row["by"] == "ada" and row["action"] == "rules"
    assert row["text"] == "'=HYPERLINK(1) ;'+1, -2"
    (line,) = content(
        admin.client.get(admin.address("settings/audit/entries.jsonl?action=rules"))
    ).splitlines()
    assert json.loads(line)["text"] == "=HYPERLINK(1)\t;+1,\n-2"
    texts = list(Entry.objects.filter(action=Action.EXPORTED).values_list("text", flat=True))
    assert texts == ["the audit log, as CSV", "the audit log, as JSONL"]
    assert admin.client.get(admin.address("settings/audit/entries.xlsx")).status_code == 404
    assert admin.client.get(admin.address("settings/audit/entries.csv?first=x")).status_code == 422


@pytest.mark.django_db(transaction=True)
def test_a_file_is_read_in_pieces(admin: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "PIECE", 3)
    for number in range(7):
        record(Actor(admin.user), admin.project, Action.RULES, f"{number}")
    rows = rows_of(admin.client.get(admin.address("settings/audit/entries.csv?action=rules")))
    assert [row["text"] for row in rows] == ["6", "5", "4", "3", "2", "1", "0"]


def test_exports_of_data_are_written_and_only_administrators_see_them(
    admin: Visitor, viewer: Visitor
) -> None:
    run = make_run(admin.project, "a run")
    viewer.client.get(viewer.address(f"runs/{run.pk}/console/rank0.log"))
    _, secret = create_token(admin.project, "reader", scopes=[Scope.READ])
    Client(headers={"authorization": f"Bearer {secret}"}).get(f"/api/v1/runs/{run.pk}/export?format=csv")
    viewer.client.get(viewer.address(f"runs/{run.pk}/data/run.csv"))
    entries = Entry.objects.filter(action=Action.EXPORTED).order_by("pk")
    assert [entry.text for entry in entries] == [
        "“a run”, the console log of rank 0",
        "“a run”, as csv",
        "“a run”, as csv",
    ]
    assert [entry.by.partition("”")[0] for entry in entries] == ["vic", "token “reader", "vic"]
    assert "a run”, as csv" in html(admin, "settings/audit/")
    assert "a run”, as csv" not in html(viewer, "settings/")


@pytest.mark.django_db(transaction=True)
def test_the_server_has_sign_ins_and_all_projects(superuser: Client, client: Client) -> None:
    User.objects.create_user("ada", password="correct horse battery")
    for password in ("wrong", "correct horse battery"):
        client.post("/signin/", {"username": "ada", "password": password})
    client.post("/signin/", {"username": "nobody", "password": "x"})
    record(Actor(), create_project("one", "One"), Action.RULES, "of one")
    page = superuser.get("/server/audit/").content.decode()
    assert "Signed in" in page and "ada: wrong password" in page and "of one" in page
    assert "nobody" not in page.partition("<tbody>")[2]
    rows = rows_of(superuser.get("/server/audit/entries.csv"))
    assert {(row["project"], row["action"]) for row in rows} == {
        ("", "signed_in"),
        ("", "exported"),
        ("", "sign_in_failed"),
        ("one", "rules"),
    }
    visitor = visitor_of(create_project("two", "Two"), "boss", Role.ADMIN)
    assert visitor.client.get("/server/audit/").status_code == 403
    assert "sign_in" not in content(visitor.client.get(visitor.address("settings/audit/entries.csv")))


def test_no_secret_is_written(admin: Visitor, client: Client) -> None:
    client.post("/signin/", {"username": "ada", "password": "a-secret-password"})
    answer = admin.client.post(admin.address("settings/tokens/new"), {"name": "t"}).content.decode()
    secret = answer.partition("fp8s_")[2][:52]
    assert len(secret) == 52 and secret[9:] not in repr(Entry.objects.values_list())
    assert "a-secret-password" not in repr(Entry.objects.values_list())


@pytest.mark.parametrize(
    ("days", "left"), [(0, {"old rule", "new rule", "new sign-in"}), (30, {"new rule", "new sign-in"})]
)
def test_old_entries_are_deleted(settings: Settings, admin: Visitor, days: int, left: set[str]) -> None:
    settings.AUDIT_DAYS = days
    for name, action, age in (
        ("old rule", Action.RULES, 400),
        ("old sign-in", Action.SIGNED_IN, 400),
        ("old export", Action.EXPORTED, 366),
        ("new rule", Action.RULES, 1),
        ("new sign-in", Action.SIGNED_IN, 1),
    ):
        entry = record(Actor(admin.user), admin.project, action, name)
        Entry.objects.filter(pk=entry.pk).update(at=timezone.now() - timedelta(days=age))
    tasks.delete_old()
    assert set(Entry.objects.values_list("text", flat=True)) == left


def test_expired_sessions_are_deleted(admin: Visitor) -> None:
    from django.contrib.sessions.models import Session

    from fp8scope_dashboard.accounts.tasks import delete_expired_sessions

    gone = Client()
    gone.force_login(admin.user)
    Session.objects.filter(pk=gone.session.session_key).update(expire_date=timezone.now() - timedelta(days=1))
    delete_expired_sessions()
    assert [session.pk for session in Session.objects.all()] == [admin.client.session.session_key]
