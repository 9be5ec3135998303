"""A seeded project with copied histories, and logins that read its views."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from uuid import uuid4

import psycopg
import pytest
from dashboard.helpers.seeding import Seeded, seed_project
from dashboard.helpers.sql_logins import Login, connect

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.sql_views import history
from fp8scope_dashboard.sql_views.models import SqlReader
from fp8scope_dashboard.sql_views.readers import make_reader, remove_reader


def remove_if_there(role: str) -> None:
    """Roles belong to all databases of a server, so they must not outlive a test."""
    if SqlReader.objects.filter(role=role).exists():
        remove_reader(role)


@pytest.fixture
def login(transactional_db: None) -> Iterator[Login]:
    """A function that makes a login, of one project if one is given, and connects with it."""
    with ExitStack() as stack:

        def make(project: Project | None = None, seconds: int = 30) -> psycopg.Connection:
            role = f"reader_{uuid4().hex}"
            password = make_reader(role, project, seconds=seconds)
            stack.callback(remove_if_there, role)
            return stack.enter_context(connect(role, password))

        yield make


@pytest.fixture
def seeded(transactional_db: None) -> Seeded:
    """BF16 seeds, a healthy FP8 run and one that diverges, with copied histories."""
    runs = seed_project(create_project("research", "Research"), 300)
    for run in Run.objects.all():
        assert history.copy_run(run.pk)
    return runs
