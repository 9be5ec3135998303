"""A project with a member who is signed in."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from dashboard.helpers.seeding import Seeded, seed_project
from django.test import Client

from fp8scope_dashboard.accounts.models import Membership, Project, Role, User
from fp8scope_dashboard.accounts.services import create_project


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


@pytest.fixture
def admin(db: None) -> Visitor:
    return visitor_of(create_project("research", "Research"), "ada", Role.ADMIN)


@pytest.fixture
def member(admin: Visitor) -> Visitor:
    return visitor_of(admin.project, "mia", Role.MEMBER)


@pytest.fixture
def viewer(admin: Visitor) -> Visitor:
    return visitor_of(admin.project, "vic", Role.VIEWER)


@pytest.fixture
def stranger(db: None) -> Visitor:
    """A member of another project."""
    return visitor_of(create_project("elsewhere", "Elsewhere"), "sam", Role.ADMIN)


@pytest.fixture
def seeded(admin: Visitor) -> Seeded:
    return seed_project(admin.project, 150)
