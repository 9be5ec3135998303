"""Running the detectors over what a run has stored, each row once, and keeping what they find.

A run is evaluated by one worker at a time: the row lock of its own DetectorState is the mutex. States and
events are written in one transaction, so that a worker that dies in between leaves nothing half done: the
next one begins where the last committed one ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from uuid import UUID

import numpy as np
from django.db import transaction
from django.utils import timezone

from fp8scope_dashboard.alerts import baselines, events, rules
from fp8scope_dashboard.alerts.detectors import (
    Finding,
    LossDetector,
    State,
    divergence,
    not_finite,
    overflow_rates,
    saturation,
    spike,
)
from fp8scope_dashboard.alerts.models import RUN_WIDE, DetectorState, Event, Rule
from fp8scope_dashboard.analysis import lineage
from fp8scope_dashboard.receipts.models import Receipt
from fp8scope_dashboard.runs.models import Run, Tensor, Writer
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.codec import ChunkData

# Chunks of one writer that are held in memory, and read in one transaction.
CHUNKS_AT_ONCE = 16
# A message that is missing while later ones have arrived is waited for this long (it may be on its way, or
# refused for good), then the detectors go on without it.
GAP_PATIENCE = timedelta(seconds=60)
NOT_ALL_READ = -1

LOSS_DETECTORS: Mapping[str, LossDetector] = {
    "loss_not_finite": not_finite,
    "loss_divergence": divergence,
    "loss_spike": spike,
}
# Ranks other than the lowest see losses of their own data: they are asked only whether these are finite.
ANY_RANK = ("loss_not_finite",)
SATURATION_STATISTICS = ("saturated", "nonfinite", "numel")


@dataclass
class Pass:
    """What one transaction works with."""

    run: Run
    rules: list[Rule]
    states: dict[UUID, DetectorState]
    found: list[tuple[Rule, Finding]] = field(default_factory=list)
    # Writers whose state has changed.
    touched: set[UUID] = field(default_factory=set)
    # Whether more can be read at once, and whether something is waited for.
    more: bool = False
    waiting: bool = False

    def state(self, writer: UUID) -> DetectorState:
        return self.states.setdefault(writer, DetectorState(run=self.run, writer=writer))


def evaluate(run_id: UUID) -> list[Event]:
    """Read what is new of a run, and of the baseline it is compared with; return the events that opened.

    Calling it again, or in several workers at once, reads nothing twice. A run that is gone has no events.
    """
    opened = []
    while True:
        events, more = _evaluate_some(run_id)
        opened += events
        if not more:
            return opened


@transaction.atomic
def _evaluate_some(run_id: UUID) -> tuple[list[Event], bool]:
    run = Run.objects.select_related("project").filter(pk=run_id).first()
    if run is None:
        return [], False
    # Before anything is read: what is stored meanwhile is then known to be unread.
    rows = lineage.rows_behind(run)
    shared = _locked(run)
    states = {state.writer: state for state in DetectorState.objects.filter(run=run)} | {RUN_WIDE: shared}
    work = Pass(run, list(Rule.objects.filter(project=run.project, enabled=True).order_by("id")), states)
    _read_writers(work)
    if not work.more:
        _read_baseline(work)
    shared.rows = NOT_ALL_READ if work.more or work.waiting else rows
    for writer in work.touched | {RUN_WIDE}:
        work.state(writer).updated_at = timezone.now()
        work.state(writer).save()
    return events.apply(run, work.found, list(work.states.values())), work.more


def _locked(run: Run) -> DetectorState:
    DetectorState.objects.get_or_create(run=run, writer=RUN_WIDE)
    return DetectorState.objects.select_for_update().get(run=run, writer=RUN_WIDE)


def _read_writers(work: Pass) -> None:
    writers = list(Writer.objects.filter(run=work.run).order_by("rank", "-created_at", "uuid"))
    for writer in writers:
        if writer.imported:
            continue
        leads = writer.rank == writers[0].rank
        columns: list[str] | None = None
        for data in _new_chunks(work, writer.uuid):
            columns = columns if columns is not None else _column_names(work.run, writer)
            work.found += _detect(work, work.state(writer.uuid).state, data, columns, leads)


def _column_names(run: Run, writer: Writer) -> list[str]:
    """The names of the entries of a writer's catalogue."""
    names = dict(Tensor.objects.filter(run=run).values_list("index", "name"))
    return [names.get(index, f"tensor {index}") for index in writer.catalogue]


