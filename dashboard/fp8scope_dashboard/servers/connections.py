"""uvicorn's HTTP/1.1 protocol with limits on the number of connections and the time and size of headers.

uvicorn has none of these limits: it waits for headers forever, and accepts headers of any size and any
number of connections.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address, ip_network
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fp8scope_dashboard.accounts.addresses import address_group
from fp8scope_dashboard.edge import limits
from fp8scope_dashboard.edge.scope import CONNECTION


def allow_many_files() -> int:
    """Raise the limit of open files as far as needed. Returns how many connections it allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = limits.CONNECTIONS + limits.SPARE_FILES
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(limits.SPARE_FILES, min(limits.CONNECTIONS, soft - limits.SPARE_FILES))


PROXY = "trusted proxies"


class ConnectionRegistry:
    """Counts the connections of a process: all, the unauthenticated, and these by address.

    A connection is unauthenticated until it has carried an authenticated request.

    Args:
        most: the most connections in total.
        proxies: networks of trusted proxies. They carry the requests of many clients, so the limit per
            address does not apply to them.
    """

    def __init__(self, most: int = limits.CONNECTIONS, proxies: Sequence[str] = ()) -> None:
        self.most = most
        self.proxies = [ip_network(proxy) for proxy in proxies]
        self.total = 0
        self.unauthenticated = 0
        self.by_address: Counter[str] = Counter()

    def group(self, host: str | None) -> str:
        """The group under which connections from a host are counted."""
        try:
            is_proxy = any(ip_address(host or "") in network for network in self.proxies)
        except ValueError:
            is_proxy = False
        return PROXY if is_proxy else address_group(host)

    def has_room(self, address: str) -> bool:
        """Return whether one more unauthenticated connection from this group of addresses may be made."""
        return (
            self.total < self.most
            and self.unauthenticated < min(limits.UNAUTHENTICATED, self.most // 2)
            and (address == PROXY or self.by_address[address] < limits.UNAUTHENTICATED_PER_ADDRESS)
        )

    def enter(self, address: str) -> None:
        """Count a new, unauthenticated connection."""
        self.total += 1
        self.unauthenticated += 1
        self.by_address[address] += 1

    def prove(self, address: str) -> None:
        """Stop counting a connection as unauthenticated."""
        self.unauthenticated -= 1
        self.by_address[address] -= 1
        if self.by_address[address] <= 0:
            del self.by_address[address]

    def leave(self) -> None:
        """Stop counting a connection."""
        self.total -= 1


registry = ConnectionRegistry()


class BoundedProtocol(HttpToolsProtocol):
    """One connection. It counts as unauthenticated until `prove` is called for an authenticated request."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._address = ""
        # Whether the registry counts this connection, and whether as unauthenticated.
        self._is_counted = False
        self._is_unauthenticated = False
        self._header_timer: asyncio.TimerHandle | None = None
        self._stalled_timer: asyncio.TimerHandle | None = None
        # Bytes of the current message outside its body.
        self._overhead = 0

    def prove(self) -> None:
        """Called when a request is authenticated: the limits for unauthenticated clients no longer apply."""
        if self._is_unauthenticated:
            self._is_unauthenticated = False
            registry.prove(self._address)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = registry.group(self.client[0] if self.client else None)
        if not registry.has_room(self._address):
            self._refuse(
                503, "The server has too many connections. Try again in a moment.", "retry-after: 1\r\n"
            )
            return
        registry.enter(self._address)
        self._is_counted = self._is_unauthenticated = True
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_header_timer()
        self._cancel_stalled()
        if self._is_counted:
            self.prove()
            self._is_counted = False
            registry.leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        # Also between two requests, and for bytes that belong to none.
        if self._header_timer is None and self._is_idle:
            self._expect_headers()
        self._overhead += len(data)
        super().data_received(data)
        # Data that ends one message may begin the next, hence the additional length.
        if self._overhead > limits.HEADER_BYTES + len(data) and not self.transport.is_closing():
            self._refuse(431, "The headers of a request, or what surrounds its body, are too large.")

    def on_message_begin(self) -> None:
        self._overhead = 0
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        self._cancel_header_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        # A small chunk has about as many bytes of framing as of body. Only attackers send one-byte chunks.
        self._overhead = max(0, self._overhead - 2 * len(body))
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._overhead = 0

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cancel_stalled()
        self._stalled_timer = self.loop.call_later(limits.STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._cancel_stalled()
        super().resume_writing()

    @property
    def _is_idle(self) -> bool:
        """Return whether no request is in progress."""
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]

    def _expect_headers(self) -> None:
        self._header_timer = self.loop.call_later(limits.HEADER_SECONDS, self._on_header_timeout)

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        if self._overhead == 0:
            # Browsers open connections in advance; one without a byte is closed silently.
            self.transport.close()
            return
        self._refuse(408, f"The headers did not arrive within {limits.HEADER_SECONDS:g} seconds.")

    def _refuse(self, status: int, message: str, headers: str = "") -> None:
        reason = {408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}
        body = f"{message}\n"
        head = (
            f"HTTP/1.1 {status} {reason[status]}\r\n"
            f"content-type: text/plain\r\ncontent-length: {len(body)}\r\n"
            f"{headers}connection: close\r\n\r\n"
        )
        if not self.transport.is_closing():
            # Written during a response, this would become a part of it.
            if self._is_idle or not self.cycle.response_started:
                self.transport.write((head + body).encode())
            self.transport.close()

    def _cancel_stalled(self) -> None:
        if self._stalled_timer is not None:
            self._stalled_timer.cancel()
            self._stalled_timer = None
