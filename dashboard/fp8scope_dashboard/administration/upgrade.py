"""`fp8scope upgrade`: what a new version has to change, and changing it before the server starts."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Final

from fp8scope_dashboard.administration import database
from fp8scope_dashboard.embedded import conversion, processes
from fp8scope_dashboard.embedded.processes import ServerError
from fp8scope_dashboard.servers.configuration import DataDir, default_data_dir

PENDING: Final = 3
"""The exit status of `--check` if something is to be done."""


def upgrade(argv: list[str]) -> int:
    """Change an installation for the installed version: PostgreSQL's files and the tables."""
    options = _parser().parse_args(argv)
    data = DataDir(options.data_dir.expanduser().absolute())
    try:
        return _check(data) if options.check else _upgrade(data)
    except ServerError as error:
        print(f"fp8scope upgrade: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"fp8scope upgrade: {error.filename or ''}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130


def _check(data: DataDir) -> int:
    """Print what is to be done. The server may run."""
    is_private = not os.environ.get("DATABASE_URL")
    to_do = [*_conversion(data.root)] if is_private else []
    with database.connected(data) as is_running:
        to_do += [f"the tables change: {name}" for name in pending_migrations()]
    print(f"fp8scope {version('fp8scope')}")
    for line in to_do or ["Nothing is to be done."]:
        print(line)
    if not to_do:
        return 0
    stop = "stop `fp8scope up`, " if is_private and is_running else ""
    print("Save the data first (`fp8scope backup FILE`).")
    print(f"Then {stop}run `fp8scope upgrade`, and start the server.")
    return PENDING


def _conversion(root: Path) -> list[str]:
    if (newest := conversion.newer_version(root)) is None:
        return []
    size = conversion.size_of(root) / 1e6
    return [
        f"PostgreSQL {conversion.cluster_version(root)} becomes {newest}: {size:,.0f} MB are copied, and the "
        "old files stay"
    ]


def _upgrade(data: DataDir) -> int:
    """Convert PostgreSQL's files if they are of an older major version, and migrate the tables."""
    if not os.environ.get("DATABASE_URL") and data.root.is_dir():
        with processes.locked(data.root):
            conversion.finish_interrupted(data.root)
            current = conversion.cluster_version(data.root)
            if (newest := conversion.newer_version(data.root)) is not None:
                print(f"PostgreSQL {current} becomes {newest}. This takes a while.", flush=True)
                old = conversion.convert(data.root, newest)
                print(f"Done. Remove {old} once you have seen that all is there.")
    with database.connected(data):
        names = pending_migrations()
        if names:
            # Importing it needs settings, which `connected` sets up.
            from django.core.management import call_command

            call_command("migrate", interactive=False, verbosity=0)
    print(f"The tables have changed: {', '.join(names)}." if names else "The tables are up to date.")
    return 0


def pending_migrations() -> list[str]:
    """The migrations that the database lacks, in their order. Needs Django to be set up."""
    from django.db import connection
    from django.db.migrations.executor import MigrationExecutor

    executor = MigrationExecutor(connection)
    plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
    return [f"{migration.app_label} {migration.name}" for migration, _ in plan]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fp8scope upgrade", description=upgrade.__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"only print what is to be done; exit status 0: nothing, {PENDING}: something",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=default_data_dir(),
        help="the directory of `fp8scope up` (default: FP8SCOPE_DATA_DIR, else ~/.fp8scope)",
    )
    return parser
