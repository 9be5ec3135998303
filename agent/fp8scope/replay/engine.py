"""Drives a script that is run again to one step of an incident, and studies that step.

The batches lead the way. `Run.batches` asks the engine for them, on the training thread between two steps:

* from a snapshot, the state is loaded before the first batch, and the script trains on the kept batches up
  to the step;
* from the start, the script trains on its own batches, as it did in the run, up to the step.

Then the step is trained in several passes (`fp8scope.replay.passes`), and the script is ended.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from fp8scope.control.training_state import clone_batch
from fp8scope.incidents.batches import BatchLog, KeptBatch
from fp8scope.incidents.flight_recorder import FlightRecorder
from fp8scope.incidents.folder import Incident, IncidentError
from fp8scope.incidents.rates import before_steps, set_rates
from fp8scope.incidents.snapshots import SnapshotError, Trained, restore_random
from fp8scope.recording.records import Row
from fp8scope.replay import limits
from fp8scope.replay.passes import (
    More,
    OnProgress,
    Pass,
    Passes,
    bisection_of,
    recorded_since,
    same_gradient,
)
from fp8scope.replay.verdict import Finding, loss_in, same_bits

HOW_TO_STUDY = (
    "For the comparison with BF16 the script must take its batches from run.batches(...) and call "
    "run.allow_snapshots(model, optimizer)."
)
NO_FP8 = "The model has no layer in FP8: there is nothing to compare with BF16."


class EndScript(BaseException):  # noqa: N818 - no error: the script has done what it is for
    """Ends the script. Not an Exception, which the script may handle."""


class Engine:
    """Replays `step` of an incident. `snapshot`: the step to begin after; None: the script's beginning."""

    keeps_incidents = False

    def __init__(
        self, incident: Incident, step: int, snapshot: int | None, *, on_progress: OnProgress
    ) -> None:
        self.finding: Finding | None = None
        self.problem = ""
        """Why there is no finding."""
        self._incident = incident
        self._step = step
        self._snapshot = snapshot
        self._on_progress = on_progress
        self._group = incident.group_of(step)
        self._log = BatchLog(0)
        """Counts the groups of batches of this process."""
        self._serves = False
        self._rates: list[Any] = []
        """The learning rates of the steps of optimizers that come next."""
        self._first_difference: int | None = None

    # Called by the flight recorder

    def serve(self, flight: FlightRecorder, source: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of the script until the step is studied; then end the script."""
        self._serves = True
        try:
            if self._snapshot is None:
                yield from self._from_start(flight, iter(source))
                # An epoch is over. The script goes on with the next.
                return
            yield from self._from_snapshot(flight, self._snapshot)
        except (SnapshotError, IncidentError) as error:
            self.problem = str(error)
        raise EndScript

    def step_ended(self, flight: FlightRecorder, number: int) -> None:
        """End the script after the step if it does not take its batches from `run.batches`."""
        if self._serves:
            return
        if self._snapshot is not None:
            self.problem = (
                "the script does not take its batches from run.batches(...), so a replay cannot begin at a "
                "snapshot. Use --from-start."
            )
            raise EndScript
        if number >= self._step:
            flight.session.steps.pipeline.write_out()
            rows = [row for row in flight.ring.rows_since(0) if row.step == self._step]
            self.finding = self._found(rows[-1] if rows else None, notes=(HOW_TO_STUDY,))
            raise EndScript

    # The way to the step

    def _from_start(self, flight: FlightRecorder, source: Iterator[Any]) -> Iterator[Any]:
        added = flight.ring.added
        for batch in source:
            completed = flight.session.steps.completed
            if self._log.begins_group(completed):
                self._log.begin_group(completed)
                if self._is_reached(completed):
                    self._compare(recorded_since(flight, added))
                    yield from self._study(flight, [KeptBatch.of(batch)], source.__next__)
                    raise EndScript
            self._log.add(batch)
            yield batch

    def _is_reached(self, completed: int) -> bool:
        """Whether the group of batches that begins now is the step's."""
        if self._group is None:
            # The script took no batches from `run.batches` when it was recorded.
            return completed >= self._step - 1
        return self._log.ordinal == int(self._group["ordinal"])

    def _from_snapshot(self, flight: FlightRecorder, after: int) -> Iterator[Any]:
        if flight.trained is None:
            raise SnapshotError("the script must call run.allow_snapshots before its first batch.")
        flight.trained.load(self._incident.snapshot(after))
        if flight.session.steps.open is None:
            flight.session.steps.number = after
        end_hooks = before_steps(flight.trained.optimizers, self._set_rates)
        try:
            for group in self._groups_from(after):
                kept = self._kept_of(group)
                rows = self._rows_of(group)
                self._rates = list(group["rates"])
                if group == self._group:
                    yield from self._study(flight, kept, None)
                    return
                added = flight.ring.added
                for each in kept:
                    restore_random(each.random)
                    yield clone_batch(each.batch)
                self._compare(recorded_since(flight, added), rows)
        finally:
            end_hooks()

    def _set_rates(self, optimizer: Optimizer) -> None:
        if self._rates:
            set_rates(optimizer, self._rates.pop(0))

    def _groups_from(self, after: int) -> list[dict[str, Any]]:
        groups = self._incident.groups
        first = next((index for index, group in enumerate(groups) if group["after_step"] == after), None)
        if first is None or self._group is None:
            raise SnapshotError(f"the batches after step {after} were not kept.")
        return groups[first:]

    def _kept_of(self, group: dict[str, Any]) -> list[KeptBatch]:
        after = int(group["after_step"])
        if not self._incident.has_batches(after):
            raise SnapshotError(
                f"the batches after step {after} were not kept: they exceeded the recorder's memory. Use "
                "--from-start."
            )
        return [KeptBatch(batch, random, 0) for batch, random in self._incident.batches(after)]

    def _rows_of(self, group: dict[str, Any]) -> list[Row]:
        """The recorded rows of the steps that trained on a group."""
        rows = [row for row in self._incident.rows if self._incident.group_of(row.step) == group]
        return sorted(rows, key=lambda row: row.step)

    def _compare(self, replayed: Sequence[Row], recorded: Sequence[Row] | None = None) -> None:
        """Note the first step on the way whose loss is another one than recorded."""
        by_step = {row.step: row for row in self._incident.rows}
        pairs = (
            [(row, by_step[row.step]) for row in replayed if row.step in by_step]
            if recorded is None
            else list(zip(replayed, recorded, strict=False))
        )
        for mine, theirs in pairs:
            one, other = loss_in(mine.scalars), loss_in(theirs.scalars)
            differs = one is not None and other is not None and not same_bits(one, other)
            if differs and self._first_difference is None:
                self._first_difference = theirs.step

    # The step

    def _study(self, flight: FlightRecorder, kept: list[KeptBatch], more: More | None) -> Iterator[Any]:
        """Yield the batches of the step for all passes of it, and set `finding`."""
        rows = [] if self._group is None else self._rows_of(self._group)
        place = next((index for index, row in enumerate(rows) if row.step == self._step), 0)

        def row_in(one: Pass) -> Row | None:
            return one.rows[place] if len(one.rows) > place else None

        def loss_of(one: Pass) -> float | None:
            row = row_in(one)
            return None if row is None else loss_in(row.scalars)

        notes = self._notes(flight)
        passes = Passes(flight, flight.trained or Trained([], []), kept)
        with passes.watched():
            first: Pass = yield from passes.first(more)
            self.finding = self._found(row_in(first), notes=notes)
            if flight.trained is None:
                self.finding = self._found(row_in(first), notes=(*notes, HOW_TO_STUDY))
                return
            if not passes.layers:
                self.finding = self._found(row_in(first), notes=(*notes, NO_FP8))
                return
            total: Pass = yield from passes.again(None)
            loss, repeated = loss_of(first), loss_of(total)
            known = loss is not None and repeated is not None
            same = not known or same_bits(loss or 0.0, repeated or 0.0)
            if not (same and same_gradient(first, total)):
                self.finding = self._found(row_in(first), repeatable=False, repeated=repeated, notes=notes)
                return
            bisection = yield from bisection_of(passes, total, loss_of, self._on_progress)
            repeatable = True if bisection is not None and known else None
            self.finding = self._found(
                row_in(first),
                repeatable=repeatable,
                repeated=repeated,
                bisection=bisection,
                notes=notes,
            )

    def _notes(self, flight: FlightRecorder) -> tuple[str, ...]:
        """Why a replay from the start may not be the recorded training.

        The last step of the way is recorded earlier than it was in the run, so the one before it is compared.
        """
        before = self._step - 2
        recorded, replayed = self._incident.random(before), flight.random_at(before)
        if self._snapshot is not None or recorded is None or replayed is None:
            return ()
        if torch.equal(recorded, replayed):
            return ()
        return (f"torch's random state after step {before} is another one than in the run: seed the script.",)

    def _found(self, row: Row | None, *, notes: Sequence[str], **more: Any) -> Finding:
        recorded = self._incident.row(self._step)
        return Finding(
            self._step,
            None if recorded is None else loss_in(recorded.scalars),
            None if row is None else loss_in(row.scalars),
            first_difference=self._first_difference,
            notes=(*notes, *limits.notes(self._incident.document)),
            **more,
        )
