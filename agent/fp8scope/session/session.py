"""A run's recording in this process: how it begins, is continued, and ends."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from fp8scope.arguments import seconds
from fp8scope.config import Settings
from fp8scope.delivery.inbox import AlertQueue
from fp8scope.guard import Guard
from fp8scope.observe.batch_hash import BatchHasher, BatchHook
from fp8scope.process.failure_report import failure, with_stack_of
from fp8scope.process.threads import call_after_fork
from fp8scope.recording.console import OFFLINE_SECONDS, ONLINE_SECONDS, ConsoleLog
from fp8scope.recording.entries import Document, Origin
from fp8scope.recording.finish_report import FinishReport, log_losses, log_unsent
from fp8scope.recording.media import LoggedMedia
from fp8scope.recording.media_queue import MediaQueue
from fp8scope.recording.records import RecordKind, dump_json
from fp8scope.recording.registration import Registration
from fp8scope.scalars import whole_steps
from fp8scope.session.leftovers import send_leftovers
from fp8scope.session.resume import Identity, identity_from_state, write_ledger
from fp8scope.session.steps import Follower, Steps
from fp8scope.session.writers import FinishDocument, Writers

if TYPE_CHECKING:
    import torch

    from fp8scope_kernels import Recipe
    from fp8scope_kernels.convert import Selection

FINISH_SECONDS = 30.0
GIT_SECONDS = 0.5
"""Seconds that the end of a run waits for git, if no step was recorded since it answered."""
MAX_REPORTS_KEPT = 200
MAX_REWINDS = 100
"""Attempts that one process may begin by going back to earlier steps."""
logger = logging.getLogger("fp8scope")


class Controller(Protocol):
    """Acts on the training between its steps: `fp8scope.control.controller.RunController`."""

    switches: list[Any]
    """Changes of layers' precision that wait for the next step."""

    def switch_layers(self) -> None:
        """Make the changes in `switches`."""

    def at_boundary(self) -> None:
        """A step has ended: do what waits for this moment."""

    def take_commands(self, documents: Sequence[Mapping[str, Any]]) -> None:
        """Keep the commands of an answer; called on the sender's thread."""

    def announce_again(self) -> None:
        """Another writer begins: tell the server again which commands are accepted."""

    def end(self) -> None:
        """The run ends: refuse the commands that wait."""


