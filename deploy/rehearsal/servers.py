"""The servers of Debian that the rehearsal runs: PostgreSQL, pgbouncer, Redis, and nginx with TLS."""

from __future__ import annotations

import grp
import os
import pwd
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from network import MACHINES, Network
from process_commands import documented_proxy
from processes import Keeper, Process

START_SECONDS = 60.0
PACKAGES = "apt-get install postgresql pgbouncer redis-server nginx iproute2 openssl gcc libc6-dev"
POSTGRES_SETTINGS = {
    "max_connections": "200",
    "shared_buffers": "64MB",
    "wal_level": "replica",
    "wal_keep_size": "64MB",
    "min_wal_size": "32MB",
    "max_wal_size": "64MB",
    "hot_standby": "on",
    # A sender or a standby that answers nothing is given up soon.
    "wal_sender_timeout": "10s",
    "wal_receiver_timeout": "10s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "15s",
}


class RehearsalError(RuntimeError):
    """A part of the rehearsal does not do what it must."""


class MissingServerError(RuntimeError):
    """A program of Debian is not installed."""


def program(name: str, *folders: str) -> str:
    """The path of a program. Raises MissingServerError with the packages to install."""
    path = shutil.which(name, path=os.pathsep.join([*folders, os.environ["PATH"], "/usr/sbin", "/sbin"]))
    if path is None:
        raise MissingServerError(f"{name} is missing. On Debian: {PACKAGES}")
    return path


def postgres_folder() -> Path:
    """The programs of the newest PostgreSQL of Debian's packages."""
    folders = Path("/usr/lib/postgresql").glob("*/bin")
    versions = sorted(folders, key=lambda folder: int(re.sub(r"\D", "", folder.parent.name) or 0))
    if not versions:
        raise MissingServerError(f"PostgreSQL is missing. On Debian: {PACKAGES}")
    return versions[-1]


def wait_for(condition: Callable[[], Any], what: str, seconds: float = START_SECONDS) -> float:
    """Wait until a condition holds; returns the seconds. Raises RehearsalError if it takes too long."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise RehearsalError(f"after {seconds:.0f} s still waiting: {what}")
        time.sleep(0.05)
    return time.monotonic() - began


@dataclass(frozen=True)
class Passwords:
    """The passwords of one rehearsal."""

    application: str
    replication: str
    redis: str


class Postgres:
    """A PostgreSQL of Debian on a machine of its own, primary or standby."""

    def __init__(
        self, network: Network, keeper: Keeper, machine: str, directory: Path, passwords: Passwords
    ) -> None:
        self.machine, self.address = machine, MACHINES[machine]
        self.directory, self.data = directory, directory / "data"
        self._network, self._passwords = network, passwords
        self._bin = postgres_folder()
        self._sockets = directory / "sockets"
        self._sockets.mkdir(parents=True, exist_ok=True)
        for path in (directory, self._sockets):
            shutil.chown(path, "postgres", "postgres")
        command = [str(self._bin / "postgres"), "-D", str(self.data)]
        log = directory.parent / f"{machine}.log"
        self.process = keeper.add(Process(network, machine, command, log, user="postgres"))

    @property
    def version(self) -> str:
        return self._bin.parent.name

    def create(self) -> None:
        """Make an empty cluster with the users of fp8scope and of replication, and the database."""
        self._run("initdb", "--pgdata", str(self.data), "--auth-host=scram-sha-256", "--auth-local=trust",
                  "--encoding=UTF8", "--locale=C.UTF-8", "--username=postgres")  # fmt: skip
        self._configure()
        with (self.data / "pg_hba.conf").open("a") as file:
            file.write("host all all 10.88.0.0/24 scram-sha-256\n")
            file.write("host replication replicator 10.88.0.0/24 scram-sha-256\n")
        self.start()
        self.execute(f"CREATE ROLE fp8scope LOGIN PASSWORD '{self._passwords.application}'")
        self.execute(f"CREATE ROLE replicator LOGIN REPLICATION PASSWORD '{self._passwords.replication}'")
        self.execute("CREATE DATABASE fp8scope OWNER fp8scope")

    def follow(self, primary: Postgres) -> None:
        """Become a fresh standby of a running primary."""
        for path in self.data.glob("*"):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        login = f"host={primary.address} user=replicator password={self._passwords.replication}"
        # The programs run on the standby's machine, as they would.
        self._run("pg_basebackup", "--pgdata", str(self.data), "--write-recovery-conf", "--checkpoint=fast",
                  "--dbname", f"{login} application_name={self.machine}")  # fmt: skip
        self._configure()
        self.start()

    def start(self) -> None:
        self.process.start()
        self.wait_ready()

    def wait_ready(self) -> None:
        wait_for(self.answers, f"PostgreSQL on {self.machine}")

    def answers(self) -> bool:
        try:
            self.fetch("SELECT 1")
        except psycopg.Error:
            return False
        return True

    def promote(self) -> None:
        self.execute("SELECT pg_promote()")

    def configure(self, name: str, value: str) -> None:
        """Change a setting while the server runs."""
        self.execute(f"ALTER SYSTEM SET {name} = '{value}'")
        self.execute("SELECT pg_reload_conf()")

    def execute(self, statement: str) -> None:
        with self._connect() as connection:
            connection.execute(statement.encode())

    def fetch(self, statement: str, database: str = "postgres") -> Any:
        """The first value of the first row, or None."""
        with self._connect(database) as connection:
            row = connection.execute(statement.encode()).fetchone()
            return row[0] if row else None

    def _connect(self, database: str = "postgres") -> psycopg.Connection[Any]:
        return psycopg.connect(
            host=str(self._sockets), user="postgres", dbname=database, autocommit=True, connect_timeout=5
        )

    def _configure(self) -> None:
        addresses = {"listen_addresses": self.address, "unix_socket_directories": str(self._sockets)}
        lines = [f"{name} = '{value}'\n" for name, value in {**POSTGRES_SETTINGS, **addresses}.items()]
        (self.data / "postgresql.auto.conf").touch()
        (self.data / "rehearsal.conf").write_text("".join(lines))
        main = self.data / "postgresql.conf"
        if "rehearsal.conf" not in main.read_text():
            with main.open("a") as file:
                file.write("include 'rehearsal.conf'\n")

    def _run(self, name: str, *arguments: str) -> None:
        account = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"]
        command = self._network.inside(self.machine, [*account, str(self._bin / name), *arguments])
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.directory, check=False)
        if done.returncode:
            raise RehearsalError(f"{name} failed: {done.stderr[-2000:]}")


class Pgbouncer:
    """pgbouncer with transaction pooling, on the machine of the application."""

    def __init__(self, network: Network, keeper: Keeper, directory: Path, passwords: Passwords) -> None:
        directory.mkdir()
        self._settings = directory / "pgbouncer.ini"
        users = directory / "users.txt"
        users.write_text(f'"fp8scope" "{passwords.application}"\n')
        self._users = users
        self.process = keeper.add(
            Process(
                network,
                "app",
                [program("pgbouncer"), str(self._settings)],
                directory.parent / "pgbouncer.log",
                user="postgres",
            )
        )

    def point_to(self, primary: str) -> None:
        """Write the settings; a running pgbouncer reads them again."""
        self._settings.write_text(f"""
