"""Clients of the API."""

from __future__ import annotations

from django.test import Client

from fp8scope_dashboard.accounts.models import Project, Scope
from fp8scope_dashboard.accounts.services import create_token


def client_with_token(project: Project, *scopes: Scope) -> Client:
    """A client with a new token; without scopes, with those of tokens of version 0.1."""
    _, secret = create_token(project, "tests", scopes=scopes or (Scope.WRITE, Scope.READ))
    return Client(headers={"authorization": f"Bearer {secret}"})
