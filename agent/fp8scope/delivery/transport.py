"""HTTP requests to the server, and the meaning of each response; see the table at the end of docs/wire.md."""

import enum
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import urllib3

from fp8scope.config import Settings

MAX_ANSWER_BYTES = 4 << 20
MAX_RETRY_AFTER = 300.0


class NextAction(enum.Enum):
    """The sender's next action after a response."""

    DONE = "done"
    SET_ASIDE = "set aside"
    HOLD = "hold"
    REGISTER = "register"
    NEW_WRITER = "new writer"
    SEND_CATALOGUE = "send catalogue"
    HALVE = "halve"
    WAIT = "wait"
    RETRY = "retry"


@dataclass(frozen=True, kw_only=True)
class SendOutcome:
    """A classified response. `answer` is the JSON of a success; `wait` is the server's Retry-After."""

    action: NextAction
    answer: Mapping[str, Any] = field(default_factory=dict)
    status: int = 0
    code: str = ""
    message: str = ""
    wait: float | None = None


_CODES = {
    (401, "no_token"): NextAction.HOLD,
    (401, "bad_token"): NextAction.HOLD,
    (404, "unknown_run"): NextAction.REGISTER,
    (409, "writer_conflict"): NextAction.NEW_WRITER,
    (409, "catalogue_gap"): NextAction.SEND_CATALOGUE,
    (409, "run_conflict"): NextAction.HOLD,
    (409, "content_needed"): NextAction.SET_ASIDE,
    (413, "too_large"): NextAction.HALVE,
    (429, "slow_down"): NextAction.WAIT,
    (503, "unavailable"): NextAction.WAIT,
    (507, "storage_full"): NextAction.WAIT,
}


def classify(status: int, headers: Mapping[str, str], body: bytes) -> SendOutcome:
    """Decide what to do after a response.

    Only a JSON object from the fp8scope API acknowledges a message; a proxy's sign-in page with status 200
    does not. Likewise, a 400 without an API error code comes from a proxy and does not reject the message.
    """
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if 200 <= status < 300:
        if isinstance(answer, dict) and "error" not in answer:
            return SendOutcome(action=NextAction.DONE, answer=answer, status=status)
        return SendOutcome(
            action=NextAction.RETRY, status=status, message="the response is not from the fp8scope API"
        )
    if 300 <= status < 400:
        location = headers.get("Location", "?")[:200]
        return SendOutcome(
            action=NextAction.HOLD,
            status=status,
            message=f"the server redirects to {location}; use its final address",
        )
    error = answer.get("error") if isinstance(answer, dict) else None
    error = error if isinstance(error, dict) else {}
    code = str(error.get("code", ""))[:64]
    message = " ".join(str(error[k])[:500] for k in ("message", "hint") if error.get(k)) or f"HTTP {status}"
    if status == 404 and not code:
        # Most often somebody has copied the address of a page.
        message = "HTTP 404: no dashboard is at this address. Leave out the path of a page (/p/default/)"
    wait = retry_after(headers.get("Retry-After"))
    action = _CODES.get((status, code)) or _by_status(status, has_code=bool(code))
    return SendOutcome(action=action, status=status, code=code, message=message, wait=wait)


def _by_status(status: int, *, has_code: bool) -> NextAction:
    if status in (400, 422) and has_code:
        return NextAction.SET_ASIDE
    if status == 413:
        return NextAction.HALVE
    if status in (429, 503):
        return NextAction.WAIT
    if status >= 500 or status in (408, 425, 409):
        return NextAction.RETRY
    return NextAction.HOLD


def retry_after(text: str | None) -> float | None:
    """Parse a Retry-After header (seconds or a date), clamped to 0..MAX_RETRY_AFTER; None if invalid."""
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            return None
    return min(max(seconds, 0.0), MAX_RETRY_AFTER) if seconds == seconds else None


class Backoff:
    """Exponential back-off with full jitter: uniform from 0 to base * 2^attempt, at most `cap` seconds."""

    def __init__(self, base: float, cap: float) -> None:
        self._base = base
        self._cap = cap
        self._attempt = 0
        self._random = random.Random()

    def next(self) -> float:
        """Return the seconds to wait before the next attempt."""
        ceiling = min(self._cap, self._base * 2.0 ** min(self._attempt, 32))
        self._attempt += 1
        return self._random.uniform(0.0, ceiling)

    def reset(self) -> None:
        """Start over from the shortest delay, after a success."""
        self._attempt = 0


class Transport:
    """Sends requests to one server with one token. Calls time out, and never raise on network errors."""

    def __init__(self, settings: Settings) -> None:
        self.url = settings.url
        self._headers = {"Authorization": f"Bearer {settings.token}", "User-Agent": "fp8scope-agent"}
        self._pool = urllib3.PoolManager(
            num_pools=2,
            maxsize=1,
            retries=False,
            timeout=urllib3.Timeout(connect=settings.connect_timeout, read=settings.read_timeout),
        )

    def send(
        self, method: str, path: str, body: bytes, content_type: str = "application/json"
    ) -> SendOutcome:
        """Send one request to `path` below /api/v1 and classify the response."""
        headers = {**self._headers, "Content-Type": content_type}
        try:
            response = self._pool.request(
                method,
                f"{self.url}/api/v1{path}",
                body=body,
                headers=headers,
                redirect=False,
                preload_content=False,
            )
            content = response.read(MAX_ANSWER_BYTES + 1, decode_content=True)
            if len(content) > MAX_ANSWER_BYTES:
                response.close()
                return SendOutcome(
                    action=NextAction.RETRY, message=f"the response exceeds {MAX_ANSWER_BYTES >> 20} MiB"
                )
            response.release_conn()
        except (urllib3.exceptions.HTTPError, OSError) as error:
            return SendOutcome(action=NextAction.RETRY, message=reason_of(error))
        return classify(response.status, response.headers, content)

    def close(self) -> None:
        """Close the connections."""
        self._pool.clear()


def reason_of(error: BaseException) -> str:
    """Return a short description of an error, without the object addresses in urllib3's messages."""
    inner: BaseException | None = getattr(error, "reason", None) or error.__cause__
    if isinstance(inner, BaseException):
        return reason_of(inner)
    if "WRONG_VERSION_NUMBER" in str(error):
        return "no TLS is spoken at this address; begin it with http:// if it is meant to be without"
    text = str(error).rpartition(": ")[2] or type(error).__name__
    return text[:200]
