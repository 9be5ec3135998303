"""Signed-in users of a project, one per role, and a project with seeded runs."""

from __future__ import annotations

import pytest
from dashboard.helpers.seeding import Seeded, seed_project
from dashboard.helpers.visitors import Visitor, visitor_of

from fp8scope_dashboard.accounts.models import Role
from fp8scope_dashboard.accounts.services import create_project


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
