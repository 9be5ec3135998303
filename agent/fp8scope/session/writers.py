"""The writers of a run in this process: one after the other, each with a pipeline and a spool of its own.

A process begins another writer when it goes back to earlier steps, continues a checkpoint's run, or forks.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fp8scope.config import Settings
from fp8scope.delivery.inbox import DocumentSink
from fp8scope.delivery.sender import Sender
from fp8scope.guard import Guard
from fp8scope.recording.console import ConsoleLog
from fp8scope.recording.entries import Catalogue, Origin, SpoolEntry
from fp8scope.recording.finish_report import FinishReport
from fp8scope.recording.media_queue import MediaQueue
from fp8scope.session.pipeline import Pipeline

FinishDocument = Callable[[], Mapping[str, Any]]
"""Returns the body of POST /runs/{run}/finish, called when the last step is recorded."""


class Writers:
    """`pipeline` belongs to the current writer. Writers whose attempt is over may still be sending."""

    def __init__(
        self,
        settings: Settings,
        guard: Guard,
        run: str,
        origin: Origin,
        *,
        on_alerts: DocumentSink,
        on_page: Callable[[str], None],
        console: ConsoleLog | None = None,
        media: MediaQueue | None = None,
    ) -> None:
        self.run = run
        self.origin = origin
        self.forked = False
        """Whether this process is a forked child of the one that trains."""
        self.on_commands: DocumentSink | None = None
        """Takes the server's commands, on the sender's thread."""
        self._settings = settings
        self._guard = guard
        self._on_alerts = on_alerts
        self._on_page = on_page
        self._console = console
        self._media = media
        self._earlier: list[Pipeline] = []
        self.pipeline = self._new_pipeline()

    @property
    def sender(self) -> Sender | None:
        """The current writer's sender; None before the first entry, and in offline mode."""
        return self.pipeline.sender

    def put(self, entry: SpoolEntry | Catalogue) -> None:
        """Hand an entry to the current writer."""
        self.pipeline.put(entry)

    def replace(self, run: str, attempt: int, document: FinishDocument, *, discard: bool = False) -> Pipeline:
        """End the current writer and begin another.

        `document` says how the current one ends. With `discard` it leaves no trace, unless the server knows
        of the run already.
        """
        old = self.pipeline
        if not (discard and old.discard()):
            old.close(document)
            self._earlier.append(old)
        self._guard.begin_writer()
        self.run, self.origin = run, replace(self.origin, attempt=attempt)
        self.pipeline = self._new_pipeline()
        return self.pipeline

    def replace_after_fork(self) -> Pipeline:
        """In a forked child: leave the parent's writers alone and prepare another, without its threads."""
        for pipeline in (*self._earlier, self.pipeline):
            pipeline.abandon()
        self._earlier = []
        self.forked = True
        self.pipeline = self._new_pipeline()
        return self.pipeline

    def finish(self, document: FinishDocument, timeout: float, *, leaving: bool = False) -> FinishReport:
        """End the current writer and wait for all of them, at most `timeout` seconds.

        `leaving`: the program ends, and waits little for a server that does not answer.
        """
        deadline = time.monotonic() + timeout
        report = self.pipeline.finish(document, timeout, leaving=leaving)
        for pipeline in self._earlier:
            left = max(0.0, deadline - time.monotonic())
            report = report.joined(pipeline.wait(left, leaving=leaving))
        return report

    def _new_pipeline(self) -> Pipeline:
        return Pipeline(
            self._settings,
            self.run,
            self._guard,
            origin=self.origin,
            child=self.forked,
            on_alerts=self._on_alerts,
            # Commands are for the training, not for a forked child that only logs.
            on_commands=None if self.forked else self._take_commands,
            on_page=self._on_page,
            console=None if self.forked else self._console,
            media=self._media,
        )

    def _take_commands(self, documents: Sequence[Mapping[str, Any]]) -> None:
        if self.on_commands is not None:
            self.on_commands(documents)
