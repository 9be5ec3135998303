"""The console log: what the program writes to its standard streams, as bounded documents for the spool.

The training thread only appends texts to a queue. Another thread makes lines of them (`terminal.py`), removes
secrets, and cuts the lines into documents. Whatever exceeds a bound is left out, and a line says how much.
"""

import itertools
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from fp8scope.metadata.redaction import REDACTED, clean, redact
from fp8scope.process.standard_streams import Listener, StreamName, leave, leave_in_child, listen
from fp8scope.recording.terminal import Screen, TerminalLine

ONLINE_SECONDS: Final = 2.0
OFFLINE_SECONDS: Final = 5.0
"""Interval of the documents. Longer where nobody is looking, because each one ends a batch of steps."""
WAITING_CHARACTERS: Final = 4 << 20
LONGEST_TEXT: Final = 64 << 10
"""Bounds of what waits between two documents: in total, and of one call of `write`."""
DOCUMENT_LINES: Final = 500
DOCUMENT_CHARACTERS: Final = 128 << 10
BURST_CHARACTERS: Final = 1 << 20
CHARACTERS_PER_SECOND: Final = 16 << 10
"""The recorded amount: a burst, which fills up again at this rate. The newest lines are kept."""
LAST_CHARACTERS: Final = 64 << 10
"""Recorded at the end of the run in any case, because it says why a program failed."""

_KEY_BEGIN = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_KEY_END = re.compile(r"-----END [A-Z ]*PRIVATE KEY-----")


class ConsoleLog:
    """The console log of one process. `step` returns the present step; `secret` is the agent's token."""

    def __init__(self, step: Callable[[], int], secret: str, interval: float) -> None:
        self.interval = interval
        self._step = step
        self._secret = secret if len(secret) >= 8 else ""
        numbers = itertools.count()
        self._screens: dict[StreamName, Screen] = {
            "stdout": Screen(numbers.__next__),
            "stderr": Screen(numbers.__next__),
        }
        self._numbers = numbers
        self._queue: deque[tuple[StreamName, float, int, str]] = deque()
        self._added = self._taken = 0
        """Characters that were queued, and taken. A race of two threads may miss some; see `_drain`."""
        self._left_out = 0
        self._allowance = float(BURST_CHARACTERS)
        self._allowed_at = time.monotonic()
        self._in_key = False
        self._listeners: dict[StreamName, Listener] = {
            "stdout": self._listener("stdout"),
            "stderr": self._listener("stderr"),
        }
        # Two writers of a run take from one log when the second follows the first.
        self._lock = threading.Lock()

    def start(self) -> bool:
        """Begin to listen. Returns whether both streams can be heard."""
        return listen(self._listeners)

    def stop(self) -> None:
        """Listen no more."""
        leave(self._listeners)

    def stop_in_child(self) -> None:
        """In a forked child: listen no more, and forget what the parent has written."""
        leave_in_child()
        self._lock = threading.Lock()
        self._queue.clear()

    def _listener(self, name: StreamName) -> Listener:
        queue, now, step = self._queue, time.time, self._step

        def hear(text: str) -> None:
            size = len(text)
            if self._added - self._taken > WAITING_CHARACTERS:
                self._left_out += 1
                return
            if size > LONGEST_TEXT:
                text = text[-LONGEST_TEXT:]
                size = LONGEST_TEXT
            self._added += size
            queue.append((name, now(), step(), text))

        return hear

    def take(self, *, keep: bool = True, final: bool = False) -> list[dict[str, Any]]:
        """The documents of the lines that have changed since the last call; see docs/wire.md.

        Without `keep` the lines are counted as left out: there is no room for them.
        """
        with self._lock:
            self._drain()
            lines = [(name, line) for name, screen in self._screens.items() for line in screen.take()]
            if not keep:
                self._left_out += len(lines)
                return []
            lines.sort(key=lambda line: line[1].number)
            return self._documents(self._affordable(lines, final))

    def _drain(self) -> None:
        queue = self._queue
        while queue:
            name, at, step, text = queue.popleft()
            self._taken += len(text)
            self._screens[name].feed(text, at, step)
        self._taken = self._added

    def _affordable(
        self, lines: list[tuple[StreamName, TerminalLine]], final: bool
    ) -> list[tuple[str, TerminalLine]]:
        """The newest lines within the allowance, after a line that says how many are missing."""
        now = time.monotonic()
        earned = (now - self._allowed_at) * CHARACTERS_PER_SECOND
        self._allowance, self._allowed_at = min(BURST_CHARACTERS, self._allowance + earned), now
        left = max(self._allowance, LAST_CHARACTERS) if final else self._allowance
        chosen: list[tuple[str, TerminalLine]] = []
        for name, line in reversed(lines):
            cost = len(line.text) + 32
            if cost > left:
                break
            left -= cost
            self._allowance -= cost
            chosen.append((name, line))
        missing = len(lines) - len(chosen) + self._left_out
        self._left_out = 0
        chosen.reverse()
        if missing:
            text = f"{missing:,} lines are left out: the program writes more than the console log takes."
            first = chosen[0][1] if chosen else TerminalLine(0, time.time(), self._step())
            # Between the lines around it, in order of time; its number only identifies it.
            chosen.insert(0, ("agent", TerminalLine(next(self._numbers), first.time, first.step, text)))
        return chosen

    def _documents(self, lines: list[tuple[str, TerminalLine]]) -> list[dict[str, Any]]:
        documents: list[dict[str, Any]] = []
        if not lines:
            return documents
        size = 0
        texts = self._without_secrets([line.text.rstrip() for _, line in lines])
        for (name, line), text in zip(lines, texts, strict=True):
            entry = {
                "number": line.number,
                "time": round(line.time, 3),
                "step": line.step,
                "stream": name,
                "text": text,
            }
            is_full = not documents or len(documents[-1]["lines"]) >= DOCUMENT_LINES
            if is_full or size > DOCUMENT_CHARACTERS:
                documents.append({"kind": "console", "step": line.step, "lines": []})
                size = 0
            documents[-1]["lines"].append(entry)
            size += len(text)
        return documents

    def _without_secrets(self, texts: list[str]) -> Iterable[str]:
        """The texts without secrets. A private key is recognised over several lines."""
        whole = clean("\n".join(texts))
        if self._secret:
            whole = whole.replace(self._secret, REDACTED)
        if not self._in_key and redact(whole) == whole:
            return whole.split("\n")
        return [self._line_without_secrets(text) for text in whole.split("\n")]

    def _line_without_secrets(self, text: str) -> str:
        if self._in_key or _KEY_BEGIN.search(text):
            self._in_key = _KEY_END.search(text) is None
            return REDACTED
        return redact(text)
