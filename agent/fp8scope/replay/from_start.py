"""The way of a replay that begins with the script: it trains on its own batches, as it did in the run."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer

from fp8scope.incidents.batches import BatchLog, KeptBatch
from fp8scope.incidents.flight_recorder import BATCH_BYTES, FlightRecorder
from fp8scope.incidents.folder import StoredIncident
from fp8scope.incidents.rates import before_steps, set_rates
from fp8scope.incidents.snapshots import Snapshot
from fp8scope.recording.records import Row
from fp8scope.replay.passes import More, Pass, Passes, layers_in_fp8, recorded_since
from fp8scope.replay.search import Stage, search
from fp8scope.replay.study import Study
from fp8scope.replay.verdict import loss_in


class FromStart:
    """Goes from the beginning of the script to the step of the study, or to the end of the incident."""

    def __init__(self, incident: StoredIncident, study: Study) -> None:
        self.is_over = False
        self._incident = incident
        self._study = study
        self._log = BatchLog(BATCH_BYTES)
        """The groups of batches of this process. They are numbered as in the run."""
        self._begin: tuple[int, Snapshot] | None = None
        """The number of the group at which a search can begin, and the state before it."""
        self._added: int | None = None
        self._rates: list[Any] = []

    def turns(self, flight: FlightRecorder, source: Iterator[Any], *, searches: bool) -> Iterator[Any]:
        """Yield the batches of one epoch of the script, up to the step; see `Way`."""
        log, study = self._log, self._study
        target = self._incident.group_of(study.step)
        searches = (
            searches
            and target is not None
            and flight.trained is not None
            and bool(layers_in_fp8(flight.trained))
        )
        end = self._incident.group_of(self._incident.last_step) if searches else target
        if self._added is None:
            self._added = flight.ring.added
        for batch in source:
            completed = flight.session.steps.completed
            if log.begins_group(completed):
                if searches:
                    self._keep_batches(flight)
                log.begin_group(completed)
                # Without a group the script took no batches from `run.batches` when it was recorded.
                is_end = completed >= study.step - 1 if end is None else log.ordinal == int(end["ordinal"])
                if is_end:
                    self.is_over = True
                    rows = recorded_since(flight, self._added)
                    study.compare(rows, [row.step for row in rows])
                    study.note_random_state(flight)
                    batches = [KeptBatch.of(batch)]
                    if searches:
                        yield from self._search(flight, rows, batches, source.__next__)
                    else:
                        index = 0 if target is None else study.step - int(target["after_step"]) - 1
                        yield from study.of_step(
                            flight, batches, source.__next__, index=index, on_begin=lambda: None
                        )
                    return
            log.add(batch)
            yield batch

    def _keep_batches(self, flight: FlightRecorder) -> None:
        """Keep the batches from here on, and the state before them, once the incident has begun."""
        log = self._log
        number = log.ordinal + 1
        first = min(int(group["ordinal"]) for group in self._incident.groups)
        if flight.trained is None or number < first or (log.keeps and not log.overflowed):
            return
        # After an overflow a search can only begin here.
        log.keeps, self._begin = True, (number, flight.trained.capture())
        log.forget_before(number)

    def _search(
        self, flight: FlightRecorder, rows: Sequence[Row], batches: list[KeptBatch], more: More
    ) -> Iterator[Any]:
        """Train the last steps of the way, and search from where batches are kept, if that is the run."""
        study, trained = self._study, flight.trained
        assert trained is not None and self._begin is not None
        passes = Passes(flight, trained, batches)
        last: Pass = yield from passes.first(more)
        study.compare(last.rows, [row.step for row in last.rows])
        losses = {row.step: loss_in(row.scalars) for row in (*rows, *last.rows)}
        number, begin = self._begin
        difference = study.first_difference
        stages = [
            stage
            for stage in self._stages(number, losses, passes.batches)
            if difference is None or stage.steps[-1] < difference
        ]
        if any(study.step in stage.steps for stage in stages):
            end_hooks = before_steps(trained.optimizers, self._set_rates)
            try:
                yield from search(study, flight, begin, stages, is_from_start=number == 1)
            finally:
                end_hooks()
        else:
            study.conclude(losses.get(study.step))

    def _stages(self, number: int, losses: dict[int, float | None], last: list[KeptBatch]) -> list[Stage]:
        """The stages from group `number` on; `last` are the batches of the last one."""
        groups = [group for group in self._log.groups if group.ordinal >= number]
        ends = [group.after_step for group in groups[1:]] + [max(losses, default=0)]
        rates = {int(group["ordinal"]): group["rates"] for group in self._incident.groups}
        stages = []
        for group, end in zip(groups, ends, strict=True):
            steps = range(group.after_step + 1, end + 1)
            batches = last if group is groups[-1] else list(group.stored or ())
            if not steps or not all(step in losses for step in steps):
                continue
            stages.append(
                Stage(
                    steps,
                    [losses[step] for step in steps],
                    partial(self._use_rates, rates.get(group.ordinal, [])),
                    partial(list, batches),
                )
            )
        return stages

    def _use_rates(self, rates: Sequence[Any]) -> None:
        self._rates = list(rates)

    def _set_rates(self, optimizer: Optimizer) -> None:
        if self._rates:
            set_rates(optimizer, self._rates.pop(0))
