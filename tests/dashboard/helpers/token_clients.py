"""Clients of the API."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

import urllib3
from django.test import Client
from helpers.live_servers import Server

from fp8scope_dashboard.accounts.models import Project, Scope
from fp8scope_dashboard.accounts.tokens import create_token


def client_with_token(project: Project, *scopes: Scope) -> Client:
    """A client with a new token; without scopes, with those of tokens of version 0.1."""
    _, secret = create_token(project, "tests", scopes=scopes or (Scope.WRITE, Scope.READ))
    return Client(headers={"authorization": f"Bearer {secret}"})


class ServerClient:
    """Requests to a running server with a new token that has these scopes, those of an agent by default."""

    def __init__(self, server: Server, scopes: Sequence[Scope] = (Scope.WRITE,)) -> None:
        self.token, self.secret = create_token(server.project, "a token", scopes=scopes)
        self._server = server

    def send(self, method: str, path: str, body: Any = None) -> urllib3.BaseHTTPResponse:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode() if body else b""
        headers = {"Authorization": f"Bearer {self.secret}", "Content-Type": "application/json"}
        return urllib3.request(method, f"{self._server.url}/api/v1{path}", headers=headers, body=data)

    def register(self, run: uuid.UUID) -> None:
        assert self.send("PUT", f"/runs/{run}", {"name": "r"}).status == 201
