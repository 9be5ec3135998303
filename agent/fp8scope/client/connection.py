"""Requests to a server: those that read are repeated while it is away or busy, those that write are not."""

import json
import time
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlencode

import urllib3

from fp8scope.config import Settings
from fp8scope.delivery.transport import Backoff, NextAction, SendOutcome, classify, reason_of

MAX_BYTES: Final = 256 << 20
"""A larger answer is refused: ask for a part of it."""
PATIENCE: Final = 30.0
"""Seconds for which a request is repeated."""
ANY: Final = "*"
ARROW: Final = "application/vnd.apache.arrow.stream"
AGAIN: Final = (NextAction.RETRY, NextAction.WAIT)
Query = Mapping[str, object]


class ClientError(RuntimeError):
    """The server refuses a request, or its answer cannot be used; the message says what to do.

    Attributes:
        status: the HTTP status; 0 without an answer.
        code: the code of docs/wire.md; empty if the answer is not from fp8scope.
    """

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    @property
    def is_about_the_question(self) -> bool:
        """True if the server does not know what is asked for, or refuses it: asking again is no use."""
        return self.status == 422 or self.code in ("unknown_name", "not_recorded")


class UnreachableError(ClientError):
    """The server did not answer within the patience of the client."""


class RunNotFoundError(ClientError, LookupError):
    """The project has no such run."""


class Connection:
    """Asks one server with one token; safe to use from several threads."""

    def __init__(self, settings: Settings, patience: float = PATIENCE) -> None:
        self.url = settings.url
        self.patience = patience
        self._settings = settings
        self._headers = {"Authorization": f"Bearer {settings.token}", "User-Agent": "fp8scope-client"}
        self._pool = urllib3.PoolManager(
            num_pools=2,
            maxsize=8,
            retries=False,
            timeout=urllib3.Timeout(connect=settings.connect_timeout, read=settings.read_timeout),
        )

    def json(self, path: str, query: Query | None = None, *, patience: float | None = None) -> dict[str, Any]:
        """Return the JSON object at `path` below /api/v1.

        Raises:
            UnreachableError: no answer within the patience.
            RunNotFoundError: the project has no such run.
            ClientError: any other refusal.
        """
        outcome, _ = self._ask(path, query, "application/json", patience)
        return dict(outcome.answer)

    def arrow(self, path: str, query: Query) -> bytes:
        """Return the Arrow stream at `path`; as `json`."""
        return self._ask(path, {**query, "format": "arrow"}, ARROW, None)[1]

    def text(self, path: str, query: Query, kind: str = "") -> str:
        """Return the text of a kind at `path`, by default CSV or SVG; as `json`."""
        return self._ask(path, query, kind, None)[1].decode()

    def content(self, path: str) -> bytes:
        """Return a content of any kind at `path`; as `json`."""
        return self._ask(path, None, ANY, None)[1]

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a JSON object to `path` below /api/v1, once; returns the answer.

        Raises:
            UnreachableError: no answer. The server may have stored the request all the same: look first.
            ClientError: the server refuses it; the message says why.
        """
        headers = {**self._headers, "Content-Type": "application/json"}
        outcome = self._sent("POST", f"{self.url}/api/v1{path}", "application/json", headers, body)[0]
        if outcome.action is NextAction.DONE:
            return dict(outcome.answer)
        error = _error_of(self.url, outcome)
        if outcome.status == 0:
            # Sent again, it might be carried out twice.
            raise UnreachableError(
                f"{error}; it may have been stored all the same, so look before you repeat it"
            )
        raise error

    def close(self) -> None:
        """Close the connections."""
        self._pool.clear()

    def _ask(
        self, path: str, query: Query | None, kind: str, patience: float | None
    ) -> tuple[SendOutcome, bytes]:
        """Ask until there is an answer, for `patience` seconds."""
        deadline = time.monotonic() + (self.patience if patience is None else patience)
        backoff = Backoff(self._settings.backoff_base, self._settings.backoff_cap)
        while True:
            outcome, body = self._request(path, query, kind)
            if outcome.action is NextAction.DONE:
                return outcome, body
            wait = backoff.next() if outcome.wait is None else outcome.wait
            if outcome.action not in AGAIN or time.monotonic() + wait > deadline:
                raise _error_of(self.url, outcome)
            time.sleep(wait)

    def _request(self, path: str, query: Query | None, kind: str) -> tuple[SendOutcome, bytes]:
        chosen = {name: value for name, value in (query or {}).items() if value is not None}
        address = f"{self.url}/api/v1{path}" + (f"?{urlencode(chosen, doseq=True)}" if chosen else "")
        return self._sent("GET", address, kind, self._headers)

    def _sent(
        self,
        method: str,
        address: str,
        kind: str,
        headers: Mapping[str, str],
        document: Mapping[str, Any] | None = None,
    ) -> tuple[SendOutcome, bytes]:
        """Send one request, with a document as JSON."""
        sent = None if document is None else json.dumps(document).encode()
        try:
            response = self._pool.request(
                method, address, body=sent, headers=headers, redirect=False, preload_content=False
            )
            body = response.read(MAX_BYTES + 1, decode_content=True)
            if len(body) > MAX_BYTES:
                response.close()
                message = f"the answer exceeds {MAX_BYTES >> 20} MiB: ask for fewer steps or columns"
                return SendOutcome(action=NextAction.HOLD, status=response.status, message=message), b""
            response.release_conn()
        except (urllib3.exceptions.HTTPError, OSError) as error:
            return SendOutcome(action=NextAction.RETRY, message=reason_of(error)), b""
        served = response.headers.get("Content-Type", "").partition(";")[0]
        if response.status in (200, 201) and _is_of(served, kind):
            answer = _object_in(body) if kind == "application/json" else {}
            if answer is not None:
                return SendOutcome(action=NextAction.DONE, status=response.status, answer=answer), body
        return classify(response.status, response.headers, body), body


def _is_of(served: str, kind: str) -> bool:
    """Return whether a body is of a kind; without one, of any but JSON and pages of other servers."""
    if kind == ANY:
        return served == "application/octet-stream" or served.startswith("image/")
    return served == kind if kind else served in ("text/csv", "image/svg+xml")


def _object_in(body: bytes) -> dict[str, Any] | None:
    """The JSON object of an answer; None if it is none.

    `classify` takes one with the key `error` for a refusal. An environment, and a readiness, may have it.
    """
    try:
        answer = json.loads(body)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _error_of(url: str, outcome: SendOutcome) -> ClientError:
    if outcome.status == 0:
        return UnreachableError(f"{url} does not answer: {outcome.message}")
    kind = RunNotFoundError if outcome.code == "unknown_run" else ClientError
    if outcome.action in AGAIN:
        kind = UnreachableError
    message = outcome.message
    if outcome.action is NextAction.DONE:
        message = "the answer is of another kind: is the server older than this client?"
    return kind(message, status=outcome.status, code=outcome.code)
