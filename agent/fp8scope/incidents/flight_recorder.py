"""The flight recorder of a run: it keeps the last steps in full, and writes them out as an incident.

It always keeps the rows of the last steps and torch's random state at the end of each. What a replay needs
besides them has to be allowed by the script: `Run.batches` shows it the batches, and `Run.allow_snapshots`
lets it copy the state of the training every so many steps, and the batches since then.

An incident is written when a critical alert about one of the kept steps arrives, and when the run fails.
"""

import logging
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8scope.config import ConfigurationError
from fp8scope.control.controller import RunController
from fp8scope.delivery.inbox import Alert
from fp8scope.incidents.folder import Contents, target_of, write
from fp8scope.incidents.ring import StepRing
from fp8scope.metadata.redaction import script_command
from fp8scope.recording.records import Bytes, Row
from fp8scope.scalars import whole_steps
from fp8scope.session.session import Session

if TYPE_CHECKING:
    import torch

    from fp8scope.incidents.batches import BatchLog, Driver
    from fp8scope.incidents.snapshots import Snapshot, Trained

MAX_INCIDENTS = 4
"""Incidents that one process writes."""
RANDOM_STATES = 64
"""Steps of which torch's random state is kept, of 5 kB each."""
SNAPSHOTS = 2
"""The two latest: between them lie at least `every` steps, in which an alert may arrive late."""
MAX_BYTES = 8 << 30
BATCH_BYTES = 256 << 20
WRITE_SECONDS = 60.0
"""Seconds that the end of a run waits for an incident that is being written."""
DEVICE_SECONDS = 2.0
"""Seconds that the end of a run that failed waits for the values of its last steps."""
CRITICAL = "critical"
MAX_WHY = 500
LAST_STEPS = 3
"""`sys.exit` with a failure status keeps an incident if one of so many steps before it was not finite."""
logger = logging.getLogger("fp8scope")


