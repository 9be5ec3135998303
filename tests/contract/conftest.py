"""A database with the dashboard's tables, for tests that stop their PostgreSQL or fill its disk."""

from __future__ import annotations

import pytest
from contract.helpers.migrated_cluster import MigratedCluster, migrate


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> MigratedCluster:
    return migrate(tmp_path_factory.mktemp("migrated") / "postgres")


@pytest.fixture
def token(migrated: MigratedCluster) -> str:
    """The token of the project in the database."""
    return migrated.token
