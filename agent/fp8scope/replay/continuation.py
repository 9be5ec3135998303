"""Goes on with a training from an incident's snapshot, without the batches of some steps.

The script draws its own batches. Those before the snapshot are passed over without training, then the state
is loaded. Batches whose hash is known are compared with those of the run.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.optim import Optimizer

from fp8scope.incidents.batches import host_hash
from fp8scope.incidents.flight_recorder import FlightRecorder
from fp8scope.incidents.folder import IncidentError, StoredIncident
from fp8scope.incidents.rates import before_steps, rates_of
from fp8scope.incidents.snapshots import SnapshotError, restore_random
from fp8scope.replay.engine import EndScript

# A script that sets the rate before it draws a batch has that of the snapshot in the first step: loading the
# optimizer's state replaces it. The second step shows the script's own.
COMPARED_STEPS = 2


class Continuation:
    """Leaves out the batches of the steps `first` to `last`. `snapshot`: the step to begin after; None: 0."""

    keeps_incidents = True

    def __init__(self, incident: StoredIncident, first: int, last: int, snapshot: int | None) -> None:
        self.problem = ""
        """Why the script was ended."""
        self.skipped = 0
        """Batches that were left out."""
        self._incident = incident
        self._snapshot = snapshot
        self._drawn = 0
        self._loaded = snapshot is None
        self._hashes: dict[int, int | None] = {}
        self._left_out: set[int] = set()
        self._begin = 0
        self._rates: list[list[float | None]] = []
        """The learning rates of the first steps after the snapshot, until they are compared."""
        concerned = [incident.group_of(step) for step in range(first, last + 1)]
        for group in incident.groups:
            places = range(group["position"], group["position"] + group["count"])
            self._hashes |= zip(places, group["hashes"], strict=False)
            if group in concerned:
                self._left_out |= set(places)
            if group["after_step"] == snapshot:
                self._begin = group["position"]
        following = [group for group in incident.groups if group["after_step"] >= (snapshot or 0)]
        for group in following[:COMPARED_STEPS] if snapshot is not None else []:
            if group in concerned:
                break
            self._rates += group["rates"]

    def serve(self, flight: FlightRecorder, source: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of the script, from the snapshot on, without those that are left out."""
        try:
            for batch in source:
                position, self._drawn = self._drawn, self._drawn + 1
                if position < self._begin:
                    continue
                self._check(position, batch)
                if not self._loaded:
                    self._load(flight)
                if position in self._left_out:
                    self.skipped += 1
                    continue
                flight.before_draw()
                flight.drawn(batch)
                yield batch
        except (SnapshotError, IncidentError) as error:
            self.problem = str(error)
            raise EndScript from None

    def step_ended(self, flight: FlightRecorder, number: int) -> None:
        """End the script if it does not take its batches from `run.batches`."""
        if self._drawn == 0:
            self.problem = "the script does not take its batches from run.batches(...)."
            raise EndScript

    def _check(self, position: int, batch: Any) -> None:
        expected, actual = self._hashes.get(position), host_hash(batch)
        if expected is not None and actual is not None and expected != actual:
            raise SnapshotError(
                f"batch {position + 1} of the script is another one than in the run: seed its data as it was "
                "then, and pass the same arguments."
            )

    def _load(self, flight: FlightRecorder) -> None:
        if flight.trained is None or self._snapshot is None:
            raise SnapshotError("the script must call run.allow_snapshots before its first batch.")
        self._loaded = True
        flight.trained.load(self._incident.snapshot(self._snapshot))
        if self._incident.has_batches(self._snapshot):
            restore_random(self._incident.batches(self._snapshot)[0][1])
        steps = flight.session.steps
        if steps.open is None:
            steps.number = self._snapshot
        registration = flight.session.registration
        if (
            not registration.document["parent"]
            and flight.session.writers.run != self._incident.document["run"]
        ):
            registration.document |= {"parent": self._incident.document["run"], "relation": "resumed"}
            registration.send()
        before_steps(flight.trained.optimizers, self._check_rates)

    def _check_rates(self, optimizer: Optimizer) -> None:
        """Compare the learning rates of the first steps with those of the run."""
        expected = self._rates.pop(0) if self._rates else []
        for rate, other in zip(rates_of(optimizer), expected, strict=False):
            if rate is not None and other is not None and abs(rate - other) > 1e-6 * abs(other):
                self.problem = (
                    f"the script sets the learning rate {rate:g} after the snapshot, and the run had "
                    f"{other:g}: take it from a scheduler that is passed to allow_snapshots(also=...), or "
                    "from the step in run.state_dict()."
                )
                raise EndScript
