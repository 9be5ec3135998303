"""What the embedded servers have in common: one directory, one lock, one socket, one child."""

from __future__ import annotations

import abc
import hashlib
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

from fp8scope_dashboard.servers import process
from fp8scope_dashboard.servers.process import Account, ServerError

# sun_path holds 108 bytes on Linux and 104 on macOS, the closing NUL included.
SOCKET_PATH_BYTES = 103
START_SECONDS = 60.0
STOP_SECONDS = 20.0


class EmbeddedServer(abc.ABC):
    """What the two servers share: one directory, one socket, one child.

    Args:
        data_dir: created where missing; one running server per directory.
        durable: False trades the data's safety for speed, for tests only.
        output: receives the server's log lines; by default the file `server.log` in `data_dir`.
    """

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
        self._held = ExitStack()

    def start(self) -> str:
        """Start and wait until it answers. Returns its URL.

        Raises:
            AlreadyRunningError: another process serves this directory.
            ServerError: it did not start; the message carries the end of its log where there is one.
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
        """Take the directory and make it ready for `spawn`. `stop` gives it back.

        Raises:
            AlreadyRunningError: another process serves this directory.
            ServerError: it cannot be made ready.
        """
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._held.enter_context(process.locked(self.data_dir))
        self.prepare()

    def stop(self) -> None:
        """Stop it and wait until it has gone. Nothing happens when it is not running."""
        if self.child is not None:
            process.stop(self.child, self.stop_signal, STOP_SECONDS)
            self.reap()
            self.child = None
            self.clear()
            if self.socket_dir != self.data_dir:
                shutil.rmtree(self.socket_dir, ignore_errors=True)
        self._held.close()

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start the child without waiting for it, after stopping what an earlier one left behind."""
        self.reap()
        self.clear()
        self._make_socket_dir()
        with ExitStack() as opened:
            output = self.output
            if output is None:
                output = opened.enter_context((self.data_dir / "server.log").open("ab"))
            self.child = process.spawn(
                self.command(),
                death_signal=self.stop_signal,
                output=output,
                account=self.account,
                cwd=self.server_dir,
                environment={"PATH": os.defpath, "LC_ALL": "C.UTF-8", "TZ": "UTC"},
            )
        return self.child

    def wait_ready(self, timeout: float) -> None:
        """Wait until the server answers, `timeout` seconds at most.

        Raises:
            ServerError: it ended, or did not answer in time.
        """
        deadline = time.monotonic() + timeout
        while not self.answers():
            if self.child is None or self.child.poll() is not None:
                raise ServerError(f"{self.programs[0]} ended while starting.{self._last_lines()}")
            if time.monotonic() > deadline:
                log = self._last_lines()
                raise ServerError(f"{self.programs[0]} did not answer in {timeout:.0f} s.{log}")
            time.sleep(0.02)

    def reap(self) -> list[int]:
        """Stop servers that still run in this directory. Returns their pids."""
        return process.reap(process.serves(self.server_dir, self.programs), self.stop_signal, STOP_SECONDS)

    @property
    def socket_dir(self) -> Path:
        """The data directory, or a short path of our own where a socket cannot be reached in that one."""
        fits = len(os.fsencode(self.data_dir / self.socket_name)) <= SOCKET_PATH_BYTES
        # libpq takes a comma in `host` for the end of a name, and has no way to quote it.
        if fits and "," not in str(self.data_dir):
            return self.data_dir
        digest = hashlib.sha256(os.fsencode(self.data_dir.resolve())).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"fp8scope-{self.programs[0]}-{digest}"

    def __enter__(self) -> str:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def server_dir(self) -> Path:
        """The child's working directory, by which `reap` knows it."""
        return self.data_dir

    @property
    @abc.abstractmethod
    def url(self) -> str:
        """Where to connect."""

    def prepare(self) -> None:  # noqa: B027 - most need nothing
        """Whatever must be in place before the child can start."""

    def clear(self) -> None:  # noqa: B027 - most leave nothing
        """Remove what a killed server leaves and a new one would stumble over."""

    @abc.abstractmethod
    def command(self) -> Sequence[str]:
        """The child's command line."""

    @abc.abstractmethod
    def answers(self) -> bool:
        """Whether the server accepts work now."""

    def _make_socket_dir(self) -> None:
        if self.socket_dir == self.data_dir:
            return
        owner = self.account.uid if self.account else os.geteuid()
        with suppress(FileExistsError):
            self.socket_dir.mkdir(mode=0o700)
            if self.account:
                os.chown(self.socket_dir, self.account.uid, self.account.gid)
        # Somebody else may have made it first: the temporary directory is everybody's.
        found = self.socket_dir.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != owner or found.st_mode & 0o077:
            raise ServerError(f"{self.socket_dir} is not a private directory of ours: remove it")

    def _last_lines(self) -> str:
        log = self.data_dir / "server.log"
        if self.output is not None or not log.exists():
            return ""
        return "\n" + "\n".join(log.read_text(errors="replace").splitlines()[-10:])
