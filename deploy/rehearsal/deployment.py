"""A deployment of fp8scope over several machines, from Debian's servers and the commands of Compose."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg
from clock import Clock
from network import MACHINES, Network
from process_commands import WEB_HOSTS, command, processes
from processes import Keeper, Process
from servers import Nginx, Passwords, Pgbouncer, Postgres, Redis, RehearsalError, wait_for

DISK_BYTES = 700 << 20
PREPARE_SECONDS = 300.0
URL = f"https://{MACHINES['app']}"
# All writes go through pgbouncer to the primary. Charts go to the server that is a standby at the moment.
DATABASE = "postgresql://fp8scope:{password}@127.0.0.1:6432/fp8scope"
SERVERS = "postgresql://fp8scope:{password}@{hosts}/fp8scope?target_session_attrs={role}"

NEW_TOKEN = """
import django; django.setup()
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.accounts.tokens import create_token
project = Project.objects.get(slug="default")
print(create_token(project, "rehearsal", scopes=("write", "read"))[1])
"""


class Deployment:
    """All machines and processes, as a context manager that stops and removes them."""

    def __init__(self, directory: Path, *, is_pooled: bool = True) -> None:
        """With `is_pooled` False there is no pgbouncer: libpq finds the primary among both servers."""
        self.directory = directory
        self.is_pooled = is_pooled
        self.network = Network()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._enter()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _enter(self) -> None:
        # The users of the servers pass through to their own folders, and see nothing else.
        self.directory.chmod(0o711)
        self._stack.enter_context(self.network)
        keeper = Keeper()
        self._stack.callback(keeper.close)
        passwords = Passwords(*(secrets.token_hex(16) for _ in range(3)))
        servers = []
        for machine in ("primary", "standby"):
            disk = self.directory / machine
            disk.mkdir()
            _mount(disk)
            self._stack.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=False)
            servers.append(Postgres(self.network, keeper, machine, disk, passwords))
        self.primary, self.standby = servers
        # The callbacks run in the opposite order: nothing may use the disks any more.
        self._stack.callback(keeper.close)
        self.clock = Clock(self.directory)
        self.redis = Redis(self.network, keeper, self.directory / "redis", passwords.redis)
        self.pooler = Pgbouncer(self.network, keeper, self.directory / "pgbouncer", passwords)
        self.proxy = Nginx(
            self.network, keeper, self.directory / "nginx", [f"{host}:8000" for host in WEB_HOSTS]
        )
        self.environment = self._environment(passwords)
        self._make_processes(keeper)

    def _environment(self, passwords: Passwords) -> dict[str, str]:
        hosts = ",".join((MACHINES["primary"], MACHINES["standby"]))
        login = {"password": passwords.application, "hosts": hosts}
        primary = DATABASE if self.is_pooled else SERVERS
        return {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "DJANGO_SETTINGS_MODULE": "fp8scope_dashboard.settings.base",
            "DATABASE_URL": primary.format(role="read-write", **login),
            "FP8SCOPE_REPLICA_URL": SERVERS.format(role="standby", **login),
            "REDIS_URL": self.redis.url,
            "FP8SCOPE_SECRET_KEY": secrets.token_hex(48),
            "FP8SCOPE_BASE_URL": URL,
            "FP8SCOPE_TRUSTED_PROXIES": "127.0.0.1",
            "FP8SCOPE_DATA_DIR": str(self.directory / "data"),
            "OMP_NUM_THREADS": "1",
        }

    def _make_processes(self, keeper: Keeper) -> None:
        (self.directory / "data").mkdir()
        made: dict[str, Process] = {}
        for name, words in processes(self.directory).items():
            log = self.directory / f"{name}.log"
            made[name] = Process(self.network, "app", words, log, environment=self.environment)
            keeper.add(made[name])
        self.webs = [made[name] for name in made if name.startswith("web")]
        self.workers = [made[name] for name in made if name.startswith("worker")]
        self.alerts, self.beat = made["alerts"], made["beat"]

    def start(self) -> float:
        """Start everything, empty. Returns the seconds until the last web process was healthy."""
        began = time.monotonic()
        self.redis.start()
        self.primary.create()
        self.standby.follow(self.primary)
        self.pooler.point_to(self.primary.address)
        if self.is_pooled:
            self.pooler.start()
        self.prepare()
        for process in (*self.webs, *self.workers, self.alerts, self.beat):
            process.start()
        self.proxy.start()
        for host in WEB_HOSTS:
            self.wait_healthy(host)
        return time.monotonic() - began

    def prepare(self) -> None:
        """Migrate and collect static files, on two machines at once, as systemd does on each."""
        preparations = [
            subprocess.Popen(
                self.network.inside("app", command("prepare")),
                env={**self.environment, "FP8SCOPE_DATA_DIR": str(folder)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for folder in (self.directory / "data", self.directory / "other-data")
        ]
        for preparation in preparations:
            _, errors = preparation.communicate(timeout=PREPARE_SECONDS)
            if preparation.returncode:
                raise RehearsalError(f"preparing failed: {errors[-2000:]}")

    def is_healthy(self, host: str) -> bool:
        words = [sys.executable, "-m", "fp8scope_dashboard.servers.health", "--host", host]
        return not subprocess.run(
            self.network.inside("app", words), capture_output=True, check=False
        ).returncode

    def wait_healthy(self, host: str) -> float:
        return wait_for(lambda: self.is_healthy(host), f"the web process on {host}", 120)

    def python(self, script: str, *arguments: str) -> str:
        """Run a script with the environment of the servers; returns its output."""
        done = subprocess.run(
            self.network.inside("app", [sys.executable, "-c", script, *arguments]),
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RehearsalError(f"a script failed: {done.stderr[-2000:]}")
        return done.stdout.strip()

    def fail_over(self) -> None:
        """Promote the standby and point pgbouncer to it, as a failover manager or a person does."""
        self.primary, self.standby = self.standby, self.primary
        self.primary.promote()
        wait_for(lambda: self.primary.fetch("SELECT NOT pg_is_in_recovery()"), "the promotion")
        self.pooler.point_to(self.primary.address)
        if self.is_pooled:
            self.pooler.reload()

    def rejoin(self) -> None:
        """Make the other server a fresh standby of the primary."""
        self.standby.follow(self.primary)
        wait_for(self.is_replicated, "the standby follows")

    def is_replicated(self) -> bool:
        """Return whether the standby has everything that the primary has written."""
        written = self.primary.fetch("SELECT pg_current_wal_flush_lsn()::text")
        try:
            return bool(self.standby.fetch(f"SELECT pg_last_wal_replay_lsn() >= '{written}'::pg_lsn"))
        except psycopg.Error:
            return False


def _mount(folder: Path) -> None:
    """A small disk."""
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0755", "tmpfs", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RehearsalError(f"a small disk cannot be mounted: {done.stderr.strip()}")
