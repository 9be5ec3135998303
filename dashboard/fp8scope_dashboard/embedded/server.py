"""The base class of the embedded servers: one directory, one lock, one Unix socket, one child process."""

from __future__ import annotations

import abc
import hashlib
import logging
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, ClassVar

from fp8scope_dashboard.embedded import processes
from fp8scope_dashboard.embedded.processes import Account, ServerError

# sun_path holds 108 bytes on Linux and 104 on macOS, including the terminating NUL.
SOCKET_PATH_BYTES = 103
START_SECONDS = 60.0
STOP_SECONDS = 20.0

logger = logging.getLogger(__name__)


class EmbeddedServer(abc.ABC):
    """A server that runs in the foreground as a child of this process.

    It listens on a Unix socket only, which file permissions protect (mode 0700), so it needs no port and no
    password. The kernel stops it when its parent dies; a later start on the same directory stops any process
    that is still running.

    Args:
        data_dir: created if missing; one running server per directory.
        durable: False trades durability for speed, for tests only.
        output: receives the server's log lines; by default the file `server.log` in `data_dir`.
    """

    name: ClassVar[str]
    programs: ClassVar[tuple[str, ...]]
    stop_signal: ClassVar[signal.Signals]
    socket_name: ClassVar[str]

    def __init__(
        self, data_dir: Path, *, durable: bool = True, output: int | IO[bytes] | None = None
    ) -> None:
        self.data_dir = Path(data_dir).absolute()
        self.durable = durable
        self.output = output
        self.child: subprocess.Popen[bytes] | None = None
        self.account: Account | None = None
        self._lock = ExitStack()

    def start(self) -> str:
        """Start the server, wait until it accepts connections, and return its URL.

        Raises:
            AlreadyRunningError: another process uses this directory.
            ServerError: the server did not start; the message contains the end of its log if there is one.
        """
        try:
            self.open()
            self.spawn()
            self.wait_ready(START_SECONDS)
        except BaseException:
            self.stop()
            raise
        return self.url

    def open(self) -> None:
        """Lock the directory and prepare it for `spawn`. `stop` releases the lock.

        Raises:
            AlreadyRunningError: another process uses this directory.
            ServerError: the directory cannot be prepared.
        """
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._lock.enter_context(processes.locked(self.data_dir))
        self.prepare()

    def stop(self) -> None:
        """Stop the server and wait until it has ended. Does nothing if it is not running."""
        if self.child is not None:
            processes.stop(self.child, self.stop_signal, STOP_SECONDS)
            self.reap()
            self.child = None
            self.remove_stale_files()
            if self.socket_dir != self.data_dir:
                shutil.rmtree(self.socket_dir, ignore_errors=True)
        self._lock.close()

    def spawn(self) -> subprocess.Popen[bytes]:
        """Stop what an earlier start left behind, then start the child without waiting for it."""
        self.reap()
        self.remove_stale_files()
        self._make_socket_dir()
        with ExitStack() as opened:
            output = self.output
            if output is None:
                output = opened.enter_context((self.data_dir / "server.log").open("ab"))
            self.child = processes.spawn(
                self.command(),
                death_signal=self.stop_signal,
                output=output,
                account=self.account,
                cwd=self.server_dir,
                environment={"PATH": os.defpath, "LC_ALL": "C.UTF-8", "TZ": "UTC"},
            )
        return self.child

    def wait_ready(self, timeout: float) -> None:
        """Wait up to `timeout` seconds until the server accepts connections.

        Raises:
            ServerError: the server ended, or did not answer in time.
        """
        deadline = time.monotonic() + timeout
        while not self.is_ready():
            if self.child is not None and (self.child.poll() or 0) > 0 and (said := self.recover()):
                logger.warning(said)
                self.spawn()
                continue
            if self.child is None or self.child.poll() is not None:
                raise ServerError(f"{self.name} ended while starting.{self._log_tail()}")
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name} did not answer in {timeout:.0f} s.{self._log_tail()}")
            time.sleep(0.02)

    def recover(self) -> str:
        """Make another start possible after the child ended with an error while it was starting.

        Returns what was done, as a sentence, or "" if nothing can be done.
        """
        return ""

    def reap(self) -> list[int]:
        """Stop servers that still run in this directory. Returns their pids."""
        matches = processes.runs_in(self.server_dir, self.programs)
        return processes.reap(matches, self.stop_signal, STOP_SECONDS)

    @property
    def socket_dir(self) -> Path:
        """The data directory, or a short private path if clients cannot address a socket there."""
        fits = len(os.fsencode(self.data_dir / self.socket_name)) <= SOCKET_PATH_BYTES
        # libpq reads a comma in `host` as a separator and cannot escape it.
        if fits and "," not in str(self.data_dir):
            return self.data_dir
        digest = hashlib.sha256(os.fsencode(self.data_dir.resolve())).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"fp8scope-{self.name}-{digest}"

    def __enter__(self) -> str:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def server_dir(self) -> Path:
        """The child's working directory, by which `reap` identifies it."""
        return self.data_dir

    @property
    @abc.abstractmethod
    def url(self) -> str:
        """The URL for clients."""

    @abc.abstractmethod
    def prepare(self) -> None:
        """Create what the child needs before it can start."""

    def remove_stale_files(self) -> None:  # noqa: B027 - Redis leaves none
        """Remove files of a killed server that would stop a new one from starting."""

    @abc.abstractmethod
    def command(self) -> Sequence[str]:
        """The child's command line."""

    @abc.abstractmethod
    def is_ready(self) -> bool:
        """Return whether the server accepts work now."""

    def _make_socket_dir(self) -> None:
        if self.socket_dir == self.data_dir:
            return
        owner = self.account.uid if self.account else os.geteuid()
        with suppress(FileExistsError):
            self.socket_dir.mkdir(mode=0o700)
            if self.account:
                os.chown(self.socket_dir, self.account.uid, self.account.gid)
        # Another user may have created it first: the temporary directory is shared.
        status = self.socket_dir.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != owner or status.st_mode & 0o077:
            raise ServerError(f"{self.socket_dir} is not a private directory of this user: remove it")

    def _log_tail(self) -> str:
        log = self.data_dir / "server.log"
        if self.output is not None or not log.exists():
            return ""
        return "\n" + "\n".join(log.read_text(errors="replace").splitlines()[-10:])
