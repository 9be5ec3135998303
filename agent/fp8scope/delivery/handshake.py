"""Registers the run and this writer with the server, which must precede every message."""

from fp8scope.delivery.cursor import SendProgress
from fp8scope.delivery.messages import Reader
from fp8scope.delivery.transport import NextAction, SendOutcome, Transport
from fp8scope.recording.records import dump_json

CATALOGUE_CHUNK = 2000


class Handshake:
    """Sends registration, origin and tensor catalogue, and tracks which of them the server has."""

    def __init__(self, run: str, transport: Transport, reader: Reader) -> None:
        self.page = ""
        """The address of the run's page; empty until the run is registered."""
        self.margin: float | None = None
        """The project's margin, from the server; None until the run is registered."""
        self.accepts: frozenset[str] = frozenset()
        """The kinds of reports that not every server knows, and this one accepts."""
        self._run = run
        self._transport = transport
        self._reader = reader
        self._registered = b""
        self._origin_sent = False
        self._tensors_sent = 0

    @property
    def run_is_known(self) -> bool:
        """Return whether the server has the current registration."""
        return self._registered == self._reader.registration

    @property
    def has_registered(self) -> bool:
        """Return whether the server has a registration, and it is the current one."""
        return bool(self._registered) and self.run_is_known

    @property
    def is_complete(self) -> bool:
        """Return whether the server has everything it needs to accept messages."""
        return self._is_run_sent() and self._is_writer_sent()

    def send_next(self, progress: SendProgress) -> SendOutcome:
        """Send the next missing part. Call this only while `is_complete` is False."""
        return self._send_writer(progress) if self._is_run_sent() else self._send_run()

    def forget_run(self) -> bool:
        """Send the run again, because the server does not know it. Returns whether it had been sent."""
        was_sent, self._registered = bool(self._registered), b""
        self.forget_writer()
        return was_sent

    def forget_writer(self) -> bool:
        """Send the writer again, because the server does not know it. Returns whether it had been sent."""
        was_sent, self._origin_sent, self._tensors_sent = self._origin_sent, False, 0
        return was_sent

    def _is_run_sent(self) -> bool:
        return not self._reader.registration or self.run_is_known

    def _is_writer_sent(self) -> bool:
        origin_sent = self._origin_sent or not self._reader.origin
        return origin_sent and self._tensors_sent >= len(self._reader.catalogue)

    def _send_run(self) -> SendOutcome:
        registration = self._reader.registration
        outcome = self._transport.send("PUT", f"/runs/{self._run}", registration)
        if outcome.action is NextAction.DONE:
            self._registered = registration
            self.page = str(outcome.answer.get("url", ""))[:1000]
            kinds = outcome.answer.get("accepts")
            self.accepts = frozenset(map(str, kinds)) if isinstance(kinds, list) else frozenset()
            margin = outcome.answer.get("margin")
            self.margin = float(margin) if isinstance(margin, int | float) and 0 < margin <= 1 else None
        return outcome

    def _send_writer(self, progress: SendProgress) -> SendOutcome:
        offset = self._tensors_sent
        chunk = self._reader.catalogue[offset : offset + CATALOGUE_CHUNK]
        path = f"/runs/{self._run}/writers/{progress.writer}/tensors"
        body = dump_json({**self._reader.origin, "offset": offset, "tensors": chunk})
        outcome = self._transport.send("POST", path, body)
        if outcome.action is NextAction.DONE:
            self._origin_sent = True
            self._tensors_sent += len(chunk)
        return outcome
