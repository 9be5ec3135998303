"""The way of a replay that begins at a snapshot: the script trains on the kept batches."""

from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch.optim import Optimizer

from fp8scope.control.training_state import clone_batch
from fp8scope.incidents.batches import KeptBatch
from fp8scope.incidents.flight_recorder import FlightRecorder
from fp8scope.incidents.folder import StoredIncident
from fp8scope.incidents.rates import before_steps, set_rates
from fp8scope.incidents.snapshots import SnapshotError, Trained, restore_random
from fp8scope.recording.records import Row
from fp8scope.replay.passes import layers_in_fp8, recorded_since
from fp8scope.replay.search import Stage, search
from fp8scope.replay.study import Study
from fp8scope.replay.verdict import loss_in

Group: TypeAlias = dict[str, Any]
"""As `fp8scope.incidents.batches.Group.describe` returns it."""


class FromSnapshot:
    """Begins after one of the steps `snapshots`, see `Engine`."""

    def __init__(self, incident: StoredIncident, study: Study, snapshots: Sequence[int]) -> None:
        self.is_over = False
        self._incident = incident
        self._study = study
        self._snapshots = snapshots
        self._rates: list[Any] = []
        """The learning rates of the steps of optimizers that come next."""

    def turns(self, flight: FlightRecorder, source: Iterator[Any], *, searches: bool) -> Iterator[Any]:
        """Yield the kept batches instead of those of `source`; see `Way`."""
        self.is_over = True
        trained = flight.trained
        if trained is None:
            raise SnapshotError("the script must call run.allow_snapshots before its first batch.")
        end_hooks = before_steps(trained.optimizers, self._set_rates)
        try:
            for after in self._snapshots if searches and layers_in_fp8(trained) else []:
                stages = yield from self._stages_from(flight, trained, after)
                if any(self._study.step in stage.steps for stage in stages):
                    yield from search(
                        self._study, flight, self._incident.snapshot(after), stages, is_from_start=after == 0
                    )
                    return
            yield from self._to_step(flight, trained, self._snapshots[-1])
        finally:
            end_hooks()

    def _stages_from(
        self, flight: FlightRecorder, trained: Trained, after: int
    ) -> Generator[Any, None, list[Stage]]:
        """Train from a snapshot to the end of the incident, or to the first loss that is not the recorded."""
        stages: list[Stage] = []
        for group in self._begin(flight, trained, after):
            begin = int(group["after_step"])
            if begin >= self._incident.last_step or not self._incident.has_batches(begin):
                break
            rows = yield from self._train(flight, group)
            if self._study.first_difference is not None:
                break
            stages.append(
                Stage(
                    range(begin + 1, begin + 1 + len(rows)),
                    [loss_in(row.scalars) for row in rows],
                    partial(self._use_rates, group),
                    partial(self._batches_of, group),
                )
            )
        return [stage for stage in stages if stage.steps]

    def _to_step(self, flight: FlightRecorder, trained: Trained, after: int) -> Iterator[Any]:
        """Train from a snapshot to the step, and study it."""
        study = self._study
        target = self._incident.group_of(study.step)
        for group in self._begin(flight, trained, after):
            if group == target:
                index = study.step - int(group["after_step"]) - 1
                yield from study.of_step(
                    flight, self._batches_of(group), index=index, on_begin=partial(self._use_rates, group)
                )
                return
            yield from self._train(flight, group)

    def _begin(self, flight: FlightRecorder, trained: Trained, after: int) -> list[Group]:
        """Load a snapshot, and return the groups of batches after it."""
        groups = self._incident.groups
        first = next((index for index, group in enumerate(groups) if group["after_step"] == after), None)
        if first is None or self._incident.group_of(self._study.step) is None:
            raise SnapshotError(f"the batches after step {after} were not kept.")
        self._study.begin_way()
        trained.load(self._incident.snapshot(after))
        if flight.session.steps.open is None:
            flight.session.steps.number = after
        return groups[first:]

    def _train(self, flight: FlightRecorder, group: Group) -> Generator[Any, None, Sequence[Row]]:
        """Yield the batches of a group; return the rows of the steps that trained on them."""
        self._use_rates(group)
        added, begin = flight.ring.added, int(group["after_step"]) + 1
        for stored in self._batches_of(group):
            restore_random(stored.random)
            yield clone_batch(stored.batch)
        rows = recorded_since(flight, added)
        self._study.compare(rows, range(begin, begin + len(rows)))
        return rows

    def _use_rates(self, group: Group) -> None:
        self._rates = list(group["rates"])

    def _set_rates(self, optimizer: Optimizer) -> None:
        if self._rates:
            set_rates(optimizer, self._rates.pop(0))

    def _batches_of(self, group: Group) -> list[KeptBatch]:
        after = int(group["after_step"])
        if not self._incident.has_batches(after):
            raise SnapshotError(
                f"the batches after step {after} were not kept: they exceeded the recorder's memory. Use "
                "--from-start."
            )
        return [KeptBatch(batch, random, 0) for batch, random in self._incident.batches(after)]
