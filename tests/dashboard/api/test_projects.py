"""The project of a token over the API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.test import Client

from fp8scope_dashboard.accounts.models import Membership, Project, Scope, User
from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.audit.models import Entry


def send(project: Project, method: str, address: str, body: Any = None, user: User | None = None) -> Any:
    _, secret = create_token(project, "t", user, [Scope.ADMINISTER])
    client = Client(headers={"Authorization": f"Bearer {secret}"})
    return client.generic(
        method,
        f"/api/v1/{address}",
        "" if body is None else json.dumps(body),
        content_type="application/json",
    )


def test_it_works(project: Project) -> None:
    answer = send(project, "PATCH", "project", {"name": "New", "description": "About", "archived": True})
    assert answer.status_code == 200
    shown = answer.json()
    assert (shown["name"], shown["description"], shown["slug"]) == ("New", "About", "default")
    assert shown["archived_at"] is not None
    assert Entry.objects.get(project=project).text == "name “New”, description “About”, archived"
    assert send(project, "GET", "project").json() == shown


def test_what_is_left_out_stays(project: Project) -> None:
    send(project, "PATCH", "project", {"description": "About"})
    project.refresh_from_db()
    assert (project.name, project.description, project.archived_at) == ("Default", "About", None)
    send(project, "PATCH", "project", {"name": "Default"})
    assert Entry.objects.filter(project=project).count() == 1, "nothing has changed"


@pytest.mark.parametrize(
    "body", [{"name": ""}, {"name": "x" * 129}, {"description": "d" * 2_001}, {"archived": "x"}]
)
def test_refuses_what_is_not_allowed(project: Project, body: dict[str, Any]) -> None:
    answer = send(project, "PATCH", "project", body)
    assert answer.status_code == 422 and answer.json()["error"]["code"] == "invalid"
    project.refresh_from_db()
    assert project.name == "Default" and project.archived_at is None


def test_an_administrator_of_the_server_makes_projects(project: Project) -> None:
    root = User.objects.create_superuser("root")
    answer = send(project, "POST", "projects", {"slug": "gpt", "name": "GPT"}, root)
    assert answer.status_code == 200 and answer.json()["slug"] == "gpt"
    assert Membership.objects.filter(project__slug="gpt", user=root, role="admin").exists()
    again = send(project, "POST", "projects", {"slug": "gpt", "name": "GPT"}, root)
    assert again.status_code == 422 and "already exists" in again.json()["error"]["message"]


def test_other_tokens_make_none(project: Project) -> None:
    for user in (None, User.objects.create_user("ada")):
        assert send(project, "POST", "projects", {"slug": "x", "name": "X"}, user).status_code == 403
    assert not Project.objects.filter(slug="x").exists()
