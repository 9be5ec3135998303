"""The project of a token: read it, rename, describe and archive it; and make further projects."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from django.db import transaction
from django.http import HttpRequest
from ninja import Field, Router, Schema

from fp8scope_dashboard.accounts import projects
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.api.auth import ADMINISTRATOR, READER, project_of, token_of
from fp8scope_dashboard.api.responses import ERRORS
from fp8scope_dashboard.audit.log import actor_of, record
from fp8scope_dashboard.audit.models import Action
from fp8scope_dashboard.wire import schemas
from fp8scope_dashboard.wire.errors import ForbiddenError, InvalidError

HINT = "See docs/wire.md for the fields of a project."

router = Router(tags=["projects"], auth=ADMINISTRATOR)

Name = Annotated[str, Field(max_length=128)]
Description = Annotated[str, Field(max_length=2_000)]


class ProjectOut(Schema):
    """A project. `slug` is part of the addresses of its pages."""

    slug: str
    name: str
    description: str
    archived_at: datetime | None
    margin: float
    alpha: float


class ProjectChangeIn(Schema):
    """The changes; fields that are left out stay as they are."""

    name: Name | None = None
    description: Description | None = None
    archived: bool | None = None


class ProjectIn(Schema):
    slug: Annotated[str, Field(max_length=64)]
    name: Name
    description: Description = ""


@router.get("/project", response={200: ProjectOut, ERRORS: schemas.ErrorOut}, auth=READER)
def get_project(request: HttpRequest) -> Project:
    """The project of the token."""
    return project_of(request)


@router.patch("/project", response={200: ProjectOut, ERRORS: schemas.ErrorOut})
def change_project(request: HttpRequest, body: ProjectChangeIn) -> Project:
    """Rename, describe or archive the project of the token."""
    project = project_of(request)
    try:
        with transaction.atomic():
            changes = projects.change(
                project, name=body.name, description=body.description, archived=body.archived
            )
            if changes:
                record(actor_of(request), project, Action.PROJECT, ", ".join(changes))
    except projects.ProjectError as error:
        raise InvalidError(str(error)[:500], HINT) from None
    return project


@router.post("/projects", response={200: ProjectOut, ERRORS: schemas.ErrorOut})
def make_project(request: HttpRequest, body: ProjectIn) -> Project:
    """Make another project. The token must be of an administrator of the server, who administers it then."""
    owner = token_of(request).created_by
    if owner is None or not owner.is_superuser:
        raise ForbiddenError("Only administrators of the server make projects.", "Ask one of them.")
    try:
        with transaction.atomic():
            project = projects.make(body.slug, body.name, body.description, owner)
            record(actor_of(request), project, Action.PROJECT, f"made “{project.name}”")
    except projects.ProjectError as error:
        raise InvalidError(str(error)[:500], HINT) from None
    return project
