"""HTTP around the wire server, which misbehaves when asked to."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from agent.helpers.wire_messages import Refusal

if TYPE_CHECKING:
    from agent.helpers.wire_server import WireServer


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What to do instead of a proper answer.

    `status` (with `code` and `headers`) answers so without storing. `hang` never answers. `drop` closes the
    connection: before the message is stored, or `after`. `twice` sends the proper answer two times. `page`
    answers 200 with a page that is none of the API's.
    """

    status: int = 0
    code: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    hang: bool = False
    drop: bool = False
    after: bool = False
    twice: bool = False
    page: bool = False


Plan = Callable[[str, str], Fault | None]
"""Given the method and the path, the fault to have now."""


class WireHttp(ThreadingHTTPServer):
    """Knows its open connections: a server that stops must not go on answering on them."""

    daemon_threads = True
    allow_reuse_address = True
    wire: "WireServer"

    def __init__(self, *arguments: Any) -> None:
        self.connections: set[Any] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        for connection in list(self.connections):
            super().shutdown_request(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is part of the tests; anything else should not have been sent."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | ValueError):
            self.wire.problems.append(f"{type(error).__name__}: {error}")


class WireHandler(BaseHTTPRequestHandler):
    """Answers as the wire server does, unless a fault is planned."""

    protocol_version = "HTTP/1.1"
    server: WireHttp

    def _serve(self) -> None:
        wire = self.server.wire
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        where = urlsplit(self.path)
        with wire.lock:
            wire.requests.append((self.command, where.path))
            fault = wire.plan(self.command, where.path)
        if fault is not None and fault.hang:
            wire.released.wait(60)
            self.close_connection = True
            return
        if fault is not None and fault.drop and not fault.after:
            self.close_connection = True
            return
        if fault is not None and fault.page:
            self._reply(200, b"<html>Please sign in</html>", ())
            return
        if fault is not None and fault.status:
            error = {"error": {"code": fault.code, "message": "as planned", "hint": ""}}
            self._reply(fault.status, json.dumps(error if fault.code else {}).encode(), fault.headers)
            return
        status, answer = self._answer(where.path, where.query, body)
        if fault is not None and fault.drop:
            self.close_connection = True
            return
        content = json.dumps(answer).encode()
        self._reply(status, content, ())
        if fault is not None and fault.twice:
            # Late enough that the client has taken the first answer, and perhaps sent its next request.
            time.sleep(0.005)
            self._reply(status, content, ())

    def _answer(self, path: str, query: str, body: bytes) -> tuple[int, dict[str, Any]]:
        wire = self.server.wire
        try:
            if self.headers.get("Authorization") != f"Bearer {wire.token}":
                raise Refusal(401, "bad_token")
            with wire.lock:
                return wire.answer(self.command, path, query, self.headers.get("Content-Type", ""), body)
        except Refusal as refusal:
            return refusal.status, {"error": {"code": refusal.code, "message": str(refusal), "hint": ""}}

    def _reply(self, status: int, content: bytes, headers: tuple[tuple[str, str], ...]) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = _serve

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""
