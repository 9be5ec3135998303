"""Reading over HTTP with a token that may only read."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from dashboard.helpers.token_clients import client_with_token

from fp8scope_dashboard.accounts.models import Project, Scope


class Reader:
    """Requests below /api/v1 with a token of a project."""

    def __init__(self, project: Project, *scopes: Scope) -> None:
        self._client = client_with_token(project, *(scopes or (Scope.READ,)))

    def json(self, path: str, **query: Any) -> Any:
        """The JSON of an answer 200."""
        answer = self._client.get(f"/api/v1{path}", query)
        assert answer.status_code == 200, answer.content
        return answer.json()

    def body(self, path: str, **query: Any) -> bytes:
        """The body of an answer 200."""
        answer = self._client.get(f"/api/v1{path}", query)
        assert answer.status_code == 200, answer.content
        return bytes(answer.content)

    def table(self, path: str, **query: Any) -> pa.Table:
        """The Arrow table of an answer."""
        with pa.ipc.open_stream(self.body(path, **query, format="arrow")) as stream:
            return stream.read_all()

    def refused(self, path: str, **query: Any) -> dict[str, str]:
        """The error of an answer 4xx."""
        answer = self._client.get(f"/api/v1{path}", query)
        assert 400 <= answer.status_code < 500
        return dict(answer.json()["error"])
