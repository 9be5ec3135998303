"""The endpoints of tokens, and what an expired token gets from every part of the server."""

from __future__ import annotations

import base64
import uuid
from datetime import timedelta

import urllib3
from dashboard.helpers.token_clients import ServerClient
from django.utils import timezone
from helpers.live_servers import Server

from fp8scope_dashboard.accounts.models import ApiToken, Membership, Role, Scope, User
from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.audit.models import Action, Entry


def test_it_works(server: Server) -> None:
    client = ServerClient(server, [Scope.WRITE])
    described = client.send("GET", "/token").json()
    assert described["prefix"] == client.token.prefix and described["scopes"] == ["write"]
    assert described["project"] == "default" and described["owner"] is None
    assert described["expires_at"] is None and described["former_until"] is None
    assert client.secret not in str(described)


def test_a_token_rotates_itself_and_both_secrets_work(server: Server) -> None:
    client = ServerClient(server, [Scope.WRITE])
    answer = client.send("POST", "/token/rotate").json()
    assert answer["secret"] != client.secret and answer["former_until"] is not None
    for secret in (client.secret, answer["secret"]):
        response = get(server, "/token", secret)
        assert response.status == 200 and response.json()["id"] == client.token.pk
    entry = Entry.objects.get()
    assert entry.action == Action.TOKEN_ROTATED and client.token.prefix in entry.text
    assert answer["secret"] not in str(Entry.objects.values_list()) and "with the API" in entry.text


def test_administrators_list_the_tokens_that_work(server: Server) -> None:
    writer = ServerClient(server, [Scope.WRITE])
    ada = User.objects.create_user("ada")
    create_token(server.project, "of ada", ada, lifetime=timedelta(days=30))
    gone, _ = create_token(server.project, "gone")
    ApiToken.objects.filter(pk=gone.pk).update(revoked_at=timezone.now())
    assert writer.send("GET", "/tokens").status == 403
    listed = ServerClient(server, [Scope.ADMINISTER]).send("GET", "/tokens").json()["tokens"]
    by_name = {token["name"]: token for token in listed}
    assert "gone" not in by_name and by_name["of ada"]["owner"] == "ada"
    assert by_name["of ada"]["expires_at"] is not None and not any("secret" in token for token in listed)


def test_an_expired_token_gets_401_with_a_sentence_everywhere(server: Server) -> None:
    token, secret = create_token(server.project, "cluster", lifetime=timedelta(days=1))
    run = uuid.uuid4()
    registered = get(server, f"/runs/{run}", secret, "PUT", {"name": "r"})
    assert registered.status == 201
    ApiToken.objects.filter(pk=token.pk).update(expires_at=timezone.now() - timedelta(hours=1))
    message = {"writer": str(uuid.uuid4()), "seq": 0, "protocol": 1}
    row = {"step": 1, "time": "2026-01-01T00:00:00Z", "scalars": {"loss": 1.0}}
    for method, path, body in (
        ("GET", "/token", None),
        ("GET", f"/runs/{run}", None),
        ("PUT", f"/runs/{run}", {"name": "r"}),
        ("POST", f"/runs/{run}/batches", {**message, "rows": [row]}),
        ("POST", f"/runs/{run}/finish", message),
    ):
        answer = get(server, path, secret, method, body)
        error = answer.json()["error"]
        assert answer.status == 401 and error["code"] == "bad_token", path
        assert f"The token “cluster” ({token.prefix}…) expired on" in error["message"], path
        assert "settings page" in error["hint"]
    basic = base64.b64encode(f"x:{secret}".encode()).decode()
    for path, header in (("/mlflow/api/2.0/mlflow/runs/search", f"Basic {basic}"), ("/otlp/v1/metrics", "")):
        headers = {"Authorization": header or f"Bearer {secret}", "Content-Type": "application/json"}
        answer = urllib3.request("POST", server.url + path, headers=headers, body=b"{}")
        assert answer.status == 401 and b"expired on" in answer.data, path


def test_a_token_administers_while_its_owner_is_an_administrator(server: Server) -> None:
    ada = User.objects.create_user("ada")
    membership = Membership.objects.create(user=ada, project=server.project, role=Role.ADMIN)
    _, secret = create_token(server.project, "t", ada, [Scope.ADMINISTER])
    assert get(server, "/tokens", secret).status == 200
    Membership.objects.filter(pk=membership.pk).update(role=Role.MEMBER)
    answer = get(server, "/tokens", secret)
    assert (
        answer.status == 403
        and "belongs to ada, who is not an administrator" in answer.json()["error"]["message"]
    )
    assert get(server, "/runs", secret).status == 200
    User.objects.update(is_superuser=True)
    assert get(server, "/tokens", secret).status == 200


def get(
    server: Server, path: str, secret: str, method: str = "GET", body: object = None
) -> urllib3.BaseHTTPResponse:
    headers = {"Authorization": f"Bearer {secret}"}
    return urllib3.request(method, f"{server.url}/api/v1{path}", headers=headers, json=body)
