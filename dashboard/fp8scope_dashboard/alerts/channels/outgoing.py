"""Restrict what sending a message may reach: public addresses, and networks that are allowed.

Channels send to addresses that a project's administrators enter, from inside the server's network. The check
is made when a socket connects, on the address that it connects to. So neither a host name, nor a name whose
address changes, nor a redirect, nor a library's own request can avoid it. Python's audit events make this
possible for all libraries; the hook acts only on threads inside `restricted`.
"""

from __future__ import annotations

import socket
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from os import fsdecode
from pathlib import Path
from typing import Any

from django.conf import settings

from fp8scope_dashboard.alerts.channels.base import DeliveryError

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

VARIABLE = "FP8SCOPE_CHANNEL_NETWORKS"
# IPv6 addresses that are translated to the IPv4 address in their last four bytes.
NAT64 = ip_network("64:ff9b::/96")
# In seconds. A receiver that answers without an end is cut off then: timeouts of libraries are for one byte.
DEADLINE = 40.0
_CONNECTS = ("socket.connect", "socket.sendto", "socket.sendmsg")
_PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty")


class OutgoingForbiddenError(Exception):
    """Sending tried what it must not do. Not an OSError, so that no library tries the next address."""


class _Restriction:
    def __init__(self, networks: Sequence[Network], *, files: bool) -> None:
        self.networks = networks
        self.files = files
        self.problem = ""
        self.connections: list[socket.socket] = []
        self.is_over = False

    def cut_off(self) -> None:
        """End all connections, from another thread."""
        self.is_over = True
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for connection in self.connections:
            connection.close()

    def refuse(self, problem: str) -> None:
        self.problem = problem
        raise OutgoingForbiddenError(problem)

    def check(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _CONNECTS:
            if (target := arguments[1]) is not None and not self._may_connect(target):
                self.refuse(
                    "The receiver has a private address. The administrator of this server can allow it: add "
                    f"its network to {VARIABLE}."
                )
            if event == "socket.connect":
                # Of its own, because TLS takes over the other one.
                self.connections.append(arguments[0].dup())
        elif event == "open" and not self.files:
            path, mode, flags = arguments
            if not _is_part_of_the_system(path, mode, flags):
                # Optional files such as ~/.netrc count as missing.
                raise PermissionError("A channel must not open files.")
        elif event in _PROGRAMS:
            self.refuse("A channel must not start programs.")

    def _may_connect(self, target: Any) -> bool:
        try:
            address = ip_address(target[0])
        except (TypeError, ValueError, IndexError):
            # A Unix socket, or a name that the system would resolve where this cannot see it.
            return False
        reached = {address, translated(address)}
        if any(target in network for target in reached for network in self.networks):
            return True
        return all(is_public(target) for target in reached)


class _CurrentRestriction(threading.local):
    restriction: _Restriction | None = None


_current = _CurrentRestriction()


@contextmanager
def restricted(*, files: bool = True) -> Iterator[None]:
    """Allow this thread to connect only to public addresses and CHANNEL_NETWORKS, and to start no program.

    Without `files` it may open only Python's and the system's own files, for reading. Its connections
    end after DEADLINE.

    Raises:
        DeliveryError: the block failed after it tried something else, which is permanent, or took too long.
    """
    _install_hook()
    networks = [ip_network(network) for network in settings.CHANNEL_NETWORKS]
    before, _current.restriction = _current.restriction, _Restriction(networks, files=files)
    restriction = _current.restriction
    watchdog = threading.Timer(DEADLINE, restriction.cut_off)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    except Exception:
        # Without the cause: libraries quote the address, which may be a secret.
        if restriction.problem:
            raise DeliveryError(restriction.problem, permanent=True) from None
        if restriction.is_over:
            raise DeliveryError(f"The receiver did not end its answer in {DEADLINE:g} s.") from None
        raise
    finally:
        watchdog.cancel()
        restriction.close()
        _current.restriction = before


@contextmanager
def unrestricted() -> Iterator[None]:
    """Inside `restricted`: allow every address, for a server that this installation's administrator set."""
    before, _current.restriction = _current.restriction, None
    try:
        yield
    finally:
        _current.restriction = before


def is_public(address: Address) -> bool:
    """Return whether an address is on the internet.

    Not loopback, private, link-local, multicast or reserved.
    """
    return address.is_global and not address.is_multicast


def translated(address: Address) -> Address:
    """The IPv4 address inside an IPv6 address (mapped, 6to4, NAT64); else the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address in NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


@cache
def _install_hook() -> None:
    # An audit hook cannot be removed.
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    restriction = _current.restriction
    if restriction is not None:
        restriction.check(event, arguments)


def _is_part_of_the_system(path: Any, mode: str | None, flags: int) -> bool:
    if isinstance(path, int):
        return True
    if (mode is not None and set(mode) & set("wax+")) or flags & 0b11:
        return False
    resolved = Path(fsdecode(path)).resolve()
    return any(resolved.is_relative_to(folder) for folder in _system_folders())


@cache
def _system_folders() -> tuple[Path, ...]:
    folders = {*sysconfig.get_paths().values(), *sys.path, sys.prefix, sys.base_prefix, "/etc/ssl"}
    files = ("/etc/resolv.conf", "/etc/hosts", "/etc/mime.types", "/etc/localtime", "/usr/share/zoneinfo")
    return tuple(
        Path(folder).resolve() for folder in (*sorted(filter(None, folders)), *files, "/dev/urandom")
    )
