"""A streaming replica of an embedded PostgreSQL, on the same machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from fp8scope_dashboard.servers import process
from fp8scope_dashboard.servers.embedded import DATABASE, EmbeddedPostgres, let_traverse
from fp8scope_dashboard.servers.embedded_base import START_SECONDS
from fp8scope_dashboard.servers.process import ServerError


def copy_of(primary: EmbeddedPostgres, directory: Path) -> EmbeddedPostgres:
    """Copy a running server into `directory` (made here); the copy, once started, follows it.

    Raises:
        ServerError: it could not be copied.
    """
    directory.mkdir(parents=True)
    if primary.account:
        let_traverse(directory)
        os.chown(directory, primary.account.uid, primary.account.gid)
    command = [
        str(primary.program("pg_basebackup")),
        "--host",
        str(primary.socket_dir),
        "--username",
        DATABASE,
    ]
    command += ["--pgdata", str(directory / "cluster"), "--write-recovery-conf", "--checkpoint=fast"]
    log = directory / "basebackup.log"
    with log.open("wb") as output:
        copying = process.spawn(
            command,
            death_signal=signal.SIGKILL,
            output=output,
            account=primary.account,
            cwd=directory,
            environment={"PATH": os.defpath, "LC_ALL": "C"},
        )
        failed = copying.wait(START_SECONDS) != 0
    if failed:
        raise ServerError(f"pg_basebackup failed: {log.read_text(errors='replace')[-2000:]}")
    return EmbeddedPostgres(directory, durable=primary.durable)
