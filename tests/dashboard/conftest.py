"""An empty project."""

from __future__ import annotations

import pytest

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.accounts.services import create_project


@pytest.fixture
def project(db: None) -> Project:
    return create_project("default", "Default")