[databases]
fp8scope = host={primary} port=5432 dbname=fp8scope
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = 6432
auth_type = scram-sha-256
auth_file = {self._users}
pool_mode = transaction
max_client_conn = 500
default_pool_size = 20
ignore_startup_parameters = options, extra_float_digits
server_connect_timeout = 5
server_login_retry = 1
tcp_keepalive = 1
tcp_keepidle = 10
tcp_keepintvl = 5
tcp_keepcnt = 3
tcp_user_timeout = 15000
""")
        for path in (self._settings.parent, self._settings, self._users):
            shutil.chown(path, "postgres", "postgres")

    def start(self) -> None:
        self.process.start()

    def reload(self) -> None:
        self.process.signal(signal.SIGHUP)


class Redis:
    """A Redis with an append-only file, on the machine of the application."""

    def __init__(self, network: Network, keeper: Keeper, directory: Path, password: str) -> None:
        directory.mkdir()
        settings = directory / "redis.conf"
        settings.write_text(
            f"bind 127.0.0.1\nport 6379\ndir {directory}\nrequirepass {password}\nappendonly yes\n"
            "maxmemory 256mb\nmaxmemory-policy noeviction\n"
        )
        self.url = f"redis://:{password}@127.0.0.1:6379/0"
        command = [program("redis-server"), str(settings)]
        self.process = keeper.add(Process(network, "app", command, directory.parent / "redis.log"))

    def start(self) -> None:
        self.process.start()


class Nginx:
    """nginx with the configuration of docs/operating.md, and a certificate of a new authority."""

    def __init__(self, network: Network, keeper: Keeper, directory: Path, servers: list[str]) -> None:
        directory.mkdir()
        self.authority = directory / "authority.pem"
        self.access_log = directory / "access.log"
        self.access_log.touch()
        self._certify(directory)
        described = documented_proxy()
        for number, server in enumerate(servers, 1):
            described = described.replace(f"web{number}:8000", server)
        described = described.replace(
            "listen 443 ssl;",
            f"listen 443 ssl;\n ssl_certificate {directory}/server.pem;\n"
            f" ssl_certificate_key {directory}/server.key;\n access_log {self.access_log} brief;",
        )
        user = pwd.getpwnam("www-data")
        settings = directory / "nginx.conf"
        settings.write_text(
            f"user {user.pw_name} {grp.getgrgid(user.pw_gid).gr_name};\ndaemon off;\nworker_processes 1;\n"
            f"pid {directory}/nginx.pid;\nerror_log {directory}/error.log;\n"
            "events { worker_connections 2000; }\nhttp {\n log_format brief '$status $request_method $uri';\n"
            f"{described}\n}}\n"
        )
        command = [program("nginx"), "-c", str(settings), "-p", str(directory)]
        self.process = keeper.add(Process(network, "app", command, directory.parent / "nginx.log"))

    def start(self) -> None:
        self.process.start()

    def _certify(self, directory: Path) -> None:
        """Make an authority for this rehearsal, and its certificate for the application's address."""
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        usage = [
            "-addext",
            f"subjectAltName=IP:{MACHINES['app']}",
            "-addext",
            "basicConstraints=critical,CA:FALSE",
        ]
        for arguments in (
            ["-x509", *key, "-subj", "/CN=fp8scope rehearsal", "-addext", "keyUsage=keyCertSign",
             "-keyout", "authority.key", "-out", "authority.pem"],
            ["-x509", *key, "-subj", f"/CN={MACHINES['app']}", *usage, "-CA", "authority.pem", "-CAkey",
             "authority.key", "-keyout", "server.key", "-out", "server.pem"],
        ):  # fmt: skip
            done = subprocess.run(
                [program("openssl"), "req", *arguments],
                cwd=directory,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise RehearsalError(f"openssl failed: {done.stderr[-500:]}")
