"""Bring the database and the static files up to date; the supervisor runs this before it starts the rest.

    python -m fp8scope_dashboard.servers.prepare BASE_URL LINK_FD [AFTER_FD]

Writes a one-time sign-in link to LINK_FD as long as no administrator has ever signed in. A file descriptor of
its own, because standard output goes to a log, where no secret may be. With AFTER_FD it leaves the database
alone until that gate (servers/gate.py) is open.
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

from fp8scope_dashboard.servers import gate

# Any constant of ours: two servers that share a database must not migrate it at the same time.
MIGRATION_LOCK = 0xF85C09E


def main(base_url: str, link_fd: int, after_fd: int | None = None) -> None:
    """Collect the static files, migrate, and make sure that somebody can sign in."""
    django.setup()
    from fp8scope_dashboard.accounts.services import create_administrator_link

    # First, because it needs no database.
    collect_static()
    if after_fd is not None:
        gate.wait(after_fd)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(%s)", [MIGRATION_LOCK])
        call_command("migrate", interactive=False, verbosity=1)
        link = create_administrator_link(base_url) or ""
        cursor.execute("SELECT pg_advisory_unlock(%s)", [MIGRATION_LOCK])
    # Django keeps a pool, whose threads would hold up our exit for some seconds.
    connection.close()
    getattr(connection, "close_pool")()  # noqa: B009  (PostgreSQL's wrapper has it, the stubs' base has not)
    with os.fdopen(link_fd, "w", encoding="utf-8") as stream:
        stream.write(link)


def collect_static() -> None:
    """Collect, hash and compress the static files, unless none has changed since it was last done."""
    from django.conf import settings
    from django.contrib.staticfiles.finders import get_finders

    digest = hashlib.sha256(repr((settings.STORAGES, django.VERSION)).encode())
    found = [file for finder in get_finders() for file in finder.list([])]
    for path, storage in sorted(found, key=operator.itemgetter(0)):
        digest.update(f"{path} {storage.size(path)} {storage.get_modified_time(path)}\n".encode())
    stamp = Path(settings.STATIC_ROOT, ".collected")
    if stamp.exists() and stamp.read_text() == digest.hexdigest():
        return
    call_command("collectstatic", interactive=False, clear=True, verbosity=0)
    stamp.write_text(digest.hexdigest())


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:4]))
