"""Signed-in users of the pages, and decoding of figures."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from dashboard.helpers.shown_html import ShownClient
from django.test import Client

from fp8scope_dashboard.accounts.models import Membership, Project, Role, User
from fp8scope_dashboard.runs.models import Run


@dataclass(frozen=True)
class Visitor:
    """A signed-in client with its user and project."""

    client: Client
    user: User
    project: Project

    def address(self, rest: str = "") -> str:
        """The address of a page of the project."""
        return f"/p/{self.project.slug}/{rest}"


def visitor_of(project: Project, name: str, role: Role) -> Visitor:
    """Sign in a new user with this role in the project."""
    user = User.objects.create_user(name)
    Membership.objects.create(user=user, project=project, role=role)
    client = ShownClient()
    client.force_login(user)
    return Visitor(client, user, project)


def html(visitor: Visitor, rest: str = "", **headers: str) -> str:
    """GET a page of the project, or a part of one."""
    answer = visitor.client.get(visitor.address(rest), headers=headers)
    assert answer.status_code == 200
    return answer.content.decode()


def run_html(visitor: Visitor, run: Run, rest: str = "") -> str:
    """GET the page of a run, or a part of it."""
    return html(visitor, f"runs/{run.pk}/{rest}")


def get_json(visitor: Visitor, rest: str, **query: str) -> dict[str, Any]:
    """GET a page of the project that is JSON."""
    answer = visitor.client.get(visitor.address(rest), query)
    assert answer.status_code == 200 and answer["Content-Type"] == "application/json"
    return dict(json.loads(answer.content))


def trace_values(data: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Decode a trace's values, which plotly.py writes as a list or as base64."""
    if isinstance(data, dict):
        return np.frombuffer(base64.b64decode(data["bdata"]), np.dtype(data["dtype"]))
    return np.array([np.nan if value is None else value for value in data], float)
