"""Collect, hash and compress the static files. The supervisor begins with this while the database starts.

python -m fp8scope_dashboard.servers.collect
"""

from __future__ import annotations

import fcntl
import hashlib
import operator
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import django
from django.core.management import call_command


def main() -> None:
    """Collect the static files if one has changed since the last time. Of several processes, one does it."""
    from django.conf import settings
    from django.contrib.staticfiles.finders import get_finders

    digest = hashlib.sha256(repr((settings.STORAGES, django.VERSION)).encode())
    files = [file for finder in get_finders() for file in finder.list([])]
    for path, storage in sorted(files, key=operator.itemgetter(0)):
        digest.update(f"{path} {storage.size(path)} {storage.get_modified_time(path)}\n".encode())
    folder = Path(settings.STATIC_ROOT)
    stamp = folder / ".collected"
    with _alone_in(folder):
        if stamp.exists() and stamp.read_text() == digest.hexdigest():
            return
        call_command("collectstatic", interactive=False, clear=True, verbosity=0)
        stamp.write_text(digest.hexdigest())


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Lock the folder itself, because `clear` would remove a file for the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    django.setup()
    main()
