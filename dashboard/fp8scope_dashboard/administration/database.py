"""Connect to the installation's database: DATABASE_URL, or the private PostgreSQL of `fp8scope up`.

If `up` is not running, the private PostgreSQL runs for the duration of the command.
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
from fp8scope_dashboard.servers import configuration
from fp8scope_dashboard.servers.configuration import DataDir

CONNECT_SECONDS = 10


@contextmanager
def connected(data: DataDir) -> Iterator[bool]:
    """Set up Django with the installation's database. Yields False if `up` is known not to be running.

    Raises:
        ServerError: there is no database, or it does not answer; the message says what to do.
    """
    with ExitStack() as stack:
        is_running = True
        url = configuration.secret("DATABASE_URL")
        if not url:
            url, is_running = private_database(data, stack)
            os.environ["DATABASE_URL"] = url
        _check(url)
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "fp8scope_dashboard.settings.base")
        os.environ.setdefault("FP8SCOPE_DATA_DIR", str(data.root))
        if not configuration.secret("FP8SCOPE_SECRET_KEY") and data.has_secret_key():
            os.environ["FP8SCOPE_SECRET_KEY"] = data.secret_key()
        django.setup()
        stack.callback(disconnect)
        yield is_running


def private_database(data: DataDir, stack: ExitStack) -> tuple[str, bool]:
    """The private database's URL, and whether `up` is running. If not, it runs until `stack` closes.

    Raises:
        ServerError: there is no database, or this user may not use it.
    """
    server = EmbeddedPostgres(data.root / "postgres")
    try:
        exists = server.server_dir.exists()
    except OSError as error:
        raise _unreadable(server.data_dir, error) from error
    if not exists:
        raise ServerError(
            f"{data.root} contains no database. Set the directory of `fp8scope up` with --data-dir, or set "
            "DATABASE_URL if the installation uses another PostgreSQL. `fp8scope up` creates an installation"
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
    """Fail at once; a connection pool fails only after several attempts."""
    try:
        psycopg.connect(url, connect_timeout=CONNECT_SECONDS).close()
    except psycopg.Error as error:
        # libpq's message contains host and user, but no password.
        reason = str(error).strip().partition("\n")[0]
        raise ServerError(
            f"the database does not answer: {reason}. If `fp8scope up` is starting, wait until it is ready"
        ) from error


def disconnect() -> None:
    """Close the connection pool of Django. Its threads would delay the exit by some seconds."""
    # Importing it needs settings, which `connected` sets up.
    from django.db import connection

    connection.close()
    getattr(connection, "close_pool")()  # noqa: B009 - missing from the stubs' base class
