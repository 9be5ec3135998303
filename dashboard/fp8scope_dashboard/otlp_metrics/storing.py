"""Store the data points of one resource: rows of a writer for each rank, once however often they are sent."""

from __future__ import annotations

import uuid
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
from django.db import transaction
from django.http import HttpRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics

from fp8scope_dashboard.api.auth import SENT_FIELDS, project_of, take_quota, token_of
from fp8scope_dashboard.ingest.batch import read_arrow
from fp8scope_dashboard.ingest.services import store_batch
from fp8scope_dashboard.otlp_metrics.models import OtlpWriter
from fp8scope_dashboard.otlp_metrics.points import (
    STEP,
    DataPoint,
    SeriesState,
    attributes_of,
    points_of,
    scalars_of,
)
from fp8scope_dashboard.otlp_metrics.resources import CLIENT, ExportingProcess, process_of
from fp8scope_dashboard.receipts.dedup import identify
from fp8scope_dashboard.receipts.models import Receipt
from fp8scope_dashboard.runs.catalogue import extend
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.runs.services import RunConflictError, RunDeletedError, last_attempt, register
from fp8scope_dashboard.telemetry.codec import ChunkData, encode
from fp8scope_dashboard.text.numbers import json_number
from fp8scope_dashboard.wire import limits
from fp8scope_dashboard.wire.errors import InvalidError, RefusalError

MAX_POINTS: Final = 200_000
"""Of a request."""
MAX_CELLS: Final = 2_000_000
"""Rows times scalars of a batch."""
REMEMBERED: Final = 1_000
"""A request is recognised among so many of its writer. Exporters give up sending again after a minute."""
MAX_WARNINGS: Final = 5
LAST_STEP: Final = ""
"""The entry of a writer's state with the time and the value of its last step. No series has this name."""
SAME_STEP: Final = 10**9
"""Nanoseconds between a metric of the step and what comes with it."""


@dataclass(kw_only=True)
class StoringResult:
    """The points of a request that are not stored, and what is said to the client."""

    rejected: int = 0
    messages: list[str] = field(default_factory=list)

    def reject(self, count: int, message: str) -> None:
        """Note points that are not stored, and why."""
        self.rejected += count
        self.say(message)

    def say(self, message: str) -> None:
        """Note a sentence, if it is new and not one of many."""
        if message not in self.messages and len(self.messages) < MAX_WARNINGS:
            self.messages.append(message)


def store_resource(request: HttpRequest, resource: ResourceMetrics, result: StoringResult) -> None:
    """Store the points of a resource in one transaction; those that are stored already are left out.

    Raises:
        SlowDownError, StorageFullError, OperationalError: nothing of it is stored, try again later.
    """
    process = process_of(project_of(request).pk, attributes_of(resource.resource.attributes))
    for warning in process.warnings:
        result.say(warning)
    points = list(_valid(resource, result))
    if not points:
        return
    try:
        with transaction.atomic():
            run = _run(request, process, points)
            content = resource.SerializeToString(deterministic=True)
            for rank, of_rank in sorted(_by_rank(process, points).items()):
                _store_rank(run, process, rank, of_rank, content)
    except RefusalError as refusal:
        if refusal.status in (429, 503, 507):
            raise
        # To send it again would not help; other resources of the request are stored.
        result.rejected += len(points)
        result.say(f"{refusal.message} {refusal.hint}".strip())


def _valid(resource: ResourceMetrics, result: StoringResult) -> Iterator[DataPoint]:
    """The points that can be stored; others are counted."""
    for scope in resource.scope_metrics:
        for metric in scope.metrics:
            for point in points_of(metric):
                if isinstance(point, str):
                    result.reject(1, point)
                # OpenTelemetry's 0 is a time that is not known.
                elif not limits.FIRST_TIME_US < point.time // 1000 < limits.LAST_TIME_US:
                    result.reject(1, f"{point.series[:80]}: its time is not between 1970 and 2200.")
                elif (point.step or 0) > limits.MAX_INT:
                    result.reject(1, f"{point.series[:80]}: its step is above 2^63 - 1.")
                else:
                    yield point


