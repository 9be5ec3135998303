"""Authentication: a bearer token, which belongs to a project and has scopes.

Each router and each endpoint names the scope that it needs. One that names none needs *administer*.
"""

from __future__ import annotations

from typing import Final, cast
from uuid import UUID

from django.http import HttpRequest
from ninja.security import HttpBearer

from fp8scope_dashboard.accounts.models import ApiToken, Project, Scope
from fp8scope_dashboard.accounts.services import administers, authenticate_token
from fp8scope_dashboard.accounts.tokens import why_refused
from fp8scope_dashboard.db import replica, sql
from fp8scope_dashboard.edge import callers
from fp8scope_dashboard.edge.quotas import counts
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.runs.services import is_undoable
from fp8scope_dashboard.wire.errors import (
    BadTokenError,
    ForbiddenError,
    NoTokenError,
    RefusalError,
    UnavailableError,
    UnknownRunError,
)

# Runs before every response with telemetry: a single statement, without the cost of composing it with the
# ORM.
RUN_AND_TENSOR = """
    SELECT tensor.index, run.registered_with_id FROM runs_run run
    LEFT JOIN runs_tensor tensor ON tensor.run_id = run.id AND tensor.name = %(name)s
    WHERE run.id = %(run)s AND run.project_id = %(project)s AND run.deleted_at IS NULL
"""
# What storing a message reads of its run. The rest, e.g. the environment with its list of packages, is loaded
# only if it is asked for.
SENT_FIELDS: Final = (
    *("id", "project_id", "name", "state", "created_at", "last_step", "last_scalars", "statistics"),
    "registered_with_id",
)
RUN_OF_MESSAGE = f"""
    SELECT {", ".join(SENT_FIELDS)} FROM runs_run
    WHERE id = %(run)s AND project_id = %(project)s AND deleted_at IS NULL
"""


NEEDED_SCOPE: Final = "fp8scope.scope"
"""The entry of `request.META` with the scope that the endpoint needs."""
CAPABILITIES: Final = {
    Scope.WRITE: "register and write runs",
    Scope.READ: "read runs that other tokens registered, or rules",
    Scope.ADMINISTER: "change alert rules or the project, or delete runs",
}


class Token(HttpBearer):
    """`Authorization: Bearer fp8s_…`, with a token that has a scope.

    Args:
        scope: None: any.
        own_runs: for endpoints that read one run. A token that only writes runs is accepted as well; `run_of`
            and `tensor_of` then refuse the runs that it did not register.
    """

    def __init__(self, scope: Scope | None, *, own_runs: bool = False) -> None:
        super().__init__()
        self._scope = scope
        self._own_runs = own_runs

    def __call__(self, request: HttpRequest) -> ApiToken:
        return self.authenticate(request, secret_of(request))

    def authenticate(self, request: HttpRequest, token: str) -> ApiToken:
        secret = token.strip()
        authenticated = authenticate_token(secret)
        if authenticated is None:
            callers.tokens.discard(secret)
            raise BadTokenError(why_refused(secret))
        callers.tokens.add(secret, callers.Caller(authenticated.pk, authenticated.project_id))
        if self._scope is not None and not self._own_runs and not authenticated.may(self._scope):
            raise forbidden(authenticated, self._scope)
        if self._scope == Scope.ADMINISTER and not administers(authenticated):
            raise ForbiddenError(
                f"The token “{authenticated.name}” belongs to {authenticated.created_by}, who is not an "
                f"administrator of the project {authenticated.project.name}.",
                "Use a token of an administrator, or ask one to change the role of its owner.",
            )
        request.META[NEEDED_SCOPE] = self._scope
        return authenticated


WRITER: Final = Token(Scope.WRITE)
READER: Final = Token(Scope.READ)
RUN_READER: Final = Token(Scope.READ, own_runs=True)
ADMINISTRATOR: Final = Token(Scope.ADMINISTER)
ANY_TOKEN: Final = Token(None)


