"""The home page: it redirects to a project or lists them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.visitors import Visitor, visitor_of
from django.test import Client
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Membership, Project, Role, User
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts.models import Alert
from fp8scope_dashboard.analysis.models import Comparison
from fp8scope_dashboard.audit.models import Entry


def test_it_works(member: Visitor) -> None:
    answer = member.client.get("/")
    assert answer.status_code == 302 and answer["Location"] == member.address()


def test_lists_several_projects(member: Visitor) -> None:
    other = create_project("other", "Other <b>one</b>")
    Membership.objects.create(user=member.user, project=other, role=Role.VIEWER)
    page = member.client.get("/").content.decode()
    assert "/p/research/" in page and "/p/other/" in page
    assert "Other &lt;b&gt;one&lt;/b&gt;" in page


def test_the_project_with_the_latest_activity_comes_first(member: Visitor) -> None:
    quiet = create_project("a-quiet-one", "A quiet one")
    Membership.objects.create(user=member.user, project=quiet, role=Role.VIEWER)
    run = make_run(member.project, "a run")
    for step in (1, 2):
        Alert.objects.create(run=run, kind="loss_spike", severity="warning", onset_step=step, step=4)
    page = member.client.get("/").content.decode()
    assert page.index("/p/research/") < page.index("/p/a-quiet-one/")
    assert "2 open alerts" in page and "no run yet" in page


def test_many_projects_are_listed_in_pages(admin: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8scope_dashboard.pages.project.home.PROJECTS_A_PAGE", 1)
    other = create_project("other", "Other")
    Membership.objects.create(user=admin.user, project=other, role=Role.VIEWER)
    pages = [admin.client.get(f"/?page={number}").content.decode() for number in (1, 2)]
    assert "/p/other/" in pages[0] and "/p/research/" not in pages[0] and "/p/research/" in pages[1]


def test_without_a_project_it_says_what_to_do(db: None) -> None:
    client = Client()
    client.force_login(User.objects.create_user("new"))
    assert "Ask an administrator" in client.get("/").content.decode()


def test_anonymous_visitors_are_sent_to_sign_in(db: None) -> None:
    assert Client().get("/")["Location"] == "/signin/?next=/"


def test_the_project_switcher_lists_only_own_projects(member: Visitor) -> None:
    visitor_of(create_project("secret", "Secret"), "eve", Role.ADMIN)
    assert "Secret" not in member.client.get(member.address()).content.decode()


def test_each_project_shows_its_state(member: Visitor) -> None:
    now = timezone.now()
    for name, verdict, days in (("a", "equivalent", 0), ("b", "worse", 0), ("c", "worse", 30)):
        at = now - timedelta(days=days)
        run = make_run(
            member.project,
            name,
            created_at=at,
            heartbeat_at=at,
            state="running" if name == "a" else "finished",
        )
        Comparison.objects.create(run=run, baseline="bf16", to_step=1, verdict=verdict, result={})
    page = member.client.get("/?all=1").content.decode()
    assert "2 runs today, 1 running" in page and "3 runs in all" in page and "Worse than BF16" in page
    Comparison.objects.filter(run__name="b").update(verdict="better")
    assert "Worse than BF16" not in member.client.get("/?all=1").content.decode(), "30 days ago"


def test_the_start_page_needs_few_queries(member: Visitor, django_assert_max_num_queries: object) -> None:
    for number in range(8):
        project = create_project(f"p{number}", f"P{number}")
        Membership.objects.create(user=member.user, project=project, role=Role.VIEWER)
        make_run(project, "run")
    with django_assert_max_num_queries(10):  # type: ignore[operator]
        member.client.get("/")


def test_an_administrator_of_the_server_makes_projects(db: None) -> None:
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    assert "New project" in client.get("/?all=1").content.decode()
    form = {"slug": "gpt", "name": "GPT <b>", "description": "Ours"}
    assert client.post("/projects/new", form)["Location"] == "/p/gpt/"
    assert Entry.objects.get(project__slug="gpt").text == "made “GPT <b>”"
    assert "GPT &lt;b&gt;" in client.get("/?all=1").content.decode()
    client.post("/projects/new", form)
    assert "already exists" in client.get("/?all=1").content.decode()
    client.post("/projects/new", {"slug": "a\0b", "name": "x\0"})
    assert Project.objects.filter(slug="ab", name="x").exists()


def test_others_make_none(admin: Visitor) -> None:
    assert "New project" not in admin.client.get("/?all=1").content.decode()
    assert admin.client.post("/projects/new", {"slug": "x", "name": "X"}).status_code == 403
    assert not Project.objects.filter(slug="x").exists()


def test_archived_projects_are_listed_apart(admin: Visitor) -> None:
    other = create_project("other", "Other")
    Membership.objects.create(user=admin.user, project=other, role=Role.ADMIN)
    assert admin.client.post(admin.address("settings/archive"), {"archived": "1"}).status_code == 302
    page = admin.client.get("/?all=1").content.decode()
    assert "Archived projects (1)" in page
    assert admin.client.get("/")["Location"] == "/p/other/"
    assert "/p/research/" not in admin.client.get("/p/other/").content.decode(), "not in the menu"
    assert admin.client.get(admin.address()).status_code == 200, "it goes on"
    admin.client.post(admin.address("settings/archive"), {"archived": "0"})
    assert "Archived projects" not in admin.client.get("/").content.decode()
    assert [entry.text for entry in Entry.objects.order_by("id")] == ["archived", "no longer archived"]


def test_the_settings_describe_a_project(admin: Visitor) -> None:
    form = {"name": "Renamed", "description": "About <it>", "default_baseline": "bf16"}
    admin.client.post(admin.address("settings/general"), form)
    assert "About &lt;it&gt;" in admin.client.get("/?all=1").content.decode()
    admin.project.refresh_from_db()
    assert (admin.project.name, admin.project.default_baseline) == ("Renamed", "bf16")
    admin.client.post(admin.address("settings/general"), {**form, "description": "d" * 2_001})
    admin.project.refresh_from_db()
    assert admin.project.description == "About <it>"
