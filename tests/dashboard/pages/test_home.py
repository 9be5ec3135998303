"""The home page: it redirects to a project or lists them."""

from __future__ import annotations

from dashboard.helpers.visitors import Visitor, visitor_of
from django.test import Client

from fp8scope_dashboard.accounts.models import Membership, Role, User
from fp8scope_dashboard.accounts.services import create_project


def test_it_works(member: Visitor) -> None:
    answer = member.client.get("/")
    assert answer.status_code == 302 and answer["Location"] == member.address()


def test_lists_several_projects(member: Visitor) -> None:
    other = create_project("other", "Other <b>one</b>")
    Membership.objects.create(user=member.user, project=other, role=Role.VIEWER)
    page = member.client.get("/").content.decode()
    assert "/p/research/" in page and "/p/other/" in page
    assert "Other &lt;b&gt;one&lt;/b&gt;" in page


def test_without_a_project_it_says_what_to_do(db: None) -> None:
    client = Client()
    client.force_login(User.objects.create_user("new"))
    assert "Ask an administrator" in client.get("/").content.decode()


def test_anonymous_visitors_are_sent_to_sign_in(db: None) -> None:
    assert Client().get("/")["Location"] == "/signin/?next=/"


def test_the_project_switcher_lists_only_own_projects(member: Visitor) -> None:
    visitor_of(create_project("secret", "Secret"), "eve", Role.ADMIN)
    assert "Secret" not in member.client.get(member.address()).content.decode()
