"""The output of the importer: runs with what was stored of them, its progress, its notes and its errors."""

from __future__ import annotations

import re
import subprocess
import threading
from typing import IO, Final

from fp8scope_dashboard.file_imports import limits

PREFIX: Final = "fp8scope import: "
RUN: Final = re.compile(r"^\S*/runs/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/?(?:  .*: ([^:]*))?$")
PROGRESS: Final = re.compile(r"^(importing .*): (\d{1,3}) % \(.*\)$")
MEMORY: Final = re.compile(r"MemoryError|ArrowMemoryError|Unable to allocate|std::bad_alloc")


class ImporterOutput:
    """Reads the lines of the importer on two threads, within bounds.

    Attributes:
        results: [id of a run, what was stored of it], in the order of the output.
        problems, notes: sentences.
        stage, share: what it does now, and how much of that is done, 0 to 1.
    """

    def __init__(self) -> None:
        self.results: list[list[str]] = []
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.stage = ""
        self.share = 0.0
        self._last = ""
        self._needs_memory = False
        self._hidden: list[tuple[str, str]] = []
        self._threads: list[threading.Thread] = []

    def hide(self, text: str, shown: str) -> None:
        """Show something else in place of a text, such as a token."""
        self._hidden.append((text, shown))

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Begin to read what a process prints."""
        for stream, read in ((process.stdout, self.printed), (process.stderr, self.said)):
            assert stream is not None
            thread = threading.Thread(target=self._read, args=(stream, read), daemon=True)
            thread.start()
            self._threads.append(thread)

    def end(self) -> None:
        """Wait for the last lines of a process that has ended."""
        for thread in self._threads:
            thread.join(10)

    def printed(self, line: str) -> None:
        """Take a line of standard output."""
        if (match := RUN.match(line)) and len(self.results) < limits.MAX_RESULTS:
            self.results.append([match[1], match[2] or ""])

    def said(self, line: str) -> None:
        """Take a line of standard error."""
        self._last = line or self._last
        self._needs_memory |= bool(MEMORY.search(line))
        if match := PROGRESS.match(line):
            self.stage, self.share = match[1][:200], min(1.0, int(match[2]) / 100)
        elif line.startswith(PREFIX):
            _add(self.problems, line.removeprefix(PREFIX))
        elif line.startswith("  ") and not line.startswith(("  File ", "    ")):
            _add(self.notes, line.strip())

    def problem_of(self, status: int) -> str:
        """The reason of a status that the importer has not explained; empty if it has, or it is 0."""
        if status == 0 or (status == 1 and self.problems and not self._needs_memory):
            return ""
        if self._needs_memory:
            size = f"{limits.MEMORY_BYTES >> 20:,} MiB"
            return f"The file needs more memory than an import has ({size}): run fp8scope import."
        return f"The importer ended unexpectedly (status {status}): {self._last[:300] or 'it said nothing'}."

    def _read(self, stream: IO[bytes], take: object) -> None:
        assert callable(take)
        while part := stream.readline(limits.MAX_LINE):
            line = part.decode("utf-8", "replace").rstrip("\r\n").replace("\0", "")
            for text, shown in self._hidden:
                line = line.replace(text, shown)
            take(line)


def _add(sentences: list[str], sentence: str) -> None:
    if len(sentences) < limits.MAX_SENTENCES and sentence not in sentences:
        sentences.append(sentence[:1000])
