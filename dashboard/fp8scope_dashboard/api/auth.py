"""Authentication: a bearer token, which belongs to a project."""

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
from fp8scope_dashboard.runs.services import is_undoable
from fp8scope_dashboard.wire.errors import (
    BadTokenError,
    NoTokenError,
    RefusalError,
    UnavailableError,
    UnknownRunError,
)

# Runs before every response with telemetry: a single statement, without the cost of composing it with the
# ORM.
RUN_AND_TENSOR = """
    SELECT tensor.index FROM runs_run run
    LEFT JOIN runs_tensor tensor ON tensor.run_id = run.id AND tensor.name = %(name)s
    WHERE run.id = %(run)s AND run.project_id = %(project)s
"""


class Token(HttpBearer):
    """`Authorization: Bearer fp8s_…`"""

    def __call__(self, request: HttpRequest) -> ApiToken:
        scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secret:
            raise NoTokenError
        return self.authenticate(request, secret)

    def authenticate(self, request: HttpRequest, token: str) -> ApiToken:
        secret = token.strip()
        authenticated = authenticate_token(secret)
        if authenticated is None:
            callers.tokens.discard(secret)
            raise BadTokenError
        callers.tokens.add(secret)
        return authenticated


def project_of(request: HttpRequest) -> Project:
    """The project of the request's token."""
    return cast("ApiToken", request.auth).project  # type: ignore[attr-defined]


def run_of(request: HttpRequest, run_id: UUID) -> Run:
    """The run with this id in the token's project.

    Raises:
        UnknownRunError: if there is none, or it belongs to another project.
    """
    project = project_of(request)
    stored = Run.objects.filter(pk=run_id, project=project).first()
    if stored is None:
        raise _unknown(project, run_id)
    stored.project = project
    return stored


def check_run(request: HttpRequest, run_id: UUID) -> None:
    """Check that the token's project has this run; cheaper than `run_of`.

    Raises:
        UnknownRunError: if it does not.
    """
    tensor_of(request, run_id, None)


def tensor_of(request: HttpRequest, run_id: UUID, name: str | None) -> int | None:
    """Check the run as `check_run` does, and return the Tensor.index of its tensor `name`, None if it has
    none.

    Raises:
        UnknownRunError: if the token's project does not have this run.
    """
    project = project_of(request)
    rows = sql.fetch(RUN_AND_TENSOR, {"run": run_id, "project": project.pk, "name": name}, replica.PRIMARY)
    if not rows:
        raise _unknown(project, run_id)
    index: int | None = rows[0][0]
    return index


def _unknown(project: Project, run_id: UUID) -> RefusalError:
    if is_undoable(run_id, project):
        return deleted_recently(run_id)
    return UnknownRunError(
        f"The project {project.slug} has no run {run_id}.", "Register it first: PUT /api/v1/runs/{run}"
    )


def deleted_recently(run_id: UUID) -> UnavailableError:
    """The answer while a deletion can be undone: the agent waits, so undoing it loses nothing."""
    return UnavailableError(
        f"The run {run_id} was deleted on the dashboard a few minutes ago.",
        "The deletion can be undone on the page with the runs. Try again later.",
    )