def _run(request: HttpRequest, process: ExportingProcess, points: Sequence[DataPoint]) -> Run:
    """The run, which is registered with its first points."""
    project = project_of(request)
    run = Run.objects.filter(pk=process.run, project=project).only(*SENT_FIELDS).first()
    if run is not None:
        return run
    take_quota(request, runs=1)
    fields = {**process.fields, "created_at": _moment(min(point.time for point in points))}
    try:
        return register(process.run, project, fields, token=token_of(request))[0]
    except RunConflictError:
        raise InvalidError(
            f"The run {process.run} belongs to another project.",
            "Use that project's token, or another run id.",
        ) from None
    except RunDeletedError:
        raise InvalidError(
            f"The run {process.run} was deleted on the dashboard.", "Export with another run id."
        ) from None


def _by_rank(process: ExportingProcess, points: Iterable[DataPoint]) -> dict[int, list[DataPoint]]:
    """Points by rank: that of the point, or of the resource, or 0."""
    by_rank: dict[int, list[DataPoint]] = defaultdict(list)
    for point in points:
        by_rank[process.rank or 0 if point.rank is None else point.rank].append(point)
    return by_rank


def _store_rank(
    run: Run, process: ExportingProcess, rank: int, points: list[DataPoint], content: bytes
) -> None:
    """Store the points of a rank, unless it has them already. `content`: the resource as it was sent."""
    # In a run of the agent its present attempt.
    attempt = (last_attempt(run) or 0) if process.attempt is None else process.attempt
    writer_id = uuid.uuid5(run.pk, f"otlp {rank} {attempt}")
    OtlpWriter.objects.get_or_create(run=run, pk=writer_id)
    writer = OtlpWriter.objects.select_for_update().get(run=run, pk=writer_id)
    if writer.next_seq == 0:
        # Detectors follow the agent's own rows, where there are some.
        is_own = Run.objects.filter(pk=run.pk, environment__client=CLIENT).exists()
        extend(
            run,
            writer_id,
            0,
            [],
            rank=rank,
            hostname=process.hostname,
            attempt=attempt,
            imported=not is_own,
        )
    if _is_stored(writer, content):
        return
    rows = _rows(run, writer, points)
    for part in _parts(rows):
        seq = writer.next_seq
        body = encode(part, metadata=_metadata(run, writer_id, seq))
        store_batch(run, identify(run.pk, writer_id, seq, "batch", content), read_arrow(body))
        writer.next_seq += 1
    stored = OtlpWriter.objects.filter(run=run, pk=writer_id)
    stored.update(next_seq=writer.next_seq, state=writer.state, meanings=writer.meanings)


def _is_stored(writer: OtlpWriter, content: bytes) -> bool:
    """Return whether the same points were stored by one of the last messages."""
    digest = identify(writer.run_id, writer.pk, 0, "batch", content).digest
    last = Receipt.objects.filter(
        run_id=writer.run_id, writer=writer.pk, seq__gte=writer.next_seq - REMEMBERED
    )
    return last.filter(digest=digest).exists()


def _metadata(run: Run, writer: uuid.UUID, seq: int) -> dict[str, str]:
    return {
        "fp8scope.protocol": "1",
        "fp8scope.run": str(run.pk),
        "fp8scope.writer": str(writer),
        "fp8scope.seq": str(seq),
    }


@dataclass(kw_only=True)
class PointsOfStep:
    """The scalars of a step, and its time in nanoseconds."""

    time: int
    scalars: dict[str, float] = field(default_factory=dict)


def _rows(run: Run, writer: OtlpWriter, points: list[DataPoint]) -> dict[int, PointsOfStep]:
    """The rows by step. Of a series and a step the last point counts."""
    states: dict[str, SeriesState] = {
        series: [float(number) for number in numbers] for series, numbers in writer.state.items()
    }
    clock = StepClock(points, states)
    rows: dict[int, PointsOfStep] = {}
    for point in sorted(points, key=lambda point: (point.time, -1 if point.step is None else point.step)):
        step = clock.step_at(point.time) if point.step is None else point.step
        if step is None:
            step = _seconds_since(run.created_at, point.time)
        row = rows.setdefault(step, PointsOfStep(time=point.time))
        row.time = max(row.time, point.time)
        scalars = scalars_of(point, states)
        row.scalars |= scalars
        if point.meaning and _has_meaning(writer, point) and point.series in scalars:
            row.scalars[point.meaning] = scalars[point.series]
    writer.state = {
        series: [json_number(number) for number in numbers] for series, numbers in _bounded(states).items()
    }
    return rows


