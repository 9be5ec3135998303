"""Run the detectors over the stored rows of a run, each row once, and store their findings.

One worker at a time evaluates a run: the row lock of the run-wide DetectorState is the mutex. States and
alerts are written in one transaction. If a worker dies, the next one starts where the last commit ended. One
transaction serves several runs, because most of the cost of a run without news is that of its queries.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID

from django.db import transaction
from django.utils import timezone
from psycopg.types.json import Jsonb

from fp8scope_dashboard.alerts import alert_updates, rules
from fp8scope_dashboard.alerts.alert_updates import Detection
from fp8scope_dashboard.alerts.detection import baselines, custom_rules, generations
from fp8scope_dashboard.alerts.detection import streams as detection
from fp8scope_dashboard.alerts.detection.generations import WriterStream
from fp8scope_dashboard.alerts.detection.locks import lock_states
from fp8scope_dashboard.alerts.detection.rank_comparison import RankScales
from fp8scope_dashboard.alerts.detection.run_conditions import (
    ConditionFacts,
    RankStep,
    rank_behind,
    run_failed,
    run_finished,
    run_silent,
)
from fp8scope_dashboard.alerts.detectors import State, TensorFacts
from fp8scope_dashboard.alerts.models import RUN_WIDE, Alert, DetectorState, Rule
from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.db import sql
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import new_rows
from fp8scope_dashboard.telemetry.codec import ChunkData

# Chunks of one writer that are read in one transaction.
CHUNKS_AT_ONCE = 16
# The detectors wait so long for a missing message after a later one has arrived, then continue without it: it
# may be delayed, or refused for good.
GAP_PATIENCE = timedelta(seconds=60)
NOT_ALL_READ = -1
# Fields of runs that no detector reads, and that may be large.
NOT_READ = ("config", "environment", "summary")

RUN_DETECTORS = {
    "run_silent": run_silent,
    "run_failed": run_failed,
    "run_finished": run_finished,
    "rank_behind": rank_behind,
}
# Keys of a stored state beside the ids of rules: where a stream is, how often and whereto it has gone back,
# findings that wait, and the generation that the comparison with the baseline follows.
POSITION, RETURNS, RETURNED_TO, WAITING, FOLLOWED = (
    "position", "returns", "returned_to", "waiting", "followed"
)  # fmt: skip
# The state of the run that was judged last; see `state_of` and unread_runs.
RUN_STATE = "run_state"


@dataclass(kw_only=True)
class RunDetection:
    """The state of one run in one transaction."""

    run: Run
    rules: list[Rule]
    states: dict[UUID, DetectorState]
    streams: list[WriterStream]
    # The number of rows before anything was read, so that rows stored in the meantime count as unread.
    rows: int
    chunks: dict[UUID, list[ChunkData]] = field(default_factory=dict)
    detections: list[Detection] = field(default_factory=list)
    # Writers whose state has changed.
    touched: set[UUID] = field(default_factory=set)
    # Why streams have ended, by name.
    ended: dict[str, str] = field(default_factory=dict)
    # Streams that another start of the training continues, without a look at earlier steps.
    continued: set[str] = field(default_factory=set)
    # Whether more rows can be read at once, and whether rows are expected later.
    more: bool = False
    waiting: bool = False

    def __post_init__(self) -> None:
        self.scales = RankScales({stream.rank for stream in _training(self.streams)})

    def state(self, writer: UUID) -> DetectorState:
        if writer not in self.states:
            self.states[writer] = DetectorState(run=self.run, writer=writer)
        return self.states[writer]


@dataclass(frozen=True)
class Evaluated:
    """The alerts that opened, the runs with rows that can be read at once, and those that others evaluate."""

    opened: list[Alert]
    more: list[UUID]
    busy: list[UUID]


def evaluate(run_id: UUID) -> list[Alert]:
    """Read the new rows of a run and of its baseline, and return the alerts that opened.

    No row is read twice, even with several workers at once. A run that was deleted has no alerts.
    """
    opened = []
    while True:
        evaluated = evaluate_together([run_id], waits=True)
        opened += evaluated.opened
        if not evaluated.more:
            return opened


@transaction.atomic
def evaluate_together(run_ids: Collection[UUID], *, waits: bool = False) -> Evaluated:
    """Read the next rows of several runs in one transaction, with few queries for all of them.

    If it fails for one run, it fails for all. Runs that were deleted are left out.

    Args:
        waits: for runs that another worker evaluates. Otherwise these are left out as `busy`, because a run
            with news would hold up all others.
    """
    described = Run.objects.select_related("project").defer(*NOT_READ)
    runs = list(described.filter(pk__in=run_ids).order_by("pk"))
    rows = {run.pk: comparison_runs.rows_behind(run) if run.baseline else run.rows_stored for run in runs}
    states = _locked(runs, waits=waits)
    busy = [run.pk for run in runs if run.pk not in states]
    runs = [run for run in runs if run.pk in states]
    enabled = custom_rules.rules_of_runs(runs)
    streams = generations.streams_of_runs([run.pk for run in runs])
    works = [
        RunDetection(
            run=run, rules=enabled[run.pk], states=states[run.pk], streams=streams[run.pk], rows=rows[run.pk]
        )
        for run in runs
    ]
    _read(works)
    opened = [alert for work in works for alert in _judge(work)]
    _save(works)
    return Evaluated(opened, [work.run.pk for work in works if work.more], busy)


def _locked(runs: Sequence[Run], *, waits: bool) -> dict[UUID, dict[UUID, DetectorState]]:
    """Lock the run-wide state of each run, in the order of ids; return all states, by run and writer.

    Without `waits`, runs that are locked are left out.
    """
    locked = lock_states([run.pk for run in runs], waits=waits)
    missing = [run for run in runs if run.pk not in locked]
    wide = DetectorState.objects.filter(run__in=missing, writer=RUN_WIDE)
    with_state = set(wide.values_list("run_id", flat=True)) if missing and not waits else set()
    if new := [run for run in missing if run.pk not in with_state]:
        # Another worker may create them at the same time.
        DetectorState.objects.bulk_create(
            [DetectorState(run=run, writer=RUN_WIDE) for run in new], ignore_conflicts=True
        )
        locked |= lock_states([run.pk for run in new], waits=waits)
    states: dict[UUID, dict[UUID, DetectorState]] = {run_id: {} for run_id in locked}
    for state in DetectorState.objects.filter(run__in=locked):
        states[state.run_id][state.writer] = state
    return states


def _read(works: Sequence[RunDetection]) -> None:
    """Read the next chunks of all writers. Afterwards each writer's state has the seq to continue from."""
    writers = [(work, stream.writer) for work in works for stream in work.streams]
    arrived = new_rows.arrived(
        [(work.run.pk, writer, work.state(writer).next_seq) for work, writer in writers]
    )
    wanted: list[tuple[RunDetection, new_rows.Request]] = []
    for (work, writer), messages in zip(writers, arrived, strict=True):
        first, until = work.state(writer).next_seq, _readable_until(work, messages)
        if until > first:
            scalars, statistics = detection.columns_read(work.rules)
            request = new_rows.Request(
                run_id=work.run.pk,
                writer=writer,
                first=first,
                until=until,
                scalars=scalars,
                statistics=statistics,
            )
            wanted.append((work, request))
    read = new_rows.read([request for _, request in wanted], CHUNKS_AT_ONCE)
    for (work, request), pieces in zip(wanted, read, strict=True):
        work.touched.add(request.writer)
        work.chunks[request.writer] = [data for _, data in pieces.pieces]
        work.more |= not pieces.is_all
        work.state(request.writer).next_seq = request.until if pieces.is_all else pieces.pieces[-1][0] + 1


