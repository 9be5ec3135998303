"""The list of runs over HTTP, and a run whose deletion can be undone."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.token_clients import client_with_token
from django.test import Client
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project, Scope, User
from fp8scope_dashboard.runs import bulk
from fp8scope_dashboard.runs.models import BulkAction, Run

pytestmark = pytest.mark.django_db


@pytest.fixture
def client(project: Project) -> Client:
    return client_with_token(project, *Scope)


def listed(client: Client, q: str = "") -> dict[str, Any]:
    answer = client.get("/api/v1/runs", {"q": q})
    assert answer.status_code == 200
    return dict(answer.json())


def test_it_works(client: Client, project: Project) -> None:
    make_run(project, "good", last_scalars={"loss": 2.0}, config={"model": {"depth": 12}})
    make_run(project, "bad", last_scalars={"loss": 3.0})
    make_run(Project.objects.create(slug="other", name="Other"), "foreign", last_scalars={"loss": 1.0})
    assert [run["name"] for run in listed(client)["runs"]] == ["bad", "good"]
    found = listed(client, "loss<2.5")
    assert [run["name"] for run in found["runs"]] == ["good"] and found["total"] == 1
    assert [run["name"] for run in listed(client, "depth:12")["runs"]] == ["good"]
    assert [run["name"] for run in listed(client, "-depth:12")["runs"]] == ["bad"]


def test_problems_are_sentences(client: Client, project: Project) -> None:
    make_run(project, "run")
    answer = listed(client, "loss<abc colour:red")
    assert answer["total"] == 1 and len(answer["problems"]) == 2
    assert answer["problems"][0].startswith("“loss<abc”: after loss< write a number")


def test_archived_runs_are_listed_only_if_asked_for(client: Client, project: Project) -> None:
    make_run(project, "old", archived_at=timezone.now())
    assert listed(client)["total"] == 0 and listed(client, "archived:all")["total"] == 1


def test_refuses_a_search_that_is_too_long(client: Client) -> None:
    assert client.get("/api/v1/runs", {"q": "x" * 501}).status_code == 422


def test_an_agent_waits_while_a_deletion_can_be_undone(client: Client, project: Project) -> None:
    run = make_run(project, "run")
    user = User.objects.create_user("ada")
    action = bulk.change(project, Run.objects.all(), BulkAction.Kind.DELETE, user)
    assert action is not None
    body = {"name": "run"}

    def answers() -> list[tuple[int, str]]:
        registered = client.put(f"/api/v1/runs/{run.pk}", body, content_type="application/json")
        read = client.get(f"/api/v1/runs/{run.pk}")
        series = client.get(f"/api/v1/runs/{run.pk}/series", {"scalar": "loss"})
        sent = client.post(
            f"/api/v1/runs/{run.pk}/heartbeat",
            {"writer": str(uuid.UUID(int=1)), "dropped": 0, "errors": 0, "pending": 0},
            content_type="application/json",
        )
        answers = (registered, read, series, sent)
        return [(each.status_code, each.json().get("error", {}).get("code", "")) for each in answers]

    assert answers() == [(503, "unavailable")] * 4
    bulk.undo(action, user)
    assert answers() == [(200, "")] * 4
    bulk.change(project, Run.objects.all(), BulkAction.Kind.DELETE, user)
    Run.with_deleted.update(erase_at=timezone.now() - timedelta(seconds=1))
    assert answers() == [(409, "run_conflict"), *[(404, "unknown_run")] * 3]


def test_other_projects_do_not_learn_of_a_deletion(project: Project) -> None:
    run = make_run(project, "run")
    bulk.change(project, Run.objects.all(), BulkAction.Kind.DELETE, User.objects.create_user("ada"))
    other = Project.objects.create(slug="other", name="Other")
    stranger = client_with_token(other)
    for pk in (run.pk, uuid.uuid4()):
        assert stranger.get(f"/api/v1/runs/{pk}").json()["error"]["code"] == "unknown_run"


def test_deleting_over_the_api_has_no_delay(client: Client, project: Project) -> None:
    run = make_run(project, "run")
    assert client.delete(f"/api/v1/runs/{run.pk}").status_code == 202
    assert Run.with_deleted.get().erase_at is None
