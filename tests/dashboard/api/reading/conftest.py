"""A project with judged runs, its pages and a client that reads them."""

from __future__ import annotations

import pytest
from dashboard.helpers.reading import Reader
from dashboard.helpers.seeding import Seeded, seed_project
from dashboard.helpers.visitors import Visitor, visitor_of

from fp8scope_dashboard.accounts.models import Role
from fp8scope_dashboard.accounts.services import create_project


@pytest.fixture
def viewer(db: None) -> Visitor:
    return visitor_of(create_project("research", "Research"), "vic", Role.VIEWER)


@pytest.fixture
def seeded(viewer: Visitor) -> Seeded:
    return seed_project(viewer.project, 150)


@pytest.fixture
def reader(viewer: Visitor) -> Reader:
    return Reader(viewer.project)