def _new_chunks(work: Pass, writer: UUID) -> Iterator[ChunkData]:
    """This writer's next chunks, in order; afterwards the state says from where to go on."""
    state = work.state(writer)
    until = _readable_until(work, writer, state.next_seq)
    if until == state.next_seq:
        return
    work.touched.add(writer)
    chunks = queries.stream(
        work.run.id,
        writer,
        state.next_seq,
        CHUNKS_AT_ONCE,
        until=until,
        scalars=("loss",),
        statistics=SATURATION_STATISTICS,
    )
    yield from (data for _, data in chunks)
    if len(chunks) == CHUNKS_AT_ONCE:
        state.next_seq = chunks[-1][0] + 1
        work.more = True
    else:
        state.next_seq = until


def _readable_until(work: Pass, writer: UUID, start: int) -> int:
    """The first seq that has not arrived, or that of the first message after it where waiting is over."""
    until = queries.contiguous_until(work.run.id, writer, start)
    beyond = Receipt.objects.filter(run=work.run, writer=writer, seq__gt=until).order_by("seq").first()
    if beyond is None:
        return until
    if beyond.received_at > timezone.now() - GAP_PATIENCE:
        work.waiting = True
        return until
    work.more = True
    return beyond.seq


def _detect(
    work: Pass, states: State, data: ChunkData, columns: list[str], leads: bool
) -> list[tuple[Rule, Finding]]:
    found: list[tuple[Rule, Finding]] = []
    for rule in work.rules:
        key, parameters = str(rule.pk), rules.validate(rule.kind, rule.parameters)
        before: State = states.get(key, {})
        if rule.kind in LOSS_DETECTORS and "loss" in data.logged and (leads or rule.kind in ANY_RANK):
            logged = data.logged["loss"]
            detector = LOSS_DETECTORS[rule.kind]
            states[key], findings = detector(
                before, data.steps[logged], data.scalars["loss"][logged], parameters
            )
        elif rule.kind == "saturation_rate" and {"saturated", "numel"} <= set(data.statistics):
            states[key], findings = saturation(
                before, data.steps, _rates(data, len(columns)), columns, parameters
            )
        else:
            continue
        found += [(rule, finding) for finding in findings]
    return found


def _rates(data: ChunkData, width: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Overflow rates with a column for every entry of the catalogue, NaN where a chunk has none for it."""
    rates = np.full((len(data), width), np.nan)
    arrays = [data.statistics.get(name) for name in SATURATION_STATISTICS]
    shared = min([width, *(array.shape[1] for array in arrays if array is not None)])
    saturated, nonfinite, numel = (None if array is None else array[:, :shared] for array in arrays)
    assert saturated is not None and numel is not None
    rates[:, :shared] = overflow_rates(saturated, nonfinite, numel)
    return rates


def _read_baseline(work: Pass) -> None:
    chosen = [rule for rule in work.rules if rule.kind == "above_baseline"]
    if not chosen or not work.run.baseline:
        return
    if not Writer.objects.filter(run=work.run, imported=False).exists():
        return
    states = work.state(RUN_WIDE).state
    for rule in chosen:
        parameters = {
            **rules.validate(rule.kind, rule.parameters),
            "margin": work.run.project.margin,
            "alpha": work.run.project.alpha,
        }
        followed = baselines.follow(work.run, states.get(str(rule.pk), {}), parameters)
        states[str(rule.pk)] = followed.state
        work.waiting |= followed.waiting
        work.found += [(rule, finding) for finding in followed.findings]