def _readable_until(work: RunDetection, messages: new_rows.Arrived) -> int:
    """The first missing seq; or the first seq after the gap, once GAP_PATIENCE is over."""
    if messages.after_gap is None:
        return messages.until
    seq, received_at = messages.after_gap
    if received_at > timezone.now() - GAP_PATIENCE:
        work.waiting = True
        return messages.until
    work.more = True
    return seq


def _judge(work: RunDetection) -> list[Alert]:
    """Run the detectors over what was read, and apply what they found. Returns the alerts that opened."""
    for stream in work.streams:
        _read_stream(work, stream)
    _compare_ranks(work, work.streams)
    if not work.more:
        _read_baseline(work, work.streams)
        _read_run(work, work.streams)
    shared = work.state(RUN_WIDE)
    shared.rows = NOT_ALL_READ if work.more or work.waiting else work.rows
    applied = alert_updates.apply(
        work.run,
        work.detections,
        waiting=shared.state.get(WAITING, []),
        ended=work.ended,
        continued=work.continued,
    )
    shared.state[WAITING] = applied.waiting
    shared.state[RUN_STATE] = state_of(work.run.state, work.run.finished_at)
    return applied.opened


def _save(works: Sequence[RunDetection]) -> None:
    now = timezone.now()
    changed = [work.state(writer) for work in works for writer in sorted({*work.touched, RUN_WIDE})]
    sql.write(
        """
        INSERT INTO alerts_detectorstate (run_id, writer, next_seq, state, rows, updated_at)
        VALUES (%s, %s, %s, %s, %s, %s)
        ON CONFLICT (run_id, writer) DO UPDATE SET next_seq = excluded.next_seq, state = excluded.state,
            rows = excluded.rows, updated_at = excluded.updated_at
        """,
        [(work.run_id, work.writer, work.next_seq, Jsonb(work.state), work.rows, now) for work in changed],
    )


