"""A person who is signed in and visits the pages of a project."""

from __future__ import annotations

from dataclasses import dataclass

from django.test import Client

from fp8scope_dashboard.accounts.models import Membership, Project, Role, User


@dataclass(frozen=True)
class Visitor:
    """Somebody who is signed in, and their project."""

    client: Client
    user: User
    project: Project

    def address(self, rest: str = "") -> str:
        return f"/p/{self.project.slug}/{rest}"


def visitor_of(project: Project, name: str, role: Role) -> Visitor:
    user = User.objects.create_user(name)
    Membership.objects.create(user=user, project=project, role=role)
    client = Client()
    client.force_login(user)
    return Visitor(client, user, project)
