"""Hostile clients: floods of sign-ins, slow connections and large uploads."""

from __future__ import annotations

import http.client
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlencode, urlsplit

CSRF = "a" * 32
FORM = {
    "Cookie": f"csrftoken={CSRF}",
    "X-CSRFToken": CSRF,
    "Content-Type": "application/x-www-form-urlencoded",
}


def connect(url: str, timeout: float = 120.0) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(str(urlsplit(url).hostname), urlsplit(url).port, timeout=timeout)


def sign_in(url: str, name: str, password: str = "wrong", headers: dict[str, str] | None = None) -> int:
    """The status of an attempt to sign in; 0 without a response."""
    connection = connect(url)
    try:
        body = urlencode({"username": name, "password": password})
        connection.request("POST", "/signin/", body, {**FORM, **(headers or {})})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


@contextmanager
def sign_in_flood(url: str, connections: int) -> Iterator[Counter[int]]:
    """Post sign-ins with new names over several connections. Yields the counts of response statuses."""
    statuses: Counter[int] = Counter()
    over = threading.Event()

    def attack(number: int) -> None:
        attempt = 0
        while not over.is_set():
            attempt += 1
            statuses[sign_in(url, f"name-{number}-{attempt}")] += 1

    threads = [threading.Thread(target=attack, args=(i,), daemon=True) for i in range(connections)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        over.set()
        for thread in threads:
            thread.join(90)


def raw(url: str, start: bytes) -> socket.socket:
    """A connection on which only `start` was sent."""
    connection = socket.create_connection((str(urlsplit(url).hostname), int(urlsplit(url).port or 80)), 60)
    connection.sendall(start)
    return connection


def upload(url: str, path: str, size: int, headers: str = "") -> tuple[int, bytes]:
    """Declare a body of `size` bytes and send it until there is a response. Returns the sent bytes and it."""
    start = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {size}\r\n{headers}\r\n"
    sent, piece = 0, bytes(65536)
    with raw(url, start.encode()) as connection:
        connection.settimeout(0.05)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with suppress(TimeoutError):
                try:
                    if answer := connection.recv(65536):
                        return sent, answer + rest(connection)
                except ConnectionError:
                    break
            if sent < size - 1000:
                with suppress(OSError):
                    sent += connection.send(piece)
    return sent, b""


def rest(connection: socket.socket) -> bytes:
    """All bytes until the server closes the connection."""
    connection.settimeout(10)
    received = b""
    with suppress(ConnectionError):
        while piece := connection.recv(65536):
            received += piece
    return received


def temporary_bytes(pid: int) -> int:
    """Bytes in the deleted temporary files that a process holds open."""
    size = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if os.readlink(entry).endswith("(deleted)"):
                size += entry.stat().st_size
    return size