def _read_stream(work: RunDetection, stream: WriterStream) -> None:
    state = work.state(stream.writer).state
    facts: TensorFacts | None = None
    for data in work.chunks.pop(stream.writer, ()):
        facts = facts if facts is not None else detection.facts_of(work.run, stream.catalogue)
        state[POSITION], segments = generations.segments(state.get(POSITION, {}), data.steps)
        for segment in segments:
            if segment.returned_to is not None:
                _begin_generation(work, stream, segment.returned_to)
                work.scales.read.pop(stream.rank, None)
            rows = data.rows(slice(segment.first, segment.last))
            changes = detection.detect(work.rules, state, rows, facts, leads=stream.leads)
            if stream.ended_by is None:
                work.scales.add(stream.rank, stream.catalogue, rows)
            name, generation = _name(work, stream), _generation(work, stream)
            work.detections += [Detection(rule, finding, name, generation) for rule, finding in changes]
    if stream.ended_by is not None:
        work.ended[_name(work, stream)] = f"The training continued from step {stream.ended_by:,}."


def _generation(work: RunDetection, stream: WriterStream) -> str:
    return stream.generation(work.state(stream.writer).state.get(RETURNS, 0))


def _name(work: RunDetection, stream: WriterStream) -> str:
    return f"{stream.writer}/{_generation(work, stream)}"


def _begin_generation(work: RunDetection, stream: WriterStream, step: int) -> None:
    """The training has gone back to an earlier step: its conditions end, and its detectors start afresh."""
    work.ended[_name(work, stream)] = f"The training went back to step {step:,}."
    state = work.state(stream.writer).state
    for key in set(state) - {POSITION, RETURNS}:
        del state[key]
    state[RETURNS] = state.get(RETURNS, 0) + 1
    state[RETURNED_TO] = step


def _read_run(work: RunDetection, streams: Sequence[WriterStream]) -> None:
    """Judge the state of the run itself."""
    judged = [rule for rule in work.rules if rule.kind in RUN_DETECTORS]
    if not judged or not streams:
        return
    states = work.state(RUN_WIDE).state
    facts = _run_facts(work, streams)
    for rule in judged:
        parameters = rules.saved_parameters(rule.kind, rule.parameters)
        before = states.get(str(rule.pk), {})
        states[str(rule.pk)], findings = RUN_DETECTORS[rule.kind](before, facts, parameters)
        # Each occurrence is an alert, even at the same step.
        generation = f"{streams[-1].start}/{states[str(rule.pk)]['times']}"
        work.detections += [Detection(rule, finding, "run", generation) for finding in findings]


