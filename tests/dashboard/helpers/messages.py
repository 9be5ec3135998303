"""A message of one alert, and receivers of messages: real HTTP and SMTP servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session

from fp8scope_dashboard.alerts.channels import ChannelMessage, Notice

NOTICE = Notice(
    delivery=5,
    key="3f0d8a52-7f7f-4b0e-9d4b-0c0a6d2f6a11",
    alert="3f0d8a52-7f7f-4b0e-9d4b-0c0a6d2f6a11",
    reason="opened",
    event=7,
    kind="loss_not_finite",
    label="Loss not finite",
    severity="critical",
    state="open",
    message="Loss became NaN at step 118; before, it was 2.31.",
    onset_step=118,
    step=118,
    value=None,
    threshold=None,
    opened_at=datetime(2026, 1, 1, tzinfo=UTC),
    project="default",
    run="6b1f",
    run_name="gpt",
    url="http://localhost/p/default/runs/6b1f/",
)
MESSAGE = ChannelMessage(
    key=NOTICE.key, project="default", url="http://localhost/p/default/alerts/", notices=(NOTICE,)
)


@dataclass(kw_only=True)
class Receiver:
    """The requests that an HTTP server got, and the response that it gives.

    Attributes:
        statuses: the first responses; `status` follows.
        hang: if set, no response is sent until this event is set.
    """

    url: str = ""
    status: int = 200
    statuses: list[int] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    hang: threading.Event | None = None
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)


@contextmanager
def http_receiver() -> Iterator[Receiver]:
    """Serve a Receiver on a free port of this machine."""
    state = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            body = self.rfile.read(length)
            if len(body) < length:
                # The sender died.
                return
            state.requests.append((self.path, dict(self.headers), body))
            if state.hang is not None:
                state.hang.wait(30)
                return
            self.send_response(state.statuses.pop(0) if state.statuses else state.status)
            for name, value in state.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(state.body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/hook"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield state
    finally:
        if state.hang is not None:
            state.hang.set()
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class Mailbox:
    """The mails that an SMTP server got, with their recipients, and what it refuses."""

    port: int = 0
    mails: list[tuple[list[str], EmailMessage]] = field(default_factory=list)
    logins: list[tuple[str, str]] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    answer: str = "250 OK"

    async def handle_RCPT(
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if address in self.refused:
            return "550 no such person"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        if self.answer.startswith("2"):
            assert isinstance(envelope.content, bytes)
            mail = message_from_bytes(envelope.content, policy=policy.default)
            assert isinstance(mail, EmailMessage)
            self.mails.append((envelope.rcpt_tos, mail))
        return self.answer

    def check(self, server: SMTP, session: Session, envelope: Envelope, how: str, login: Any) -> AuthResult:
        """Accept the password `p@ss`."""
        assert isinstance(login, LoginPassword)
        self.logins.append((login.login.decode(), login.password.decode()))
        return AuthResult(success=login.password == b"p@ss", handled=False)


@contextmanager
def smtp_receiver(**options: Any) -> Iterator[Mailbox]:
    """Serve a Mailbox on a free port of this machine; `options` are those of aiosmtpd's SMTP."""
    mailbox = Mailbox()
    check: Callable[..., AuthResult] = mailbox.check
    # Port 0 would make aiosmtpd wait for a connection to port 0.
    login: dict[str, Any] = {"authenticator": check, "auth_require_tls": False}
    controller = Controller(mailbox, hostname="127.0.0.1", port=free_port(), **login, **options)
    controller.start()
    mailbox.port = controller.port
    try:
        yield mailbox
    finally:
        controller.stop()


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        return server.server_port
