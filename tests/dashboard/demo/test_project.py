"""Creating the project of a demo, with its token and sign-in link."""

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
    project = create(BASE)
    assert project.slug == "demo"
    assert project.page == f"{BASE}/p/demo/"
    token = authenticate_token(project.token)
    assert token is not None
    assert token.project.slug == "demo"
    assert token.project.margin == MARGIN


def test_the_link_leads_to_the_project(administrator: User, client: Client) -> None:
    project = create(BASE)
    address = project.link.removeprefix(BASE)
    assert client.get(address).status_code == 200
    answer = client.post(address)
    assert (answer.status_code, answer["Location"]) == (302, "/p/demo/")
    assert client.session["_auth_user_id"] == str(administrator.pk)


@pytest.mark.parametrize(
    "target", ["https://elsewhere.example/", "//elsewhere.example", "javascript:alert(1)", ""]
)
def test_the_link_does_not_redirect_to_other_sites(administrator: User, client: Client, target: str) -> None:
    address = create(BASE).link.removeprefix(BASE).partition("?")[0]
    assert client.post(f"{address}?next={target}")["Location"] == "/"


def test_each_demo_gets_a_new_project(administrator: User) -> None:
    slugs = [create(BASE).slug for _ in range(3)]
    assert slugs == ["demo", "demo-2", "demo-3"]
    Project.objects.get(slug="demo-2").delete()
    assert create(BASE).slug == "demo-2"


def test_the_project_has_alert_rules(administrator: User) -> None:
    project = Project.objects.get(slug=create(BASE).slug)
    assert project.rules.filter(kind="saturation_rate", enabled=True).exists()


def test_needs_an_administrator() -> None:
    with pytest.raises(ServerError, match="no administrator"):
        create(BASE)


def test_its_repr_contains_no_secrets(administrator: User) -> None:
    project = create(BASE)
    assert project.token not in repr(project)
    assert project.link not in repr(project)
