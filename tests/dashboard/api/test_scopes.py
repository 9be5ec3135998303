"""What a token may do: its scopes, and the audit log of what it changed."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import pytest
import urllib3
from dashboard.helpers.token_clients import ServerClient
from dashboard.helpers.visitors import visitor_of
from helpers.live_servers import Server

from fp8scope.cli import main as cli
from fp8scope_dashboard.accounts.models import Role, Scope
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.alerts.custom_rules import documents as rule_documents
from fp8scope_dashboard.alerts.custom_rules import store as rule_store
from fp8scope_dashboard.alerts.models import Rule
from fp8scope_dashboard.audit.models import Action, Entry

PAUSE = """\
version: 1
rules:
  - {name: Stop, statistic: loss, condition: above, value: -1, action: %s}
"""


# Below a run, and below /api/v1: every endpoint that reads.
READING = (
    *(
        "",
        "/history",
        "/media",
        "/media/1",
        "/card",
        "/console",
        "/series?scalar=loss",
        "/heatmap?statistic=amax",
        "/diagnosis",
        "/readiness",
    ),
    f"/writers/{uuid.uuid4()}",
    *("/export", f"/export/{uuid.uuid4()}", "/evaluation_matrix", "/environment", "/scalars", "/tensors"),
    *(
        "/histograms?tensor=a.input",
        "/tensors/ranking",
        "/certificate",
        "/verdict",
        "/course",
        "/ranks",
        "/evaluations",
        "/alerts",
        "/efficiency",
    ),
    *("/figures", "/figures/loss", "/figures/panel", "/figures/readiness", "/figures/bisect"),
)
OF_PROJECT = (
    *("/runs", "/rules", "/project", "/alerts", "/alerts/1", "/alerts/1/figure", "/figures/scores", "/fleet"),
    "/compare?a={run}&b={run}",
)


def own_rule(server: Server, name: str = "Gradient norm") -> Rule:
    document = {"name": name, "statistic": "grad_norm", "condition": "above", "value": 10}
    return rule_store.save(rule_documents.parse(server.project, document))


def test_it_works(server: Server) -> None:
    run, agent = uuid.uuid4(), ServerClient(server)
    agent.register(run)
    assert agent.token.scopes == ["write"]
    for path in ("", "/history", "/console", "/series?scalar=loss", "/diagnosis", "/export?format=csv"):
        assert agent.send("GET", f"/runs/{run}{path}").status == 200, path


@pytest.mark.parametrize("action", ["pause", "checkpoint", "none"])
def test_an_agents_token_cannot_change_rules(server: Server, action: str) -> None:
    own_rule(server)
    agent = ServerClient(server)
    for query in ("", "?prune=true", "?check=true"):
        answer = agent.send("PUT", f"/rules{query}", PAUSE % action)
        assert answer.status == 403 and answer.json()["error"]["code"] == "forbidden"
    assert not Rule.objects.filter(name="Stop").exists()
    assert Rule.objects.filter(name="Gradient norm").exists()
    assert not Entry.objects.exists()


def test_a_token_that_reads_changes_nothing(server: Server) -> None:
    run, agent, reader = uuid.uuid4(), ServerClient(server), ServerClient(server, [Scope.READ])
    agent.register(run)
    assert reader.send("GET", f"/runs/{run}").status == reader.send("GET", "/rules").status == 200
    assert reader.send("GET", "/runs").json()["total"] == 1
    assert reader.send("PUT", f"/runs/{uuid.uuid4()}", {"name": "r"}).status == 403
    assert reader.send("DELETE", f"/runs/{run}").status == 403
    assert reader.send("PUT", "/rules", PAUSE % "none").status == 403


def test_an_agents_token_reads_only_the_runs_that_it_registered(server: Server) -> None:
    foreign, agent = uuid.uuid4(), ServerClient(server)
    ServerClient(server).register(foreign)
    for path in READING:
        answer = agent.send("GET", f"/runs/{foreign}{path}")
        assert answer.status == 403 and answer.json()["error"]["code"] == "forbidden", path
    for path in OF_PROJECT:
        answer = agent.send("GET", path.format(run=foreign))
        assert answer.status == 403 and answer.json()["error"]["code"] == "forbidden", path
    # What `fp8scope login` and `doctor` of every version ask.
    assert agent.send("GET", f"/runs/{uuid.UUID(int=0)}").json()["error"]["code"] == "unknown_run"


def test_every_endpoint_that_reads_is_listed_here(server: Server) -> None:
    from fp8scope_dashboard.api.root import api

    paths = api.get_openapi_schema()["paths"]
    served = {path.removeprefix("/api/v1") for path, item in paths.items() if "get" in item}
    listed = {re.sub(r"\?.*", "", f"/runs/{{run}}{path}") for path in READING}
    listed |= {re.sub(r"\?.*", "", path) for path in OF_PROJECT}
    listed = {re.sub(r"/(alerts)/1\b", r"/\1/{alert}", path) for path in listed}
    listed = {re.sub(r"/figures/\w+$", "/figures/{name}", path) for path in listed}
    listed = {re.sub(r"/media/1$", "/media/{item}", path) for path in listed}
    listed = {re.sub(r"/writers/[-\w]+$", "/writers/{writer}", path) for path in listed}
    # Every token reads itself, and administrators the list of tokens; see test_tokens.py.
    of_tokens = {"/token", "/tokens"}
    assert {re.sub(r"/export/[-\w]+$", "/export/{progress}", path) for path in listed} | of_tokens == served


def test_no_token_and_a_token_of_another_project_read_nothing(server: Server) -> None:
    run = uuid.uuid4()
    ServerClient(server).register(run)
    _, secret = create_token(create_project("elsewhere", "Elsewhere"), "foreign", scopes=[Scope.READ])
    for path in (*(f"/runs/{run}{path}" for path in READING), *(p.format(run=run) for p in OF_PROJECT)):
        address = f"{server.url}/api/v1{path}"
        assert urllib3.request("GET", address).status == 401, path
        answer = urllib3.request("GET", address, headers={"Authorization": f"Bearer {secret}"})
        if "/runs/" in path or "/compare" in path:
            assert answer.status == 404 and answer.json()["error"]["code"] == "unknown_run", path
        elif answer.status == 200:
            assert str(run).encode() not in answer.data, path


def test_a_token_of_two_scopes_reads_all(server: Server) -> None:
    foreign = uuid.uuid4()
    ServerClient(server).register(foreign)
    assert ServerClient(server, [Scope.WRITE, Scope.READ]).send("GET", f"/runs/{foreign}").status == 200
    assert ServerClient(server, [Scope.ADMINISTER]).send("GET", f"/runs/{foreign}").status == 200


def test_only_an_administrators_token_deletes_runs(server: Server) -> None:
    run, agent = uuid.uuid4(), ServerClient(server)
    agent.register(run)
    assert agent.send("DELETE", f"/runs/{run}").status == 403
    assert agent.send("GET", f"/runs/{run}").status == 200
    administrator = ServerClient(server, [Scope.ADMINISTER])
    assert administrator.send("DELETE", f"/runs/{run}").status in (200, 202)
    entry = Entry.objects.get()
    assert entry.action == Action.RUN_DELETED and entry.token == administrator.token
    assert entry.address == "127.0.0.1" and administrator.token.prefix in entry.by


def test_the_command_says_how_to_get_such_a_token(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", ServerClient(server, [Scope.WRITE, Scope.READ]).secret)
    file = tmp_path / "rules.yaml"
    file.write_text(PAUSE % "none")
    assert cli.main(["rules", "apply", str(file)]) == 1
    error = capsys.readouterr().err
    assert "may not change alert rules" in error and "it has the scopes write runs, read" in error
    assert "with the scope “administer” on the settings page" in error


def test_pruned_rules_come_back_by_undoing_the_change(server: Server) -> None:
    own_rule(server)
    kept = own_rule(server, "Kept")
    text = "version: 1\nrules:\n  - {name: Kept, statistic: loss, condition: above, value: 3}\n"
    text += "  - {name: New, statistic: loss, condition: above, value: 1}\n"
    administrator = ServerClient(server, [Scope.ADMINISTER])
    assert administrator.send("PUT", "/rules?prune=true", text).status == 200
    assert {rule.name for rule in Rule.objects.filter(kind="threshold")} == {"Kept", "New"}
    entry = Entry.objects.get()
    assert entry.text == "created “New”; changed “Kept”; removed “Gradient norm”"
    admin, member, viewer = (visitor_of(server.project, role, Role(role)) for role in reversed(Role.values))
    page = member.client.get(member.address("settings/")).content.decode()
    assert "removed “Gradient norm”" in page and "from 127.0.0.1" in page
    undo = member.address(f"settings/changes/{entry.pk}/undo")
    assert viewer.client.post(undo).status_code == member.client.post(undo).status_code == 403
    assert admin.client.post(undo).status_code == 302
    assert {rule.name for rule in Rule.objects.filter(kind="threshold")} == {"Kept", "Gradient norm"}
    kept.refresh_from_db()
    assert kept.statistic == "grad_norm" and kept.parameters["value"] == 10
    answer = admin.client.post(undo, follow=True).content.decode()
    assert "This change is undone already." in answer
    assert [entry.by for entry in Entry.objects.order_by("id")][1:] == ["admin"]


def test_nothing_is_written_where_nothing_changed(server: Server) -> None:
    administrator = ServerClient(server, [Scope.ADMINISTER])
    for query in ("?check=true", "", ""):
        assert administrator.send("PUT", f"/rules{query}", PAUSE % "none").status == 200
    assert Entry.objects.count() == 1


def test_rules_whose_channel_is_gone_are_not_half_restored(server: Server) -> None:
    admin = visitor_of(server.project, "admin", Role.ADMIN)
    rule = own_rule(server)
    assert admin.client.post(admin.address(f"rules/{rule.pk}/remove")).status_code == 302
    entry = Entry.objects.get()
    entry.details["rules"][0]["before"]["channels"] = ["gone"]
    entry.save()
    undo = admin.address(f"settings/changes/{entry.pk}/undo")
    assert "The rules cannot be restored" in admin.client.post(undo, follow=True).content.decode()
    entry.refresh_from_db()
    assert entry.undone_at is None and not Rule.objects.filter(name="Gradient norm").exists()
