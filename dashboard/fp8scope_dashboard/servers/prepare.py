"""Migrate the database and collect the static files. The supervisor runs this before the web server serves.

    python -m fp8scope_dashboard.servers.prepare BASE_URL LINK_FD [AFTER_FD]

Writes a one-time sign-in link to LINK_FD until an administrator has signed in. The link has a separate file
descriptor because standard output goes to a log, which must contain no secrets. With AFTER_FD it does not use
the database until that gate of the supervisor is open.
"""

from __future__ import annotations

import hashlib
import operator
import os
import sys
from pathlib import Path

import django
from django.core.management import call_command
from django.db import connection

from fp8scope_dashboard.servers.children import wait_at_gate

# An arbitrary constant: two servers that share a database must not migrate it at the same time.
MIGRATION_LOCK = 0xF85C09E


def main(base_url: str, link_fd: int, after_fd: int | None = None) -> None:
    """Collect the static files, migrate, and create a sign-in link if nobody has signed in."""
    django.setup()
    # Models can be imported only once Django is set up.
    from fp8scope_dashboard.accounts.services import create_administrator_link

    # First, because this needs no database.
    collect_static()
    if after_fd is not None:
        wait_at_gate(after_fd)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(%s)", [MIGRATION_LOCK])
        call_command("migrate", interactive=False, verbosity=1)
        link = create_administrator_link(base_url) or ""
        cursor.execute("SELECT pg_advisory_unlock(%s)", [MIGRATION_LOCK])
    # The threads of Django's connection pool would delay the exit by some seconds.
    connection.close()
    getattr(connection, "close_pool")()  # noqa: B009 - missing from the stubs' base class
    with os.fdopen(link_fd, "w", encoding="utf-8") as stream:
        stream.write(link)


def collect_static() -> None:
    """Collect, hash and compress the static files if one has changed since the last time."""
    from django.conf import settings
    from django.contrib.staticfiles.finders import get_finders

    digest = hashlib.sha256(repr((settings.STORAGES, django.VERSION)).encode())
    files = [file for finder in get_finders() for file in finder.list([])]
    for path, storage in sorted(files, key=operator.itemgetter(0)):
        digest.update(f"{path} {storage.size(path)} {storage.get_modified_time(path)}\n".encode())
    stamp = Path(settings.STATIC_ROOT, ".collected")
    if stamp.exists() and stamp.read_text() == digest.hexdigest():
        return
    call_command("collectstatic", interactive=False, clear=True, verbosity=0)
    stamp.write_text(digest.hexdigest())


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:4]))
