"""The data directory, the listening socket, and the environment of the child processes."""

from __future__ import annotations

import os
import secrets
import socket
import unicodedata
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from django.core.exceptions import ImproperlyConfigured

from fp8scope_dashboard.embedded.processes import ServerError
from fp8scope_dashboard.settings.secret_files import secret_from_environment

BACKLOG = 1024
WILDCARDS = ("", "0.0.0.0", "::")
SECRET_FILES = ("DATABASE_URL_FILE", "REDIS_URL_FILE", "FP8SCOPE_SECRET_KEY_FILE")
LOOPBACKS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class DataDir:
    """The folder with all files of an installation: databases, logs, static files, the secret key."""

    root: Path

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def run(self) -> Path:
        """The children's working directory, by which a later start identifies those that were left behind."""
        return self.root / "run"

    def make(self) -> None:
        """Create the folders that are missing.

        Raises:
            ServerError: a folder cannot be created or written to, or the servers do not support its name.
        """
        if any(unicodedata.category(character) in ("Cc", "Cs") for character in str(self.root)):
            raise ServerError(
                f"cannot use the data directory {str(self.root)!r}: its name contains control characters "
                "or is not UTF-8. Choose another with --data-dir"
            )
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for private in (self.logs, self.run):
                private.mkdir(mode=0o700, exist_ok=True)
            (self.run / ".writable").touch()
        except OSError as error:
            raise ServerError(
                f"cannot use the data directory {self.root}: {error.strerror}. Choose another with --data-dir"
            ) from error

    def has_secret_key(self) -> bool:
        """Return whether a former start created the key."""
        return (self.root / "secret_key").exists()

    def secret_key(self) -> str:
        """The key that signs sessions and links and encrypts the settings of alert channels.

        It is created at the first start.
        """
        path = self.root / "secret_key"
        if not path.exists():
            # Written to another file and renamed, so that a kill leaves no incomplete key.
            draft = path.with_suffix(".new")
            draft.unlink(missing_ok=True)
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
                stream.write(secrets.token_urlsafe(64))
                stream.flush()
                os.fsync(stream.fileno())
            draft.rename(path)
        key = path.read_text().strip()
        if len(key) < 50:
            raise ServerError(
                f"{path} does not contain a key: restore it from a backup, or remove it to get a new one "
                "(everybody must sign in again, and the settings of alert channels must be entered again)"
            )
        return key

    def save_address(self, address: str) -> None:
        """Save the server's address, for `fp8scope admin`."""
        (self.root / "address").write_text(f"{address}\n", encoding="utf-8")

    def address(self) -> str | None:
        """The address at which the server runs or last ran; None if it never ran."""
        with suppress(OSError, UnicodeDecodeError):
            return (self.root / "address").read_text(encoding="utf-8").strip() or None
        return None


def default_data_dir() -> Path:
    """FP8SCOPE_DATA_DIR, else ~/.fp8scope, without expanding `~`."""
    return Path(os.environ.get("FP8SCOPE_DATA_DIR") or "~/.fp8scope")


def listen(host: str, port: int) -> socket.socket:
    """Open the web server's socket; port 0 chooses a free port.

    Raises:
        ServerError: the address is in use, not of this machine, not permitted or not an address.
    """
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family = addresses[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ServerError(
            f"cannot listen on {host or '*'} port {port}: {reason}.{_listener_on(port)} "
            "Choose another with --port"
        ) from error


def _listener_on(port: int) -> str:
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("inet"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,)
            if listens and connection.pid:
                return f" Process {connection.pid} ({psutil.Process(connection.pid).name()}) listens there."
    return ""


def base_url(host: str, port: int) -> str:
    """The address for browsers: FP8SCOPE_BASE_URL if set, else plain HTTP on `host`."""
    name = "localhost" if host in WILDCARDS else f"[{host}]" if ":" in host else host
    return os.environ.get("FP8SCOPE_BASE_URL") or f"http://{name}:{port}"


def allowed_hosts(host: str) -> list[str]:
    """The host names that requests may use; with a wildcard address, all names of this machine."""
    names = {"localhost", "127.0.0.1", "[::1]"}
    if host in WILDCARDS:
        names |= {socket.gethostname(), socket.getfqdn()}
        for addresses in psutil.net_if_addrs().values():
            for address in addresses:
                if address.family == socket.AF_INET:
                    names.add(address.address)
                elif address.family == socket.AF_INET6:
                    names.add(f"[{address.address.partition('%')[0]}]")
    else:
        names.add(f"[{host}]" if ":" in host else host)
    extra = os.environ.get("FP8SCOPE_ALLOWED_HOSTS", "").split(",")
    return sorted(names | set(filter(None, extra)))


def _channel_networks(host: str) -> str:
    """Private networks for alert channels: FP8SCOPE_CHANNEL_NETWORKS if set, else perhaps this machine.

    A server that only this machine can reach, without a proxy, is used by people who can connect to its ports
    anyway. Then a channel may, too, e.g. for a receiver on a laptop.
    """
    if (networks := os.environ.get("FP8SCOPE_CHANNEL_NETWORKS")) is not None:
        return networks
    is_alone = host in LOOPBACKS and not os.environ.get("FP8SCOPE_BASE_URL")
    return "127.0.0.0/8,::1" if is_alone else ""


def secret(variable: str) -> str:
    """The secret in a variable, or in the file that `variable`_FILE names; empty without both.

    Raises:
        ServerError: both are set, or the file cannot be read.
    """
    try:
        return secret_from_environment(variable)
    except ImproperlyConfigured as error:
        raise ServerError(str(error)) from None


def child_environment(
    data: DataDir, address: str, host: str, database_url: str, redis_url: str
) -> dict[str, str]:
    """This process's environment with the settings that all children of the installation share."""
    return {
        # These are resolved here: children must not find both forms.
        **{name: value for name, value in os.environ.items() if name not in SECRET_FILES},
        "DJANGO_SETTINGS_MODULE": "fp8scope_dashboard.settings.base",
        "DATABASE_URL": database_url,
        "REDIS_URL": redis_url,
        "FP8SCOPE_DATA_DIR": str(data.root),
        "FP8SCOPE_BASE_URL": address,
        "FP8SCOPE_ALLOWED_HOSTS": ",".join(allowed_hosts(host)),
        "FP8SCOPE_SECRET_KEY": secret("FP8SCOPE_SECRET_KEY") or data.secret_key(),
        "FP8SCOPE_CHANNEL_NETWORKS": _channel_networks(host),
        "PYTHONUNBUFFERED": "1",
        # Python must not look for modules in the children's working directory.
        "PYTHONSAFEPATH": "1",
    }
