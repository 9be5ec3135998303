"""What a server must have been told before it takes a message: the run, and who this writer is."""

from fp8scope.delivery.cursor import SendProgress
from fp8scope.delivery.messages import Reader
from fp8scope.delivery.transport import Action, Outcome, Transport
from fp8scope.recording.records import dump_json

CATALOGUE_CHUNK = 2000


class Handshake:
    """Knows what the server was told, of what the reader has found in the spool."""

    def __init__(self, run: str, transport: Transport, reader: Reader) -> None:
        self.page = ""
        """The address of the run's page, once registered."""
        self.margin: float | None = None
        """The project's margin, as the server said."""
        self._run = run
        self._transport = transport
        self._reader = reader
        self._registered = b""
        self._place_told = False
        self._tensors_told = 0

    @property
    def run_is_known(self) -> bool:
        """Whether the server has the registration as it is now."""
        return self._registered == self._reader.registration

    @property
    def is_complete(self) -> bool:
        """Whether the server knows everything that it needs."""
        return self._run_is_told() and self._writer_is_told()

    def tell(self, progress: SendProgress) -> Outcome:
        """Send the next part of what is missing (`is_complete` says whether there is any)."""
        return self._tell_writer(progress) if self._run_is_told() else self._tell_run()

    def forget_run(self) -> bool:
        """The server does not know the run. False: it was not told of it in the first place."""
        told, self._registered = bool(self._registered), b""
        self.forget_writer()
        return told

    def forget_writer(self) -> bool:
        """The server does not know this writer. False: it was not told of it in the first place."""
        told, self._place_told, self._tensors_told = self._place_told, False, 0
        return told

    def _run_is_told(self) -> bool:
        return not self._reader.registration or self.run_is_known

    def _writer_is_told(self) -> bool:
        told = self._place_told or not self._reader.place
        return told and self._tensors_told >= len(self._reader.catalogue)

    def _tell_run(self) -> Outcome:
        registration = self._reader.registration
        outcome = self._transport.send("PUT", f"/runs/{self._run}", registration)
        if outcome.action is Action.DONE:
            self._registered = registration
            self.page = str(outcome.answer.get("url", ""))[:1000]
            margin = outcome.answer.get("margin")
            self.margin = float(margin) if isinstance(margin, int | float) and 0 < margin <= 1 else None
        return outcome

    def _tell_writer(self, progress: SendProgress) -> Outcome:
        offset = self._tensors_told
        chunk = self._reader.catalogue[offset : offset + CATALOGUE_CHUNK]
        path = f"/runs/{self._run}/writers/{progress.writer}/tensors"
        body = dump_json({**self._reader.place, "offset": offset, "tensors": chunk})
        outcome = self._transport.send("POST", path, body)
        if outcome.action is Action.DONE:
            self._place_told = True
            self._tensors_told += len(chunk)
        return outcome
