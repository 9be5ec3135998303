"""Compares a replay with what was recorded, and studies one step of it in FP8 and in BF16."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fp8scope.incidents.batches import KeptBatch
from fp8scope.incidents.flight_recorder import FlightRecorder
from fp8scope.incidents.folder import StoredIncident
from fp8scope.incidents.snapshots import Trained
from fp8scope.recording.records import Row
from fp8scope.replay import limits
from fp8scope.replay.passes import More, OnProgress, Pass, Passes, bisection_of, same_gradient
from fp8scope.replay.verdict import ReplayResult, SearchedSteps, loss_in, same_bits

HOW_TO_STUDY = (
    "For the comparison with BF16 the script must take its batches from run.batches(...) and call "
    "run.allow_snapshots(model, optimizer)."
)
NO_FP8 = "The model has no layer in FP8: there is nothing to compare with BF16."


class Study:
    """The result of a replay of `step`, as far as it has come."""

    def __init__(
        self, incident: StoredIncident, step: int, *, is_from_start: bool, on_progress: OnProgress
    ) -> None:
        self.step = step
        self.finding: ReplayResult | None = None
        self.first_difference: int | None = None
        """The first step on the way whose loss is another one than recorded."""
        self.search: SearchedSteps | None = None
        self.on_progress = on_progress
        self._incident = incident
        self._recorded = {row.step: row for row in incident.rows}
        self._is_from_start = is_from_start
        self._notes: tuple[str, ...] = ()

    def begin_way(self) -> None:
        """The way to the step begins, perhaps again from another snapshot."""
        self.first_difference = None

    def compare(self, rows: Sequence[Row], steps: Sequence[int]) -> None:
        """Compare the losses of these steps, which were trained in this order, with the recorded ones."""
        for step, row in zip(steps, rows, strict=True):
            if self.first_difference is not None or step not in self._recorded:
                continue
            mine, theirs = loss_in(row.scalars), loss_in(self._recorded[step].scalars)
            if mine is not None and theirs is not None and not same_bits(mine, theirs):
                self.first_difference = step

    def note_random_state(self, flight: FlightRecorder) -> None:
        """Note why a replay from the start may not be the recorded training.

        The last step of the way is recorded earlier than it was in the run, so the one before it is compared.
        """
        before = self.step - 2
        recorded, replayed = self._incident.random(before), flight.random_at(before)
        if not self._is_from_start or recorded is None or replayed is None:
            return
        if not torch.equal(recorded, replayed):
            self._notes = (
                f"torch's random state after step {before} is another one than in the run: seed the script.",
            )

    def conclude(self, loss: float | None, *notes: str, **more: Any) -> None:
        """Set the finding for a step whose replayed loss is `loss`; `more`: fields of a `ReplayResult`."""
        recorded = self._recorded.get(self.step)
        self.finding = ReplayResult(
            step=self.step,
            recorded=None if recorded is None else loss_in(recorded.scalars),
            replayed=loss,
            first_difference=self.first_difference,
            search=self.search,
            notes=(*self._notes, *notes, *limits.notes(self._incident.document)),
            **more,
        )

    def of_step(
        self,
        flight: FlightRecorder,
        batches: list[KeptBatch],
        more: More | None = None,
        *,
        index: int,
        on_begin: Callable[[], None],
    ) -> Iterator[Any]:
        """Yield the batches of the step for all passes of it, and conclude.

        Args:
            batches: Those of the step that are known; `more` draws the others.
            index: The place of the step among those that train on these batches.
            on_begin: Called before each pass.
        """

        def loss_of(result: Pass) -> float | None:
            return loss_in(result.rows[index].scalars) if len(result.rows) > index else None

        passes = Passes(flight, flight.trained or Trained([], []), batches, on_begin)
        with passes.watched():
            first: Pass = yield from passes.first(more)
            loss = loss_of(first)
            self.conclude(loss)
            if flight.trained is None or not passes.layers:
                self.conclude(loss, HOW_TO_STUDY if flight.trained is None else NO_FP8)
                return
            total: Pass = yield from passes.again(None)
            repeated = loss_of(total)
            is_told = loss is not None and repeated is not None
            is_same = not is_told or same_bits(loss or 0.0, repeated or 0.0)
            if not (is_same and same_gradient(first, total)):
                self.conclude(loss, repeatable=False, repeated=repeated)
                return
            bisection = yield from bisection_of(passes, total, loss_of, self.on_progress)
            repeatable = True if bisection is not None and is_told else None
            self.conclude(loss, repeatable=repeatable, repeated=repeated, bisection=bisection)
