"""Drives a script that is run again through the steps of an incident, and studies one of them.

The batches lead the way. `Run.batches` asks the engine for them, on the training thread between two steps:

* from a snapshot, the state is loaded before the first batch, and the script trains on the kept batches
  (`fp8scope.replay.from_snapshot`);
* from the start, the script trains on its own batches, as it did in the run (`fp8scope.replay.from_start`).

If one step is asked for, the way leads to it, and it is studied (`fp8scope.replay.study`). Else the way leads
to the end of the incident, and the first step in which FP8 and BF16 diverge is searched for on it
(`fp8scope.replay.search`). Then the script is ended.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from fp8scope.incidents.flight_recorder import FlightRecorder
from fp8scope.incidents.folder import IncidentError, StoredIncident
from fp8scope.incidents.snapshots import SnapshotError
from fp8scope.replay.from_snapshot import FromSnapshot
from fp8scope.replay.from_start import FromStart
from fp8scope.replay.passes import OnProgress
from fp8scope.replay.study import HOW_TO_STUDY, Study
from fp8scope.replay.verdict import ReplayResult, loss_in


class EndScript(BaseException):  # noqa: N818 - no error: the script has done what it is for
    """Ends the script. Not an Exception, which the script may handle."""


class ReplayPath(Protocol):
    """The way through the training to the steps of the incident."""

    def turns(self, flight: FlightRecorder, source: Iterator[Any], *, searches: bool) -> Iterator[Any]:
        """Yield the batches of an epoch, or of all that is to be trained.

        `searches`: whether to search for the first step in which FP8 and BF16 diverge.
        """

    is_over: bool
    """True if nothing follows what `turns` has yielded."""


class Engine:
    """Replays an incident.

    Args:
        step: The step to study alone; None to search for the first in which FP8 and BF16 diverge.
        snapshots: The steps to begin after. The first from which the recorded losses are reproduced is taken,
            else the last. Empty for the script's beginning.
        on_progress: Called with the number of batches that were searched, or of products that were studied,
            and of all.
    """

    keeps_incidents = False

    def __init__(
        self, incident: StoredIncident, step: int | None, snapshots: Sequence[int], *, on_progress: OnProgress
    ) -> None:
        self.problem = ""
        """Why there is no finding."""
        self._searches = step is None
        self._study = Study(
            incident,
            incident.target if step is None else step,
            is_from_start=not snapshots,
            on_progress=on_progress,
        )
        self._has_snapshots = bool(snapshots)
        self._way: ReplayPath = (
            FromSnapshot(incident, self._study, snapshots) if snapshots else FromStart(incident, self._study)
        )
        self._serves = False

    @property
    def finding(self) -> ReplayResult | None:
        """The result; None if the step was not reached."""
        return self._study.finding

    # Called by the flight recorder

    def serve(self, flight: FlightRecorder, source: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of the script until the step is studied; then end the script."""
        self._serves = True
        try:
            yield from self._way.turns(flight, iter(source), searches=self._searches)
        except (SnapshotError, IncidentError) as error:
            self.problem = str(error)
            raise EndScript from None
        if self._way.is_over:
            raise EndScript
        # An epoch is over. The script goes on with the next.

    def step_ended(self, flight: FlightRecorder, number: int) -> None:
        """End the script after the step if it does not take its batches from `run.batches`."""
        if self._serves:
            return
        if self._has_snapshots:
            self.problem = (
                "the script does not take its batches from run.batches(...), so a replay cannot begin at a "
                "snapshot. Use --from-start."
            )
            raise EndScript
        study = self._study
        if number >= study.step:
            flight.session.steps.pipeline.write_out()
            rows = [row for row in flight.ring.rows_since(0) if row.step == study.step]
            study.conclude(loss_in(rows[-1].scalars) if rows else None, HOW_TO_STUDY)
            raise EndScript
