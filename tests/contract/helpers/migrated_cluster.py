"""A stopped PostgreSQL with the dashboard's tables, made once and copied for each test that stops its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from helpers.live_servers import process_environment

from fp8scope_dashboard.embedded.postgres import EmbeddedPostgres

PREPARE = """
import django; django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.accounts.tokens import create_token
print(create_token(create_project("default", "Default"), "t", scopes=("write", "read"))[1])
"""


@dataclass(frozen=True)
class MigratedCluster:
    """The data directory of an `EmbeddedPostgres` that does not run, and the token of a project in it."""

    data_dir: Path
    token: str

    def copy(self, data_dir: Path, *, durable: bool) -> EmbeddedPostgres:
        """A server with a copy of the database, not started yet."""
        server = EmbeddedPostgres(data_dir, durable=durable)
        data_dir.mkdir(parents=True)
        # With their owner, who is not root, as shutil.copytree would not.
        command = ["cp", "-a", str(EmbeddedPostgres(self.data_dir).server_dir), str(server.server_dir)]
        subprocess.run(command, check=True)
        return server


def migrate(data_dir: Path) -> MigratedCluster:
    with EmbeddedPostgres(data_dir, durable=False) as url:
        variables = {**process_environment(), "DATABASE_URL": url, "FP8SCOPE_BASE_URL": "http://localhost"}
        prepared = subprocess.run(
            [sys.executable, "-c", PREPARE], env=variables, check=True, capture_output=True, text=True
        )
    return MigratedCluster(data_dir, prepared.stdout.strip())