def state_of(state: str, finished_at: datetime | None) -> str:
    """The state of a run, with the time of its end: a run that ends twice is news both times."""
    return state if finished_at is None else f"{state} {finished_at.isoformat()}"


def _run_facts(work: RunDetection, streams: Sequence[WriterStream]) -> ConditionFacts:
    run, latest = work.run, streams[-1]
    ranks = [
        RankStep(stream.rank, _last_step(work, stream), stream.finished, _generation(work, stream))
        for stream in streams
        if stream.ended_by is None and stream.attempt == latest.attempt
    ]
    now, heartbeat = timezone.now().timestamp(), run.heartbeat_at.timestamp()
    return ConditionFacts(
        state=run.state,
        last_step=run.last_step or 0,
        now=now,
        heartbeat=heartbeat,
        error=run.error,
        ranks=ranks,
        start=latest.start,
    )


def _last_step(work: RunDetection, stream: WriterStream) -> int | None:
    """The last step of a stream's present generation. What the writer has stored includes earlier ones."""
    state = work.state(stream.writer).state
    furthest: int | None = state[POSITION]["furthest"] if state.get(RETURNS) else stream.last_step
    return furthest


def _training(streams: Sequence[WriterStream]) -> list[WriterStream]:
    """The streams of the latest attempt with rows whose processes have not finished."""
    stored = [other for other in streams if other.ended_by is None and other.first_step is not None]
    return [
        stored_state
        for stored_state in stored
        if stored_state.attempt == stored[-1].attempt and not stored_state.finished
    ]


def _compare_ranks(work: RunDetection, streams: Sequence[WriterStream]) -> None:
    training = _training(streams)
    if training:
        generation = _generation(work, training[0])
        states = work.state(RUN_WIDE).state
        detections, ended = work.scales.judge(work.run, work.rules, states, generation)
        work.detections += detections
        work.ended |= ended


def _read_baseline(work: RunDetection, streams: Sequence[WriterStream]) -> None:
    """Compare the losses with the baseline's. They are those of the latest start of the lowest rank."""
    baseline_rules = [rule for rule in work.rules if rule.kind == "above_baseline"]
    leading = next(
        (other for other in reversed(streams) if other.leads and other.first_step is not None), None
    )
    if not baseline_rules or not work.run.baseline or leading is None:
        return
    states = work.state(RUN_WIDE).state
    generation = _generation(work, leading)
    if states.get(FOLLOWED, generation) != generation:
        work.continued.add(_baseline_stream(states))
        step = work.state(leading.writer).state.get(RETURNED_TO, leading.first_step)
        _rewind_baseline(work, baseline_rules, step)
    states[FOLLOWED] = generation
    for rule in baseline_rules:
        parameters = {
            **rules.saved_parameters(rule.kind, rule.parameters),
            "margin": work.run.equivalence_margin,
            "alpha": work.run.project.alpha,
        }
        followed = baselines.follow(work.run, states.get(str(rule.pk), {}), parameters)
        states[str(rule.pk)] = followed.state
        work.waiting |= followed.waiting
        work.detections += [
            Detection(rule, finding, _baseline_stream(states), generation) for finding in followed.findings
        ]


def _baseline_stream(states: State) -> str:
    return f"run/{states.get(RETURNS, 0)}"


def _rewind_baseline(work: RunDetection, baseline_rules: Sequence[Rule], step: int) -> None:
    """Judge the steps from `step` on again. A training that continues where it was needs nothing."""
    states = work.state(RUN_WIDE).state
    rewound = {
        str(rule.pk): baselines.rewound(work.run, states[str(rule.pk)], step)
        for rule in baseline_rules
        if baselines.has_passed(work.run, states.get(str(rule.pk), {}), step)
    }
    if rewound:
        work.ended[_baseline_stream(states)] = f"The training continued from step {step:,}."
        states.update(rewound)
        states[RETURNS] = states.get(RETURNS, 0) + 1