def secret_of(request: HttpRequest) -> str:
    """The secret in `Authorization: Bearer SECRET`.

    Raises:
        NoTokenError: there is none.
    """
    scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secret:
        raise NoTokenError
    return secret.strip()


def forbidden(token: ApiToken, scope: Scope) -> ForbiddenError:
    """The answer to a token without a scope."""
    return ForbiddenError(
        f"The token “{token.name}” may not {CAPABILITIES[scope]}: it has the scopes "
        f"{token.scope_labels or 'none'}.",
        f"Create a token with the scope “{scope.label}” on the settings page of the project "
        f"{token.project.name}, then set FP8SCOPE_TOKEN to it for this command.",
    )


def token_of(request: HttpRequest) -> ApiToken:
    """The token of the request."""
    return cast("ApiToken", request.auth)  # type: ignore[attr-defined]


def project_of(request: HttpRequest) -> Project:
    """The project of the request's token."""
    return token_of(request).project


def take_quota(request: HttpRequest, **amounts: int) -> None:
    """Count what the token sends.

    Raises:
        QuotaError: a quota of the token or its project is used up.
    """
    token = token_of(request)
    counts.take(token.pk, token.project_id, **amounts)


def run_of(request: HttpRequest, run_id: UUID) -> Run:
    """The run with this id in the token's project.

    Raises:
        UnknownRunError: if there is none, or it belongs to another project.
        ForbiddenError: if the endpoint reads the run, and the token may read only those that it registered.
    """
    project = project_of(request)
    stored = Run.objects.filter(pk=run_id, project=project).first()
    if stored is None:
        raise unknown_run(project.pk, run_id)
    check_registered_with(request, stored.registered_with_id)
    stored.project = project
    return stored


def run_of_message(request: HttpRequest, run_id: UUID) -> Run:
    """The run that a message is about, with the SENT_FIELDS; cheaper than `run_of`.

    Raises:
        UnknownRunError, ForbiddenError: as `run_of`.
    """
    project = project_of(request)
    rows = sql.fetch(RUN_OF_MESSAGE, {"run": run_id, "project": project.pk}, replica.PRIMARY)
    if not rows:
        raise unknown_run(project.pk, run_id)
    stored = Run.from_db(replica.PRIMARY, SENT_FIELDS, rows[0])
    check_registered_with(request, stored.registered_with_id)
    stored.project = project
    return stored


def check_run(request: HttpRequest, run_id: UUID) -> None:
    """Check that the token's project has this run; cheaper than `run_of`.

    Raises:
        UnknownRunError, ForbiddenError: as `run_of`.
    """
    tensor_of(request, run_id, None)


def tensor_of(request: HttpRequest, run_id: UUID, name: str | None) -> int | None:
    """Check the run as `check_run` does, and return the Tensor.index of its tensor `name`, None if it has
    none.

    Raises:
        UnknownRunError, ForbiddenError: as `run_of`.
    """
    project = project_of(request)
    rows = sql.fetch(RUN_AND_TENSOR, {"run": run_id, "project": project.pk, "name": name}, replica.PRIMARY)
    if not rows:
        raise unknown_run(project.pk, run_id)
    index: int | None
    ((index, registered_with),) = rows
    check_registered_with(request, registered_with)
    return index


def check_registered_with(request: HttpRequest, registered_with: int | None) -> None:
    """Check that the token may do to something what the endpoint does.

    Args:
        registered_with: the id of the token that registered it.

    Raises:
        ForbiddenError: the endpoint reads, and the token may read only what it registered.
    """
    token, scope = token_of(request), request.META[NEEDED_SCOPE]
    is_own = Scope.WRITE in token.scopes and registered_with == token.pk
    if not token.may(scope) and not (scope == Scope.READ and is_own):
        raise forbidden(token, scope)


def unknown_run(project_id: int, run_id: UUID) -> RefusalError:
    """The answer to a request about a run that the project does not have."""
    project = Project.objects.get(pk=project_id)
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
