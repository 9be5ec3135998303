"""A run's life in this process: its writers, how it is continued, and how it ends."""

import abc
import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fp8scope.arguments import seconds
from fp8scope.config import Settings
from fp8scope.guard import Guard
from fp8scope.process import open_runs
from fp8scope.process.failure_report import failure, tell_counts, tell_what_is_left, with_place_of
from fp8scope.process.sys_exit import exit_status
from fp8scope.process.threads import Forkable
from fp8scope.recording.entries import Document, FinishReport, Place
from fp8scope.recording.records import Kind, dump_json
from fp8scope.session.pipeline import Pipeline
from fp8scope.session.resume import Identity, identity_from_state, send_leftovers, write_ledger

FINISH_SECONDS = 30.0
MAX_REWINDS = 100
"""Attempts that one process may begin by going back to earlier steps."""
DESCRIBE_SECONDS = 1.0
"""Changes of what describes the run are sent together, this often at most."""
logger = logging.getLogger("fp8scope")


class Lifecycle(Forkable):
    """What `Run` is made of beside steps and what is logged in them."""

    def __init__(
        self, settings: Settings, registration: Mapping[str, Any], identity: Identity, *, rank: int
    ) -> None:
        super().__init__()
        self.id = identity.run
        self.name = str(registration["name"])
        self.guard = Guard()
        self._settings = settings
        self._registration = dict(registration)
        self._rank = rank
        self._attempt = identity.attempt
        self._resumed = identity.resumed
        self._step = identity.step
        self._tokens = identity.tokens
        self._recorded_step: int | None = None
        self._rewinds = 0
        self._thread = threading.get_ident()
        """The thread that trains."""
        self._failure = ""
        self._forked = False
        self._report: FinishReport | None = None
        self._page = ""
        self._registered_at = 0.0
        self._changed = False
        """Whether the registration has changed since it was handed over."""
        self._earlier: list[Pipeline] = []
        """Writers of this process whose attempt is over; some may still be sending."""
        self._pipeline = self._new_pipeline()

    @property
    def url(self) -> str:
        """The run's page, once the server has answered; empty before."""
        return self._page

    @property
    def directory(self) -> Path:
        """The folder of this run's spool."""
        return self._pipeline.directory

    @property
    def finished(self) -> bool:
        return self._report is not None

    @property
    def attempt(self) -> int:
        """How many times this run was begun before, here or elsewhere."""
        return self._attempt

    def state_dict(self) -> dict[str, Any]:
        """What belongs into a checkpoint, so that the run can be continued from it: plain numbers and texts.

        Give it to `init(resume=...)`, or to `load_state_dict` right after `init`.
        """
        return Identity(self.id, self._attempt, self._step, self._tokens).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was taken: in its run, with the step after its last one.

        What this process has recorded of another run by then is ended; without any step it leaves no trace
        unless the server was told of it already, which is two seconds after `init`.
        """
        with self.guard.shield("loading the run's state"):
            found = identity_from_state(state)
            if self._active():
                self._continue(found)

    def finish(self, timeout: float = FINISH_SECONDS) -> FinishReport:
        """End the run and wait, `timeout` seconds at most, until the server has everything.

        What is left then stays on disk for `fp8scope sync`. Calling it again returns the first report.
        """
        if self._report is None:
            patience = FINISH_SECONDS
            with self.guard.shield("finishing the run"):
                patience = seconds(timeout)
            self._before_finish()
            self._report = FinishReport(complete=False)
            with self.guard.shield("finishing the run"):
                self._report = self._finish(patience)
            open_runs.closed(self)
            self._after_finish()
        return self._report

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._note_failure(error)
        self.finish()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A model that carries its run is copied with a reference to it.
        return self

    # What a run adds

    @abc.abstractmethod
    def _before_finish(self) -> None:
        """The run is about to end, and still takes what is recorded."""

    @abc.abstractmethod
    def _after_finish(self) -> None:
        """The run has ended."""

    @abc.abstractmethod
    def _announce_again(self) -> None:
        """Another writer begins: have everything described to it."""

    @abc.abstractmethod
    def _take_alerts(self, found: Sequence[Mapping[str, Any]]) -> None:
        """The server's answer brought these; on the sender's thread."""

    @abc.abstractmethod
    def _take_commands(self, found: Sequence[Mapping[str, Any]]) -> None:
        """As `_take_alerts`."""

    # Writers

    def _active(self) -> bool:
        return self._settings.mode != "disabled" and self._report is None

    def _new_pipeline(self) -> Pipeline:
        hostname = str(self._registration["environment"].get("hostname", ""))[:255]
        return Pipeline(
            self._settings,
            self.id,
            self.guard,
            place=Place(self._rank, hostname, self._attempt),
            child=self._forked,
            on_alerts=self._take_alerts,
            # A forked child that logs is a writer, not the training.
            on_commands=None if self._forked else self._take_commands,
            on_page=self._note_page,
        )

    def _note_page(self, page: str) -> None:
        """The server has registered the run; on the sender's thread."""
        if page and page != self._page:
            self._page = page
            self._say(f"run {self.name}: {page}")

    def _say(self, text: str) -> None:
        """Show people a line about the run, once for all its processes."""
        if self._rank == 0 and not self._forked:
            logger.info("%s", text)

    def _start(self) -> None:
        """The run begins, or goes on."""
        if self._settings.mode != "disabled":
            self._register()
            self.guard.take_early()
            if self._settings.mode == "offline":
                self._say(
                    f"run {self.name} is kept in {self.directory}; later: fp8scope sync {self.directory}"
                )
            self._remember(over=False)
            if self._resumed:
                send_leftovers(self.id, self._settings, self.directory, self.guard.caught)

    def _remember(self, *, over: bool) -> None:
        write_ledger(self._settings.directory, self._identity(), over=over, failed=self.guard.caught)

    def _identity(self) -> Identity:
        return Identity(self.id, self._attempt, self._step, self._tokens)

    def _register(self) -> None:
        self._changed, self._registered_at = False, time.monotonic()
        self._pipeline.put(self._registration_entry())

    def _describe(self, name: str, value: Any) -> None:
        """Set an entry of the registration, and have the server told: soon, with what changes meanwhile."""
        self._registration[name] = value
        self._changed = True
        self._describe_if_due()

    def _describe_if_due(self, *, now: bool = False) -> None:
        overdue = time.monotonic() - self._registered_at >= DESCRIBE_SECONDS
        if self._changed and (now or overdue) and self._active():
            self._register()

    def _registration_entry(self) -> Document:
        document = dict(self._registration)
        return Document(Kind.REGISTRATION, lambda: dump_json(document))

    def _went_back(self) -> None:
        """The step that is about to be recorded comes before the last one: that is a new attempt."""
        if self._forked:
            return
        self._rewinds += 1
        if self._rewinds > MAX_REWINDS:
            self.guard.tell_once("rewinds", "steps go back again and again; no more attempts are told apart.")
            return
        self._begin_writer(replace(self._identity(), attempt=self._attempt + 1))

    def _continue(self, found: Identity) -> None:
        self._step, self._tokens = found.step, found.tokens
        fresh = self._recorded_step is None
        if found.run == self.id and (self._attempt >= found.attempt or not fresh):
            # Resumed by its id already; or going back, which is noticed with the next step.
            return
        self._recorded_step = None
        attempt = max(found.attempt, self._attempt)
        self._begin_writer(replace(found, attempt=attempt), trace=not fresh)
        self._remember(over=False)
        send_leftovers(self.id, self._settings, self.directory, self.guard.caught)

    def _begin_writer(self, identity: Identity, *, trace: bool = True) -> None:
        """End this process's writer and begin another one. Without `trace` the old one had nothing to say."""
        old, document = self._pipeline, {**self._finish_document(), "ends_run": identity.run != self.id}
        if trace or not old.discard():
            old.close(lambda: document)
            self._earlier.append(old)
        self.guard.start_anew()
        self.id, self._attempt = identity.run, identity.attempt
        self._announce_again()
        self._pipeline = self._new_pipeline()
        self._register()

    def after_fork_in_child(self) -> None:
        """Become another writer of the same run; it starts when the child records something."""
        self.guard = Guard()
        for pipeline in (*self._earlier, self._pipeline):
            pipeline.abandon()
        self._earlier = []
        self._announce_again()
        self._forked = True
        self._pipeline = self._new_pipeline()
        # The first entry must be the registration; queued without starting a thread.
        self._pipeline.prepare(self._registration_entry())

    # The end

    def _note_failure(self, error: BaseException) -> None:
        with self.guard.shield("noting a failure"):
            if isinstance(error, SystemExit) and exit_status(error.code) == 0:
                return
            self._failure = failure("".join(traceback.format_exception(error)))

    def _note_exit(self, why: str) -> None:
        """The program ended with a status that is a failure, `why` is where; an error that it had is more."""
        self._failure = self._failure or failure(why)

    def _terminate(self, why: str, timeout: float) -> None:
        """End as failed, on another thread than the training's, which may go on meanwhile: its hooks are left
        alone, and its callbacks are not called.
        """
        if self._report is None:
            self._report = FinishReport(complete=False)
            with self.guard.shield("writing the run out"):
                self._failure = failure(with_place_of(self._thread, why))
                document = self._finish_document()
                self._report = self._finish(timeout, lambda: document)

    def _write_out(self) -> None:
        """Have everything on the disk, fsynced."""
        with self.guard.shield("writing the run out"):
            self._pipeline.write_out()

    def _finish(
        self, timeout: float, document: Callable[[], Mapping[str, Any]] | None = None
    ) -> FinishReport:
        if self._settings.mode == "disabled":
            return FinishReport(complete=True)
        deadline = time.monotonic() + timeout
        report = self._pipeline.finish(document or self._finish_document, timeout)
        for pipeline in self._earlier:
            report = report.joined(pipeline.wait(max(0.0, deadline - time.monotonic())))
        if not self._forked:
            self._remember(over=not self._failure)
        report = replace(report, errors=self.guard.errors)
        if not report.complete and self._pipeline.started:
            sender = self._pipeline.sender
            trouble = sender.trouble if sender is not None else ""
            tell_what_is_left(self.name, self._settings.mode, report, trouble)
        else:
            tell_counts(self.name, report)
        if self._page:
            self._say(f"run {self.name} has {'failed' if self._failure else 'finished'}: {self._page}")
        return report

    def _finish_document(self) -> dict[str, Any]:
        dropped, errors = self.guard.counts()
        return {
            "state": "failed" if self._failure else "finished",
            "error": self._failure,
            # A forked child is one writer less, not the end of the run.
            "ends_run": not self._forked,
            "dropped": dropped,
            "errors": errors,
        }
