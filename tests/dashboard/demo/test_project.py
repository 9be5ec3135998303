"""The project that a demo writes to."""

from __future__ import annotations

import pytest
from django.test import Client

from fp8scope_dashboard.accounts.models import Project, User
from fp8scope_dashboard.accounts.services import authenticate_token, create_administrator_link
from fp8scope_dashboard.demo.project import MARGIN, create
from fp8scope_dashboard.embedded.processes import ServerError

pytestmark = pytest.mark.django_db
BASE = "http://testserver"


@pytest.fixture
def administrator() -> User:
    create_administrator_link(BASE)
    return User.objects.get()


def test_it_works(administrator: User) -> None:
    made = create(BASE)
    assert made.slug == "demo"
    assert made.page == f"{BASE}/p/demo/"
    token = authenticate_token(made.token)
    assert token is not None
    assert token.project.slug == "demo"
    assert token.project.margin == MARGIN


def test_the_link_leads_to_the_project(administrator: User, client: Client) -> None:
    made = create(BASE)
    address = made.link.removeprefix(BASE)
    assert client.get(address).status_code == 200
    answer = client.post(address)
    assert (answer.status_code, answer["Location"]) == (302, "/p/demo/")
    assert client.session["_auth_user_id"] == str(administrator.pk)


@pytest.mark.parametrize(
    "target", ["https://elsewhere.example/", "//elsewhere.example", "javascript:alert(1)", ""]
)
def test_a_link_redirects_only_to_this_site(administrator: User, client: Client, target: str) -> None:
    address = create(BASE).link.removeprefix(BASE).partition("?")[0]
    assert client.post(f"{address}?next={target}")["Location"] == "/"


def test_each_demo_gets_a_new_project(administrator: User) -> None:
    slugs = [create(BASE).slug for _ in range(3)]
    assert slugs == ["demo", "demo-2", "demo-3"]
    Project.objects.get(slug="demo-2").delete()
    assert create(BASE).slug == "demo-2"


def test_its_alert_rules_are_there(administrator: User) -> None:
    project = Project.objects.get(slug=create(BASE).slug)
    assert project.rules.filter(kind="saturation_rate", enabled=True).exists()


def test_the_error_names_a_missing_administrator() -> None:
    with pytest.raises(ServerError, match="no administrator"):
        create(BASE)


def test_its_secrets_are_not_shown(administrator: User) -> None:
    made = create(BASE)
    assert made.token not in repr(made)
    assert made.link not in repr(made)
