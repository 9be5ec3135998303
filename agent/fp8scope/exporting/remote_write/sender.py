"""Sends the latest values again and again, and ends the series of runs that are over."""

import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import urllib3

from fp8scope.client import Client, ClientError
from fp8scope.delivery.transport import reason_of, retry_after
from fp8scope.exporting.remote_write.message import HEADERS, snappy_block, write_request
from fp8scope.exporting.remote_write.samples import MAX_RUNS, Labels, samples_of

TIMEOUT: Final = 15.0
MAX_CREDENTIALS: Final = 4_096
Say = Callable[[str], None]


class RemoteWriteError(RuntimeError):
    """The receiver refuses the samples for good; the message says why."""


@dataclass(frozen=True, kw_only=True)
class WriteReceiver:
    """A server that takes remote write. `authorization` is the value of the header; empty for none."""

    url: str
    authorization: str = ""

    def __repr__(self) -> str:
        return f"Receiver({self.url!r})"


def authorization_of(bearer: Path | None, basic: Path | None) -> str:
    """The header Authorization from a file with a token, or one with `user:password`; empty for neither.

    Raises:
        RemoteWriteError: the file is empty, too large, or has no colon.
        OSError: it cannot be read.
    """
    if bearer is not None:
        return f"Bearer {_secret(bearer)}"
    if basic is None:
        return ""
    pair = _secret(basic)
    if ":" not in pair:
        raise RemoteWriteError(f"{basic} has no colon: write user:password into it")
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def _secret(path: Path) -> str:
    with path.open() as file:
        text = file.read(MAX_CREDENTIALS + 1).strip()
    if not text or len(text) > MAX_CREDENTIALS or not text.isprintable():
        raise RemoteWriteError(f"{path} does not hold one line of credentials")
    return text


class RemoteWriter:
    """Sends samples of a project to a receiver. What could not be sent is left out: newer values follow."""

    def __init__(
        self,
        client: Client,
        receiver: WriteReceiver,
        *,
        project: str,
        query: str,
        scalars: Sequence[str],
        say: Say,
        max_runs: int = MAX_RUNS,
    ) -> None:
        self._client = client
        self._receiver = receiver
        self._project = project
        self._query = query
        self._scalars = list(scalars)
        self._say = say
        self._max_runs = max_runs
        self._open: set[Labels] = set()
        self._pool = urllib3.PoolManager(retries=False, timeout=TIMEOUT)

    def run(self, every: float, rounds: int | None = None) -> None:
        """Send every `every` seconds, `rounds` times or until it is interrupted; then end all series.

        Raises:
            RemoteWriteError: the receiver refuses the samples for good.
        """
        try:
            while rounds is None or rounds > 0:
                self.send()
                rounds = None if rounds is None else rounds - 1
                if rounds != 0:
                    time.sleep(every)
        finally:
            self.end()

    def send(self) -> None:
        """Send the latest values, and end the series that are gone."""
        try:
            samples = samples_of(self._client, self._project, self._query, self._scalars, self._max_runs)
        except ClientError as error:
            if error.status in (401, 403, 422):
                raise RemoteWriteError(str(error)) from error
            self._say(str(error))
            return
        current = {sample.labels for sample in samples}
        stale = sorted(self._open - current)
        if (samples or stale) and self._post(write_request(samples, stale, _now())):
            self._open = current

    def end(self) -> None:
        """End all series that are open."""
        if self._open and self._post(write_request([], sorted(self._open), _now())):
            self._open = set()

    def _post(self, message: bytes) -> bool:
        """Send a message once; returns whether it was taken. The next round replaces one that was not."""
        headers = dict(HEADERS)
        if self._receiver.authorization:
            headers["Authorization"] = self._receiver.authorization
        try:
            answer = self._pool.request(
                "POST", self._receiver.url, body=snappy_block(message), headers=headers, redirect=False
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            self._say(f"{self._receiver.url} does not answer: {reason_of(error)}")
            return False
        if answer.status < 300:
            return True
        reason = " ".join(answer.data[:300].decode(errors="replace").split())
        text = f"{self._receiver.url} answers {answer.status}: {reason}"
        if answer.status in (429, 500, 502, 503, 504):
            self._say(text)
            time.sleep(min(retry_after(answer.headers.get("Retry-After")) or 0.0, TIMEOUT))
            return False
        raise RemoteWriteError(f"{text}. Check the address and the credentials, then start again.")


def _now() -> int:
    return time.time_ns() // 1_000_000
