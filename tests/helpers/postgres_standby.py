"""A streaming replica of an embedded PostgreSQL, to test replication on one machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from fp8scope_dashboard.embedded import processes
from fp8scope_dashboard.embedded.postgres import DATABASE, EmbeddedPostgres, allow_traversal
from fp8scope_dashboard.embedded.processes import ServerError
from fp8scope_dashboard.embedded.server import START_SECONDS


def standby_of(primary: EmbeddedPostgres, directory: Path) -> EmbeddedPostgres:
    """Copy a running server into the new `directory`. Once started, the copy follows the primary.

    Raises:
        ServerError: pg_basebackup failed.
    """
    directory.mkdir(parents=True)
    if primary.account:
        allow_traversal(directory)
        os.chown(directory, primary.account.uid, primary.account.gid)
    command = [str(primary.program("pg_basebackup"))]
    command += ["--host", str(primary.socket_dir), "--username", DATABASE]
    command += ["--pgdata", str(directory / "cluster"), "--write-recovery-conf", "--checkpoint=fast"]
    log = directory / "basebackup.log"
    with log.open("wb") as output:
        basebackup = processes.spawn(
            command,
            death_signal=signal.SIGKILL,
            output=output,
            account=primary.account,
            cwd=directory,
            environment={"PATH": os.defpath, "LC_ALL": "C"},
        )
        failed = basebackup.wait(START_SECONDS) != 0
    if failed:
        raise ServerError(f"pg_basebackup failed: {log.read_text(errors='replace')[-2000:]}")
    return EmbeddedPostgres(directory, durable=primary.durable)
