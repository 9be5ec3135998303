"""The migrations of earlier versions, which the present ones replace.

A database of an earlier version has applied a part of these. `migrate_to` makes such a database.
"""

from __future__ import annotations

from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from django.db.migrations.state import ProjectState

from fp8scope_dashboard.sql_views.installation import install_views


class OldMigrations(MigrationLoader):
    """All migrations but those that replace others."""

    def load_disk(self) -> None:
        super().load_disk()
        self.disk_migrations = {
            key: migration for key, migration in self.disk_migrations.items() if not migration.replaces
        }


def old_executor() -> MigrationExecutor:
    executor = MigrationExecutor(connection)
    executor.loader = OldMigrations(connection)
    return executor


def forget_replacements() -> None:
    """Forget which replacing migrations have been applied: an earlier version has none of them."""
    old = OldMigrations(connection).disk_migrations
    for app, name in MigrationRecorder(connection).applied_migrations():
        if (app, name) not in old:
            MigrationRecorder(connection).record_unapplied(app, name)


def migrate_to(*targets: tuple[str, str]) -> ProjectState:
    """Undo what came after these migrations of an earlier version. Returns its models."""
    old_executor().migrate(list(targets))
    forget_replacements()
    return OldMigrations(connection).project_state(list(targets))


def migrate() -> None:
    """Upgrade to this version, as `fp8scope up` does."""
    executor = MigrationExecutor(connection)
    executor.migrate(executor.loader.graph.leaf_nodes())
    install_views(connection)
