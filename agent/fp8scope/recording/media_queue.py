"""The media that wait for the recorder: bounded in memory, in number, and over the whole run."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from fp8scope.guard import Guard
from fp8scope.recording.media import FILE_BYTES, LoggedMedia, joined

WAITING_BYTES: Final = 64 << 20
WAITING: Final = 1_000
RUN_BYTES: Final = 256 << 20
NAMES: Final = 64


class MediaQueue:
    """Takes media from the script without waiting. The recorder makes their bytes: a PNG takes time.

    What exceeds a bound is left out, counted as an error of the agent, and warned of once.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._waiting: deque[LoggedMedia] = deque()
        self._held = 0
        self._names: set[str] = set()
        self._recorded = 0
        self._contents: set[str] = set()
        """The SHA-256 of contents that the present writer has recorded: it sends each once."""
        self._writer = ""
        # Held while media are recorded, so that the end of a writer comes after its last one.
        self._recording = threading.Lock()
        self._counting = threading.Lock()

    def reset_in_child(self) -> None:
        """In a forked child: forget what the parent has logged."""
        self._recording, self._counting = threading.Lock(), threading.Lock()
        self._waiting.clear()
        self._held = 0

    def add(self, media: LoggedMedia) -> bool:
        """Queue a media. Returns False if it is left out."""
        with self._counting:
            if media.name not in self._names and len(self._names) >= NAMES:
                problem = f"a run has media of {NAMES} names at most"
            elif len(self._waiting) >= WAITING or self._held + media.held > WAITING_BYTES:
                problem = "more is logged than can be encoded"
            elif self._recorded >= RUN_BYTES:
                problem = f"a process has recorded {RUN_BYTES >> 20} MiB, which is the most"
            else:
                self._names.add(media.name)
                self._held += media.held
                self._waiting.append(media)
                return True
        self._guard.error("logging media", problem)
        return False

    def drain(self, writer: str, has_room: Callable[[], bool], record: Callable[[bytes], None]) -> None:
        """Call `record` with the message of each media that waits, without writer and seq.

        `has_room`: whether the spool has room for them.
        """
        if not self._waiting:
            return
        with self._recording:
            if writer != self._writer:
                self._writer = writer
                self._contents.clear()
            while self._waiting:
                media = self._waiting.popleft()
                try:
                    with self._guard.shield("recording media"):
                        self._record(media, has_room, record)
                finally:
                    with self._counting:
                        self._held -= media.held

    def _record(
        self, media: LoggedMedia, has_room: Callable[[], bool], record: Callable[[bytes], None]
    ) -> None:
        if not has_room():
            raise OSError("the spool has no room for media")
        body = media.content()
        if len(body) > FILE_BYTES:
            raise ValueError(f"{media.name!r} has {len(body):,} bytes; at most {FILE_BYTES:,} are taken")
        head = media.head(body)
        sha256 = str(head["sha256"])
        is_new = sha256 not in self._contents
        record(joined(head, body if is_new else b""))
        if is_new:
            self._contents.add(sha256)
            self._recorded += len(body)
