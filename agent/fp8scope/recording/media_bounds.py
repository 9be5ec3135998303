"""The bounds of a run's media, for those who send what other tools have stored."""

from collections import Counter
from typing import Final

from fp8scope.recording.media_queue import NAMES, RUN_BYTES

ITEMS: Final = 20_000
ITEMS_AT_STEP: Final = 16
"""Bounds of the server, as NAMES and RUN_BYTES: what exceeds them is not sent first."""


class LeftOutError(ValueError):
    """A media that is not taken; the message says why, of several."""


class MediaBounds:
    """Counts the media of a run."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._at_steps: Counter[tuple[str, int]] = Counter()
        self._items = self._bytes = 0

    def take(self, name: str, step: int, size: int) -> None:
        """Count a media of `size` bytes. Raises LeftOutError if the run has no room for it."""
        if name not in self._names and len(self._names) >= NAMES:
            raise LeftOutError(f"a run has media of {NAMES} names at most")
        if self._at_steps[name, step] >= ITEMS_AT_STEP:
            raise LeftOutError(f"a name has {ITEMS_AT_STEP} media at a step at most")
        if self._items >= ITEMS or self._bytes + size > RUN_BYTES:
            raise LeftOutError(f"a run has {ITEMS:,} media and {RUN_BYTES >> 20} MiB of them at most")
        self._names.add(name)
        self._at_steps[name, step] += 1
        self._items += 1
        self._bytes += size
