"""Migrate the database and collect the static files. The supervisor runs this before the web server serves.

    python -m fp8scope_dashboard.servers.prepare BASE_URL LINK_FD

Writes a one-time sign-in link to LINK_FD until an administrator has signed in. The link has a separate file
descriptor because standard output goes to a log, which must contain no secrets.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import django
from django.core.management import call_command
from django.db import connection

from fp8scope_dashboard.servers import collect

# An arbitrary constant: two servers that share a database must not migrate it at the same time.
MIGRATION_LOCK = 0xF85C09E


def main(base_url: str, link_fd: int) -> None:
    """Migrate, create a sign-in link if nobody has signed in, and collect the static files."""
    django.setup()
    # Models can be imported only once Django is set up.
    from fp8scope_dashboard.accounts.services import create_administrator_link

    with migration_lock():
        call_command("migrate", interactive=False, verbosity=1)
        link = create_administrator_link(base_url) or ""
    # The threads of Django's connection pool would delay the exit by some seconds.
    connection.close()
    getattr(connection, "close_pool")()  # noqa: B009 - missing from the stubs' base class
    with os.fdopen(link_fd, "w", encoding="utf-8") as stream:
        stream.write(link)
    collect.main()


@contextmanager
def migration_lock() -> Iterator[None]:
    """Hold the lock of migrations, for which other processes wait here.

    A transaction on a connection of its own holds it. Behind a pooler such as pgbouncer, a lock of the
    session would belong to whichever connection the pooler uses: others could take it too, and nobody might
    release it.
    """
    holder = connection.copy()
    holder.set_autocommit(False)
    try:
        with holder.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [MIGRATION_LOCK])
        yield
    finally:
        holder.rollback()
        holder.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