class Session:
    """Owns a run's steps, registration and writers. Only the training thread uses it, except where noted."""

    def __init__(
        self, settings: Settings, registration: Mapping[str, Any], identity: Identity, *, rank: int
    ) -> None:
        enabled = settings.mode != "disabled"
        hostname = str(registration["environment"].get("hostname", ""))[:255]
        self.settings = settings
        self.name = str(registration["name"])
        self.page = ""
        """The address of the run's page, once the server has answered."""
        self.report: FinishReport | None = None
        """Set when the run is finished."""
        self.guard = Guard()
        self.alerts = AlertQueue()
        self.console: ConsoleLog | None = None
        """The output of this process; None if it is not recorded."""
        if enabled and (settings.console == "all" or (settings.console == "rank0" and rank == 0)):
            interval = OFFLINE_SECONDS if settings.mode == "offline" else ONLINE_SECONDS
            self.console = ConsoleLog(lambda: self.steps.number, settings.token, interval)
        self._media = MediaQueue(self.guard)
        self.writers = Writers(
            settings,
            self.guard,
            identity.run,
            Origin(rank, hostname, identity.attempt),
            on_alerts=self.alerts.take,
            on_page=self._note_page,
            console=self.console,
            media=self._media,
        )
        self.registration = Registration(registration, self.guard, self.writers.put, enabled=enabled)
        self.steps = Steps(
            self.guard,
            self.registration,
            self.writers.pipeline,
            self.alerts,
            overhead=settings.overhead,
            device_file=settings.device_file,
            enabled=enabled,
            on_rewind=self._went_back,
        )
        self.steps.number, self.steps.tokens = identity.step, identity.tokens
        self._resumed = identity.resumed
        self.rewinds = 0
        self.before_end: list[Callable[[], None]] = []
        """Called when the run ends, while it can still send reports."""
        self.sent_reports: deque[dict[str, Any]] = deque(maxlen=MAX_REPORTS_KEPT)
        """The latest changes to the run and results of commands."""
        self.hasher: BatchHasher | None = None
        """Logs `data_hash`; None unless `init` was asked for it."""
        self._hashes_model = False
        self._is_leaving = False
        self._controller: Controller | None = None

    def start(self, controller: Controller) -> None:
        """Begin to record; `controller` acts between the steps."""
        self._controller = controller
        self.steps.connect(controller.switches, controller.switch_layers, controller.at_boundary)
        self.writers.on_commands = controller.take_commands
        call_after_fork(self.after_fork_in_child)
        if self.settings.mode == "disabled":
            return
        if self.console is not None:
            with self.guard.shield("listening to the output"):
                if not self.console.start():
                    logger.debug("the output is not recorded: the program has replaced a standard stream.")
        self.registration.send()
        self.guard.take_early()
        if self.settings.mode == "offline":
            directory = self.writers.pipeline.directory
            self._say(f"run {self.name} is kept in {directory}; later: fp8scope sync {directory}")
        self._remember(over=False)
        if self._resumed:
            self._send_leftovers()

    @property
    def active(self) -> bool:
        """Return whether anything is being recorded: see `Steps.active`."""
        return self.steps.active

    @property
    def identity(self) -> Identity:
        """The run, its attempt, and how far it has come."""
        return Identity(self.writers.run, self.writers.origin.attempt, self.steps.number, self.steps.tokens)

    def watch(
        self,
        model: "torch.nn.Module",
        optimizer: "torch.optim.Optimizer | None",
        *,
        every: int | None,
        shadow: "Recipe | None",
        include: "Selection | None",
        scaler: "torch.amp.GradScaler | None",
        readiness: bool = False,
    ) -> int:
        """Observe a model from the next step on; see `Run.watch`."""
        # Needs torch.
        from fp8scope.observe.tensors import Watching
        from fp8scope_kernels.hooks import register_forward_pre_hook

        collector, document = self.steps.collector, self.registration.document
        if self.hasher is not None and self.follower is None and not self._hashes_model:
            self._hashes_model = True
            register_forward_pre_hook(model, BatchHook(self), with_kwargs=True)
        self.steps.measures.watch(model, optimizer)
        if every is not None:
            collector.every = whole_steps(every)
        how = Watching(
            shadow=shadow,
            readiness=readiness,
            include=include,
            scaler=scaler,
            expert_tensors=self.settings.expert_tensors,
        )
        count = collector.watch(model, optimizer, how)
        wants_fp8 = document["precision"] == "fp8" or shadow is not None or readiness
        if count == 0 and wants_fp8:
            self.guard.warn_once("watch", "no FP8 layer found in the model, and none that could be one.")
        elif (recipe := collector.recipe) and not document["recipe"]:
            document["recipe"] = dict(recipe)
            if document["precision"] == "unknown" and "shadow" not in recipe:
                document["precision"] = "fp8"
            self.registration.send()
        return count

    def hash_batches(self) -> None:
        """Log the hash of the batches of each step from now on."""
        self.hasher = BatchHasher(self.guard)

    def hash_inputs(self, inputs: Iterable[Any]) -> None:
        """Add the inputs of a forward pass to the `data_hash` of the open step, if there is one."""
        if self.hasher is not None and self.steps.open is not None and self.follower is None:
            self.hasher.add(self.steps.open, inputs)

    def send_report(self, kind: str, **fields: Any) -> None:
        """Send a report of this kind (docs/wire.md) for the current step, through the spool."""
        with self.guard.shield(f"reporting ({kind})"):
            document = {"kind": kind, "step": self.steps.number, **fields}
            if self.active:
                self.writers.put(Document(RecordKind.REPORT, lambda: dump_json(document)))
                if kind in ("annotation", "command"):
                    self.sent_reports.append(document)

    def log_media(self, media: LoggedMedia) -> None:
        """Record an image, a text, a table or a file through the spool, without waiting."""
        if self.active and self._media.add(media):
            self.writers.pipeline.note_media()

    def _note_page(self, page: str) -> None:
        """The server has registered the run; called on the sender's thread."""
        if page and page != self.page:
            self.page = page
            self._say(f"run {self.name}: {page}")

    def _say(self, text: str) -> None:
        """Log a line for people, from one of the run's processes only."""
        if self.writers.origin.rank == 0 and not self.writers.forked:
            logger.info("%s", text)

    # Attempts

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where the checkpoint with this `Run.state_dict()` was taken."""
        loaded = identity_from_state(state)
        if not self.active:
            return
        steps, current = self.steps, self.identity
        steps.number, steps.tokens = loaded.step, loaded.tokens
        fresh = steps.recorded is None
        if loaded.run == current.run and (current.attempt >= loaded.attempt or not fresh):
            # Resumed by its id already; or going back, which the next step notices.
            return
        steps.recorded = None
        attempt = max(loaded.attempt, current.attempt)
        self._begin_writer(replace(loaded, attempt=attempt), discard=fresh)
        self._remember(over=False)
        self._send_leftovers()

    def _went_back(self) -> None:
        """The step that is about to be recorded comes before the last one: begin another attempt."""
        if self.writers.forked:
            return
        self.rewinds += 1
        if self.rewinds > MAX_REWINDS:
            self.guard.warn_once("rewinds", "steps go back again and again; no more attempts are begun.")
            return
        self._begin_writer(replace(self.identity, attempt=self.identity.attempt + 1))

    def _begin_writer(self, identity: Identity, *, discard: bool = False) -> None:
        document = {**self._finish_document(), "ends_run": identity.run != self.writers.run}
        self.steps.pipeline = self.writers.replace(
            identity.run, identity.attempt, lambda: document, discard=discard
        )
        self._announce_again()
        self.registration.send()

    def _announce_again(self) -> None:
        """Have the tensors and the accepted commands sent by the new writer, too."""
        self.steps.collector.after_fork()
        if self._controller is not None:
            self._controller.announce_again()

    def after_fork_in_child(self) -> None:
        """Become another writer of the same run. It starts when the child records something."""
        self.guard.reset()
        if self.console is not None:
            self.console.stop_in_child()
        self._media.reset_in_child()
        self.steps.pipeline = self.writers.replace_after_fork()
        self._announce_again()
        self.steps.measures.after_fork(self.guard)
        # The first entry must be the registration; queued without starting a thread.
        self.writers.pipeline.prepare(self.registration.entry())

    def _remember(self, *, over: bool) -> None:
        write_ledger(self.settings.directory, self.identity, over=over, failed=self.guard.caught)

    def _send_leftovers(self) -> None:
        directory = self.writers.pipeline.directory
        send_leftovers(self.writers.run, self.settings, directory, self.guard.caught)

    # Failures

    @property
    def step(self) -> int:
        """The number of the step that was begun last."""
        return self.steps.number

    @property
    def thread(self) -> int:
        """The ident of the thread that trains."""
        return self.steps.thread

    def note_failure(self, error: BaseException) -> None:
        """Remember that the program failed with `error`."""
        self.steps.note_failure(error)

    def note_exit(self, why: str) -> None:
        """Remember that the program ended with a failure status, unless an exception says more."""
        self.steps.failure = self.steps.failure or failure(why)

    # Steps that are found

    @property
    def follower(self) -> Follower | None:
        """Return what finds the steps of the training loop, if anything does."""
        return self.steps.follower

    def attach(self, follower: Follower) -> None:
        """Let `follower` find the steps, instead of the one before."""
        self.detach()
        self.steps.follower = follower

    def detach(self) -> None:
        """End the follower that finds the steps, if there is one."""
        follower, self.steps.follower = self.steps.follower, None
        if follower is not None:
            follower.end()

    # The end

    def finish(self, timeout: float) -> FinishReport:
        """End the run and wait at most `timeout` seconds until the server has everything."""
        if self.report is None:
            patience = FINISH_SECONDS
            with self.guard.shield("finishing the run"):
                patience = seconds(timeout)
            self._record_the_rest()
            self._set_report(FinishReport(complete=False))
            with self.guard.shield("finishing the run"):
                self.report = self._finish(patience, self._finish_document)
        assert self.report is not None
        return self.report

    def terminate(self, why: str, timeout: float) -> None:
        """End the run as failed, from another thread than the training's, which may go on meanwhile.

        Hooks in the model are left alone, and no callback is called.
        """
        if self.report is None:
            self._set_report(FinishReport(complete=False))
            with self.guard.shield("writing the run out"):
                self.steps.failure = failure(with_stack_of(self.steps.thread, why))
                # Now, since the training may go on and end another step.
                document = self._finish_document()
                self.report = self._finish(timeout, lambda: document)

    def write_out(self) -> None:
        """Write and fsync everything that was handed over. Not for the training thread."""
        with self.guard.shield("writing the run out"):
            self.writers.pipeline.write_out()

    def drop_callbacks(self) -> None:
        """Deliver no more alerts: nobody expects the script's callbacks now."""
        self.alerts.callbacks.clear()

    def leave(self) -> None:
        """The program ends: `finish` waits little for a server that does not answer."""
        self._is_leaving = True

    def _set_report(self, report: FinishReport) -> None:
        self.report = report
        self.steps.end_recording()

    def _record_the_rest(self) -> None:
        """Hand over what is known at the end, and remove hooks from models and optimizers."""
        with self.guard.shield("looking at the repository"):
            self.registration.take_repository(GIT_SECONDS)
        self._end_steps()
        with self.guard.shield("describing the run"):
            self._describe_training()
            self.registration.send_changes(now=True)
        for action in self.before_end:
            with self.guard.shield("ending the run"):
                action()
        if self._controller is not None:
            self._controller.end()
        with self.guard.shield("ending the measures"):
            self.steps.count_kernel_failures()
            self.steps.measures.close()
            self.steps.collector.close()

    def _describe_training(self) -> None:
        """Add to the environment what the training is made of; a check of `fp8scope advise` asks for it."""
        facts = self.steps.measures.facts()
        if facts:
            self.registration.set(
                "environment", {**self.registration.document["environment"], "training": facts}
            )

    def note_step_times(self, step: int, table: dict[str, Any]) -> None:
        """Add the time table of a traced step to the environment; only the first rank does."""
        if self.writers.origin.rank:
            return
        environment = self.registration.document["environment"]
        self.registration.set("environment", {**environment, "step_times": {"step": step, **table}})

    def _end_steps(self) -> None:
        """Record the step that is complete but open."""
        steps, alerts = self.steps, self.alerts
        # Alerts are delivered after the end: what a callback raises must not prevent it. And a step that is
        # recorded well here does not undo the failure that ended the program.
        (callbacks, alerts.callbacks), failed = (alerts.callbacks, []), steps.failure
        with self.guard.shield("ending the attachment"):
            self.detach()
            steps.end_logged()
        alerts.callbacks, steps.failure = callbacks, failed
        if steps.early:
            names = ", ".join(sorted(map(str, steps.early)))[:200]
            self.guard.warn_once(
                "early",
                "no step followed that %s could be recorded with: use `with run.step()`, or run.log(..., "
                "step=number).",
                names,
            )

    def _finish(self, timeout: float, document: FinishDocument) -> FinishReport:
        if self.settings.mode == "disabled":
            return FinishReport(complete=True)
        report = self.writers.finish(document, timeout, leaving=self._is_leaving)
        if self.console is not None:
            self.console.stop()
        failed = bool(self.steps.failure)
        if not self.writers.forked:
            self._remember(over=not failed)
        report = replace(report, errors=self.guard.errors)
        if not report.complete and self.writers.pipeline.started:
            sender = self.writers.sender
            log_unsent(self.name, self.settings.mode, report, sender.trouble if sender is not None else "")
        else:
            log_losses(self.name, report)
        if self.page:
            self._say(f"run {self.name} has {'failed' if failed else 'finished'}: {self.page}")
        return report

    def _finish_document(self) -> dict[str, Any]:
        dropped, errors = self.guard.counts()
        return {
            "state": "failed" if self.steps.failure else "finished",
            "error": self.steps.failure,
            # A forked child is one writer less, not the end of the run.
            "ends_run": not self.writers.forked,
            "dropped": dropped,
            "errors": errors,
            "finished_at": datetime.now(UTC).isoformat(),
        }