class FlightRecorder:
    """Belongs to one run. The training thread uses it, except where noted."""

    def __init__(self, session: Session, controller: RunController) -> None:
        steps = session.settings.flight_steps
        self.session = session
        self.ring = StepRing(max(steps, 1))
        self.trained: Trained | None = None
        """What `allow_snapshots` was given."""
        self.log: BatchLog | None = None
        """The batches that the script draws through `Run.batches`."""
        self.snapshots: deque[tuple[int, int, Snapshot]] = deque(maxlen=SNAPSHOTS)
        """Each with the step after which it was taken, and the number of the group of batches after it."""
        self._pinned: tuple[int, int, Snapshot] | None = None
        """The one from before an alert's onset, which is kept while its batches are."""
        self._controller = controller
        self._random: deque[tuple[int, torch.Tensor]] = deque(maxlen=RANDOM_STATES)
        self._every = 0
        self._max_bytes = MAX_BYTES
        self._covered = -1
        """The last step of the latest incident."""
        self._count = 0
        self._written: deque[dict[str, Any]] = deque()
        self._writer: threading.Thread | None = None
        self._end_hooks: Callable[[], None] = lambda: None
        self._enabled = steps > 0 and session.settings.mode != "disabled"
        if self._enabled:
            session.steps.flight = self
            session.alerts.listeners.append(self.take_alert)
            session.before_end.append(self.end)

    # Every step

    @property
    def needs_each_step(self) -> bool:
        """Return whether the training shows its batches, or is a replay."""
        return self.log is not None or _driver() is not None

    def step_ends(self, number: int, *, is_light: bool = False) -> None:
        """A step is being recorded: keep the random state, and let a replay look at the step."""
        torch: Any = sys.modules.get("torch")
        # The copy is a large part of a short step. A replay, which uses it, needs the batches as well.
        is_spared = is_light and not self.needs_each_step
        if torch is not None and not is_spared:
            self._random.append((number, torch.default_generator.get_state()))
        driver = _driver()
        if driver is not None:
            driver.step_ended(self, number)

    def keep_row(self, pieces: Sequence[Bytes]) -> None:
        """Keep a row. Called by the thread that records it."""
        self.ring.add(pieces)

    def random_at(self, number: int) -> "torch.Tensor | None":
        """torch's random state when step `number` was recorded; None if it is not kept."""
        return next((state for step, state in reversed(self._random) if step == number), None)

    # Batches and snapshots

    def batches(self, source: Iterable[Any]) -> "Batches":
        """See `Run.batches`."""
        return Batches(self, source)

    def allow_snapshots(
        self,
        model: "torch.nn.Module | Sequence[torch.nn.Module]",
        optimizer: "torch.optim.Optimizer | Sequence[torch.optim.Optimizer]",
        *,
        every: int,
        also: Sequence[Any],
        max_bytes: int,
    ) -> None:
        """See `Run.allow_snapshots`. Raises ConfigurationError if an argument is invalid."""
        try:
            whole_steps(every)
        except ValueError as error:
            raise ConfigurationError(f"{error}.") from None
        for stateful in also:
            if not (hasattr(stateful, "state_dict") and hasattr(stateful, "load_state_dict")):
                raise ConfigurationError(
                    f"{type(stateful).__name__} has no state_dict and load_state_dict, so it cannot be kept."
                )
        # Needs torch.
        from torch import nn
        from torch.optim import Optimizer

        from fp8scope.incidents.rates import before_steps
        from fp8scope.incidents.snapshots import Trained

        models = [model] if isinstance(model, nn.Module) else list(model)
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self.trained = Trained(models, optimizers, also)
        self._every, self._max_bytes = every, max_bytes
        self._end_hooks()
        self._end_hooks = before_steps(optimizers, self._note_rates)

    def before_draw(self) -> None:
        """The script asks for a batch. After a step, begin a group, and take a snapshot if one is due."""
        completed, log = self.session.steps.completed, self._batch_log()
        if not log.begins_group(completed):
            return
        with self.session.guard.shield("taking a snapshot of the training"):
            self._snapshot_if_due(completed, log)
        log.begin_group(completed)

    def drawn(self, batch: Any) -> None:
        """The script has drawn a batch."""
        log = self._batch_log()
        with self.session.guard.shield("keeping a batch"):
            log.add(batch)
        if log.overflowed:
            self.session.guard.warn_once(
                "flight batches",
                "the batches since the last snapshot exceed %d MiB and are not kept: take more snapshots.",
                BATCH_BYTES >> 20,
            )

    def _note_rates(self, optimizer: "torch.optim.Optimizer") -> None:
        if self.log is not None:
            with self.session.guard.shield("noting the learning rates"):
                self.log.note_rates(optimizer)

    def _batch_log(self) -> "BatchLog":
        if self.log is None:
            # Needs torch.
            from fp8scope.incidents.batches import BatchLog

            self.log = BatchLog(BATCH_BYTES)
        return self.log

    def _snapshot_if_due(self, completed: int, log: "BatchLog") -> None:
        trained = self.trained
        if trained is None or not self._every or not self._enabled:
            return
        if self.snapshots and 0 <= completed - self.snapshots[-1][0] < self._every:
            return
        size = trained.nbytes
        if SNAPSHOTS * size > self._max_bytes:
            self.session.guard.warn_once(
                "snapshots",
                "no snapshots are taken: %d of %.1f GiB would exceed allow_snapshots(max_bytes=%d).",
                SNAPSHOTS,
                size / (1 << 30),
                self._max_bytes,
            )
            return
        self.snapshots.append((completed, log.ordinal + 1, trained.capture()))
        log.keeps = True
        if self._pinned is not None and not log.reaches_back_to(self._pinned[1]):
            self._pinned = None
        log.forget_before(self._kept_snapshots()[0][1])

    def _kept_snapshots(self) -> list[tuple[int, int, "Snapshot"]]:
        """The latest snapshots, and before them the pinned one."""
        latest = list(self.snapshots)
        is_apart = self._pinned is not None and self._pinned not in latest
        return [self._pinned, *latest] if is_apart and self._pinned is not None else latest

    def _pin(self, alert: Alert) -> None:
        """Keep the latest snapshot from before an alert's onset: later ones may have what is wrong in them.

        The first alert decides, as long as the batches since that snapshot are kept.
        """
        onset = alert.step if alert.onset_step is None else alert.onset_step
        if onset is None or self._pinned is not None or self.trained is None:
            return
        if (SNAPSHOTS + 1) * self.trained.nbytes > self._max_bytes:
            return
        before = [snapshot for snapshot in self.snapshots if snapshot[0] < onset]
        self._pinned = before[-1] if before else None

    # Incidents

    def take_alert(self, alert: Alert) -> None:
        """An alert has arrived. Called on the sender's thread; the training thread acts on it."""
        if self._enabled and self._every:
            self._controller.call_at_boundary(lambda: self._pin(alert))
        if alert.severity == CRITICAL:
            self._controller.call_at_boundary(lambda: self.keep("alert", alert=alert))

    def keep(self, reason: str, *, alert: Alert | None = None, failure: str = "") -> None:
        """Write an incident in the background, unless the latest one has these steps already."""
        session = self.session
        with session.guard.shield("keeping an incident"):
            # The last steps may still be in the queue.
            session.steps.pipeline.settle()
            payloads = self.ring.payloads()
            driver = _driver()
            if not payloads or session.writers.forked or (driver and not driver.keeps_incidents):
                return
            first, last = Row.decode(payloads[0]).step, Row.decode(payloads[-1]).step
            onset = None if alert is None else alert.step if alert.onset_step is None else alert.onset_step
            # A resumed run gets the alerts of its earlier attempts once more. What is old is told by the step
            # at which the alert was noticed: its onset may be long before, where a slow rise began.
            noticed = onset if alert is None or alert.step is None else alert.step
            is_old = alert is not None and (noticed is None or not first <= noticed <= last)
            if is_old or (onset if onset is not None else last) <= self._covered:
                return
            if self._count >= MAX_INCIDENTS:
                session.guard.warn_once("incidents", "%d incidents are kept; no more.", MAX_INCIDENTS)
                return
            self._count, self._covered = self._count + 1, last
            contents = self._contents(payloads, reason, alert, failure)
            self._join()
            self._writer = threading.Thread(
                target=self._write, args=(contents, onset), name="fp8scope-incident", daemon=True
            )
            self._writer.start()

    def end(self) -> None:
        """The run ends: keep an incident if it failed, and wait until all are written."""
        failure = self.session.steps.failure
        if failure:
            # The last step, which may be the one that failed, may still be on its way from the device.
            self.session.steps.pipeline.settle(DEVICE_SECONDS)
        if failure and self._is_of_training(failure):
            self.keep("failure", failure=failure)
        self._join()
        self._report()
        self._end_hooks()
        # The run may live on as an object; a model must not live on with it.
        self.trained = self._pinned = None
        self.snapshots.clear()

    def _is_of_training(self, failure: str) -> bool:
        """Return whether a failure may come from the last steps.

        Not Ctrl-C, nor `sys.exit` after finite values.
        """
        last = failure.rstrip().rpartition("\n")[2]
        if last.startswith("KeyboardInterrupt"):
            return False
        if not last.startswith("SystemExit"):
            return True
        self.session.steps.pipeline.settle()
        rows = [Row.decode(payload) for payload in self.ring.payloads()[-LAST_STEPS:]]
        return not all(math.isfinite(value) for row in rows for value in row.scalars.values())

    def _contents(
        self, payloads: Sequence[bytes], reason: str, alert: Alert | None, failure: str
    ) -> Contents:
        """Return what there is now; the training thread goes on while it is written."""
        session, registration = self.session, self.session.registration.document
        groups = list(self.log.groups) if self.log is not None else []
        taken = self._kept_snapshots()
        since = taken[0][1] if taken else sys.maxsize
        batches = {
            group.after_step: list(group.stored)
            for group in groups
            if group.stored is not None and group.ordinal >= since
        }
        origin = session.writers.origin
        tensors, statistics = session.steps.collector.described()
        document = {
            "run": session.writers.run,
            "name": session.name,
            "page": session.page,
            "writer": session.writers.pipeline.writer,
            "rank": origin.rank,
            "host": origin.hostname,
            "attempt": origin.attempt,
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "reason": reason,
            "alert": None if alert is None else asdict(alert),
            "failure": failure,
            "precision": registration["precision"],
            "recipe": registration["recipe"],
            "seed": registration["seed"],
            "config": registration["config"],
            "environment": registration["environment"],
            "tensors": tensors,
            "statistics": statistics,
            "events": list(session.sent_reports),
            "groups": [group.describe() for group in groups],
            "snapshots": [step for step, _, _ in taken],
        }
        snapshots = {step: snapshot for step, _, snapshot in taken}
        return Contents(document, payloads, list(self._random), snapshots, batches)

    def _write(self, contents: Contents, onset: int | None) -> None:
        """Write an incident, on a thread for it."""
        with self.session.guard.shield("writing an incident"):
            rows = [Row.decode(payload) for payload in contents.rows]
            target = target_of(rows, onset)
            contents.document |= {"target": target, "steps": [rows[0].step, rows[-1].step]}
            folder = _unused(self.session.writers.pipeline.directory.parent / f"incident-step-{target}")
            contents.document["bytes"] = size = write(contents, folder)
            script = script_command()
            logger.info("an incident at step %d is kept: fp8scope replay %s %s", target, folder, script)
            self._written.append(
                {
                    "reason": contents.document["reason"],
                    "alert": (contents.document["alert"] or {}).get("id"),
                    "target": target,
                    "first_step": rows[0].step,
                    "last_step": rows[-1].step,
                    "snapshots": contents.document["snapshots"],
                    "folder": str(folder)[-500:],
                    "host": contents.document["host"],
                    "rank": contents.document["rank"],
                    "bytes": size,
                }
            )
            self._controller.call_at_boundary(self._report)

    def _report(self) -> None:
        """Tell the server of the incidents that are written."""
        while self._written:
            incident = self._written.popleft()
            self.session.send_report(
                "annotation",
                name="incident",
                text=f"Incident kept: steps {incident['first_step']} to {incident['last_step']}",
                why=f"fp8scope replay {incident['folder'][-300:]} {script_command()}"[:MAX_WHY],
                layers=[],
                incident=incident,
            )

    def _join(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.join(WRITE_SECONDS)


class Batches:
    """The batches of a script, one iteration at a time; made by `Run.batches`."""

    def __init__(self, flight: FlightRecorder, source: Iterable[Any]) -> None:
        self._flight = flight
        self._source = source

    def __len__(self) -> int:
        return len(self._source)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        flight = self._flight
        if not flight.session.active:
            yield from self._source
            return
        # Needs torch.
        from fp8scope.incidents import batches

        if batches.driver is not None:
            yield from batches.driver.serve(flight, self._source)
            return
        iterator = iter(self._source)
        while True:
            flight.before_draw()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            flight.drawn(batch)
            yield batch


def _driver() -> "Driver | None":
    """Return what hands out batches in a replay. Its module needs torch, so it may not be loaded."""
    batches: Any = sys.modules.get("fp8scope.incidents.batches")
    return None if batches is None else batches.driver


def _unused(folder: Path) -> Path:
    """The folder, with a number after its name if it exists."""
    candidate, number = folder, 1
    while os.path.lexists(candidate):
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate
