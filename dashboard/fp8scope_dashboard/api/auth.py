"""Who speaks: a bearer token, and with it a project."""

from __future__ import annotations

from typing import cast
from uuid import UUID

from django.http import HttpRequest
from ninja.security import HttpBearer

from fp8scope_dashboard.accounts.models import ApiToken, Project
from fp8scope_dashboard.accounts.services import authenticate_token
from fp8scope_dashboard.admission import callers
from fp8scope_dashboard.db import replica, sql
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.wire.errors import BadTokenError, NoTokenError, UnknownRunError

# Before every answer about telemetry: one statement, and not one that the ORM has to compose.
RUN_AND_TENSOR = """
    SELECT tensor.index FROM runs_run run
    LEFT JOIN runs_tensor tensor ON tensor.run_id = run.id AND tensor.name = %(name)s
    WHERE run.id = %(run)s AND run.project_id = %(project)s
"""
HINT = "Make one on the project's settings page and set FP8SCOPE_TOKEN, or run `fp8scope login`."


class Token(HttpBearer):
    """`Authorization: Bearer fp8s_…`"""

    def __call__(self, request: HttpRequest) -> ApiToken:
        scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secret:
            raise NoTokenError("The request carries no token.", HINT)
        return self.authenticate(request, secret)

    def authenticate(self, request: HttpRequest, token: str) -> ApiToken:
        secret = token.strip()
        found = authenticate_token(secret)
        if found is None:
            callers.tokens.discard(secret)
            raise BadTokenError("The token is unknown or was revoked.", HINT)
        callers.tokens.add(secret)
        return found


def project_of(request: HttpRequest) -> Project:
    """The project that the request's token speaks for."""
    return cast("ApiToken", request.auth).project  # type: ignore[attr-defined]


def run_of(request: HttpRequest, run_id: UUID) -> Run:
    """A run of the token's project.

    Raises:
        UnknownRunError: there is none of this id, or it belongs to another project.
    """
    project = project_of(request)
    found = Run.objects.filter(pk=run_id, project=project).first()
    if found is None:
        raise _unknown(project, run_id)
    found.project = project
    return found


def check_run(request: HttpRequest, run_id: UUID) -> None:
    """As `run_of`, where nothing of the run but its telemetry is asked for.

    Raises:
        UnknownRunError: as there.
    """
    tensor_of(request, run_id, None)


def tensor_of(request: HttpRequest, run_id: UUID, name: str | None) -> int | None:
    """As `check_run`; the Tensor.index of the run's tensor of this name, None where it has none.

    Raises:
        UnknownRunError: as there.
    """
    project = project_of(request)
    rows = sql.fetch(RUN_AND_TENSOR, {"run": run_id, "project": project.pk, "name": name}, replica.PRIMARY)
    if not rows:
        raise _unknown(project, run_id)
    index: int | None = rows[0][0]
    return index


def _unknown(project: Project, run_id: UUID) -> UnknownRunError:
    return UnknownRunError(
        f"The project {project.slug} has no run {run_id}.", "Register it first: PUT /api/v1/runs/{run}"
    )
