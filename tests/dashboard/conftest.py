"""An empty project, and a client that nobody has signed in."""

from __future__ import annotations

import pytest
from dashboard.helpers.shown_html import ShownClient

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.accounts.services import create_project


@pytest.fixture
def project(db: None) -> Project:
    return create_project("default", "Default")


@pytest.fixture
def client() -> ShownClient:
    return ShownClient()
