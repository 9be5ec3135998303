"""Make, rename, describe and archive projects: the same for the pages, the command and the API."""

from __future__ import annotations

from django.core.exceptions import ValidationError
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project, User
from fp8scope_dashboard.accounts.services import create_project


class ProjectError(ValueError):
    """The project cannot be made or changed; the message says why."""


def make(slug: str, name: str, description: str = "", owner: User | None = None) -> Project:
    """Make a project with the default rules. The owner becomes its administrator.

    Args:
        slug: part of its address, which stays: small letters, digits and hyphens.

    Raises:
        ProjectError: the slug is taken or invalid, or the name or the description is not allowed.
    """
    try:
        project = create_project(slug.strip(), name.strip(), owner, description=description.strip())
    except ValidationError as error:
        raise ProjectError(_reasons(error)) from error
    return project


def change(
    project: Project,
    *,
    name: str | None = None,
    description: str | None = None,
    archived: bool | None = None,
) -> list[str]:
    """Change what is given, and return in words what has changed.

    An archived project is listed apart. Its agents, rules and pages go on.

    Raises:
        ProjectError: the name is empty, or a text is too long.
    """
    changes = []
    if name is not None and name.strip() != project.name:
        project.name = name.strip()
        changes.append(f"name “{project.name}”")
    if description is not None and description.strip() != project.description:
        project.description = description.strip()
        changes.append(f"description “{project.description}”")
    if archived is not None and archived != (project.archived_at is not None):
        project.archived_at = timezone.now() if archived else None
        changes.append("archived" if archived else "no longer archived")
    try:
        project.full_clean()
    except ValidationError as error:
        raise ProjectError(_reasons(error)) from error
    if changes:
        project.save(update_fields=["name", "description", "archived_at"])
    return changes


def _reasons(error: ValidationError) -> str:
    """All reasons in one line, each with its field."""
    return " ".join(
        f"{'' if field == '__all__' else f'{field}: '}{' '.join(reasons)}"
        for field, reasons in error.message_dict.items()
    )
