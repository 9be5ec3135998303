"""Reach the installation's database: the one that the environment names, or the private one of `fp8scope up`.

A private PostgreSQL is used where `up` runs, and started for the duration of the command where it does not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import django
import psycopg

from fp8scope_dashboard.embedded import processes
from fp8scope_dashboard.embedded.postgres import EmbeddedPostgres
from fp8scope_dashboard.embedded.processes import AlreadyRunningError, ServerError
from fp8scope_dashboard.servers.configuration import DataDir

CONNECT_SECONDS = 10


@contextmanager
def connected(data: DataDir) -> Iterator[bool]:
    """Set Django up on the installation's database. Yields whether its server runs, as far as is known.

    Raises:
        ServerError: there is no database, or it does not answer; the message says what to do.
    """
    with ExitStack() as stack:
        runs = True
        if not os.environ.get("DATABASE_URL"):
            os.environ["DATABASE_URL"], runs = _private(data, stack)
        _check(os.environ["DATABASE_URL"])
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "fp8scope_dashboard.settings.base")
        os.environ.setdefault("FP8SCOPE_DATA_DIR", str(data.root))
        django.setup()
        stack.callback(_disconnect)
        yield runs


def _private(data: DataDir, stack: ExitStack) -> tuple[str, bool]:
    """The private database's URL, and whether `up` runs; if it does not, `stack` stops what starts here."""
    server = EmbeddedPostgres(data.root / "postgres")
    try:
        exists = server.server_dir.exists()
    except OSError as error:
        raise _unreadable(server.data_dir, error) from error
    if not exists:
        raise ServerError(
            f"{data.root} holds no database. Name the directory of `fp8scope up` with --data-dir, or set "
            "DATABASE_URL if the installation uses another PostgreSQL. `fp8scope up` makes a new installation"
        )
    try:
        stack.enter_context(processes.locked(data.root))
    except AlreadyRunningError:
        return server.url, True
    except OSError as error:
        raise _unreadable(data.root, error) from error
    return stack.enter_context(server), False


def _unreadable(path: Path, error: OSError) -> ServerError:
    return ServerError(
        f"cannot use {path}: {error.strerror}. Run this as the user (or root) that runs `fp8scope up`"
    )


def _check(url: str) -> None:
    """Say at once what a pool of connections says only after several attempts."""
    try:
        psycopg.connect(url, connect_timeout=CONNECT_SECONDS).close()
    except psycopg.Error as error:
        # libpq's message names host and user, never the password.
        reason = str(error).strip().partition("\n")[0]
        raise ServerError(
            f"the database does not answer: {reason}. If `fp8scope up` is starting, wait until it is ready"
        ) from error


def _disconnect() -> None:
    from django.db import connection

    connection.close()
    # The pool's threads would hold up the exit for some seconds.
    getattr(connection, "close_pool")()  # noqa: B009  (PostgreSQL's wrapper has it, the stubs' base has not)
