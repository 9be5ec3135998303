"""The home page: it redirects to a project or lists them."""

from __future__ import annotations

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.visitors import Visitor, visitor_of
from django.test import Client

from fp8scope_dashboard.accounts.models import Membership, Role, User
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts.models import Event


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
        Event.objects.create(run=run, kind="loss_spike", severity="warning", onset_step=step, step=4)
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
