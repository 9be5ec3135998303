"""A real HTTP server that gives prepared answers in turn, the last one again and again."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """An answer. `drops`: the connection is closed instead; `waits`: seconds before the answer."""

    status: int = 200
    body: object = None
    headers: tuple[tuple[str, str], ...] = ()
    kind: str = "application/json"
    drops: bool = False
    waits: float = 0.0

    @property
    def data(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


@dataclass
class AnswerServer:
    """The address of the server, and what it was asked: paths, headers and bodies."""

    url: str
    asked: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def answer_server(answers: Sequence[Prepared]) -> Iterator[AnswerServer]:
    """The server, running."""
    left, shown = list(answers), AnswerServer("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            shown.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.do_GET()

        def do_GET(self) -> None:
            shown.asked.append(self.path)
            shown.headers.append(dict(self.headers))
            answer = left.pop(0) if len(left) > 1 else left[0]
            time.sleep(answer.waits)
            if answer.drops:
                self.close_connection = True
                return
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.kind)
            self.send_header("Content-Length", str(len(answer.data)))
            for name, value in answer.headers:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.data)

        def log_message(self, *arguments: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    shown.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield shown
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