class StepClock:
    """The steps of points that come with a metric of the step: that of the nearest time.

    SDKs stamp the metrics of one collection with times that may differ by microseconds, and Collectors may
    put them into several requests. So the last step is kept in the state of the writer.
    """

    def __init__(self, points: Iterable[DataPoint], states: dict[str, SeriesState]) -> None:
        steps = {point.time: int(point.values[""]) for point in points if _is_step(point)}
        if LAST_STEP in states:
            time, step = states[LAST_STEP]
            steps.setdefault(int(time), int(step))
        self._times = sorted(steps)
        self._steps = [steps[time] for time in self._times]
        if steps:
            states[LAST_STEP] = [float(self._times[-1]), float(self._steps[-1])]

    def step_at(self, time: int) -> int | None:
        """The step at a time in nanoseconds; None if none was said within a second of it."""
        at = bisect_left(self._times, time)
        near = [index for index in (at - 1, at) if 0 <= index < len(self._times)]
        nearest = min(near, key=lambda index: abs(self._times[index] - time), default=None)
        if nearest is None or abs(self._times[nearest] - time) > SAME_STEP:
            return None
        return self._steps[nearest]


def _is_step(point: DataPoint) -> bool:
    if point.step is not None or point.kind not in ("gauge", "sum") or point.series not in STEP:
        return False
    value = point.values[""]
    return 0 <= value <= limits.MAX_INT // 2 and value.is_integer()


def _has_meaning(writer: OtlpWriter, point: DataPoint) -> bool:
    """Return whether a metric is the loss, or another scalar with a meaning: the first one."""
    if point.series == point.meaning:
        writer.meanings[point.meaning] = point.series
        return False
    return bool(writer.meanings.setdefault(point.meaning, point.series) == point.series)


def _bounded(states: dict[str, SeriesState]) -> dict[str, SeriesState]:
    if len(states) > limits.SCALARS:
        raise InvalidError(
            f"The run would have {len(states)} different series; at most {limits.SCALARS} are allowed.",
            "Keep step numbers and other changing values out of the attributes.",
        )
    return states


def _seconds_since(began: datetime, time: int) -> int:
    """The step of a point without one: the seconds since the run began."""
    return max(0, (time - int(began.timestamp() * 1e6) * 1000) // 10**9)


def _parts(rows: dict[int, PointsOfStep]) -> Iterator[ChunkData]:
    """The rows in batches, in the order of the steps."""
    steps = sorted(rows)
    names = sorted({name for row in rows.values() for name in row.scalars})
    if len(names) > limits.SCALARS:
        raise InvalidError(
            f"The request has {len(names)} different series; at most {limits.SCALARS} are allowed in a run.",
            "Keep step numbers and other changing values out of the attributes.",
        )
    length = max(1, min(limits.ROWS, MAX_CELLS // max(1, len(names))))
    for begin in range(0, len(steps), length):
        yield _chunk([(step, rows[step]) for step in steps[begin : begin + length]])


def _chunk(rows: Sequence[tuple[int, PointsOfStep]]) -> ChunkData:
    names = sorted({name for _, row in rows for name in row.scalars})
    values = {name: np.array([row.scalars.get(name, np.nan) for _, row in rows]) for name in names}
    logged = {name: np.array([name in row.scalars for _, row in rows]) for name in names}
    return ChunkData(
        steps=np.array([step for step, _ in rows], np.int64),
        times=np.array([row.time // 1000 for _, row in rows], np.int64).astype("datetime64[us]"),
        scalars=values,
        logged=logged,
    )


def _moment(nanoseconds: int) -> datetime:
    return datetime.fromtimestamp(nanoseconds // 1000 / 1e6, UTC)


def count_points(resources: Iterable[Any]) -> int:
    """The data points of a request."""
    return sum(
        len(getattr(metric, kind).data_points)
        for resource in resources
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if (kind := metric.WhichOneof("data")) is not None
    )
