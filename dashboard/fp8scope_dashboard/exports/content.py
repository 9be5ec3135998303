"""What an export holds: a description of the run, and its rows, piece by piece.

docs/operating.md shows the columns. A piece has a bounded number of cells, however long the run is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.models import Event
from fp8scope_dashboard.control import imported_history
from fp8scope_dashboard.control.models import Command, Report
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.runs.models import Run, Tensor, Writer
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.codec import SCALAR, TENSOR, TIME_TYPE, ChunkData, Float64s, Int64s

# 1 had neither reports nor histograms, 2 neither alerts nor commands.
FORMAT: Final = 3
# Of a piece; 16 MB of float64.
MOST_CELLS = 2_000_000
REGISTRATION = (
    "name", "precision", "recipe", "config", "environment", "tags", "group", "baseline", "seed", "summary",
)  # fmt: skip
TENSOR_FIELDS = ("name", "module", "role", "format", "shape", "numel")
DOCUMENTS = (Evaluation, Report, Event, Command)
REPORT = ("step", "kind", "document")
SCORES = ("step", "name", "metric", "kind", "higher_is_better", "items", "item_ids", "clusters")


@dataclass(frozen=True)
class Source:
    """A writer whose rows are exported: its place among the writers, and its catalogue."""

    place: int
    uuid: UUID
    catalogue: Int64s


@dataclass(frozen=True)
class Content:
    """A run to be exported, as it is when the export begins; later columns and tensors are not in it.

    Attributes:
        description: everything but the rows, as JSON can hold it.
        schema: of the pieces; a statistic's column lists a value for each of the run's tensors, by index.
        with_histograms: whether the histograms of exponents are among the pieces.
        rows: how many the pieces have together, as far as they are stored now.
    """

    run_id: UUID
    description: dict[str, Any]
    schema: pa.Schema
    sources: tuple[Source, ...]
    scalars: tuple[str, ...]
    statistics: tuple[str, ...]
    tensors: tuple[str, ...]
    with_histograms: bool
    rows: int

    def pieces(self) -> Iterator[pa.RecordBatch]:
        """Every stored row once: writer by writer in the order of sending, then what else the writer sent."""
        for source in self.sources:
            next_seq = 0
            while found := queries.stream(self.run_id, source.uuid, next_seq, 1):
                (last_seq, data) = found[-1]
                yield from self._cut(source, data, last_seq)
                next_seq = last_seq + 1
            yield from self._documents(source, Evaluation, "evaluation", SCORES)
            yield from self._documents(source, Report, "report", REPORT)
            if self.with_histograms:
                yield from self._histograms(source)
        yield from self._past("alert", imported_history.alerts_of(self.run_id))
        yield from self._past("command", imported_history.commands_of(self.run_id))

    def _past(self, name: str, found: Iterable[tuple[int, dict[str, Any]]]) -> Iterator[pa.RecordBatch]:
        """Alerts or commands, a row each. They are no process's: the first one's stands for them."""
        for step, document in found:
            yield self._document(0, 0, step, name, document)

    def _cut(self, source: Source, data: ChunkData, last_seq: int) -> Iterator[pa.RecordBatch]:
        width = max(1, len(self.scalars) + len(self.statistics) * len(self.tensors))
        together = max(1, MOST_CELLS // width)
        for begin in range(0, len(data), together):
            yield self._rows(source, data.rows(slice(begin, begin + together)), last_seq)

    def _rows(self, source: Source, data: ChunkData, last_seq: int) -> pa.RecordBatch:
        count = len(data)
        seqs = np.full(count, last_seq, np.int64) if data.seqs is None else data.seqs
        columns: list[pa.Array[Any]] = [
            pa.array(np.full(count, source.place, np.int32)),
            pa.array(seqs),
            pa.array(data.steps),
            _times(data.times),
        ]
        for name in self.scalars:
            if name in data.logged:
                columns.append(pa.array(data.scalars[name], pa.float64(), mask=~data.logged[name]))
            else:
                columns.append(pa.nulls(count, pa.float64()))
        columns += [self._lists(data.statistics.get(name), source, count) for name in self.statistics]
        return self._piece(count, dict(zip(self.schema.names, columns, strict=False)))

    def _lists(self, values: Float64s | None, source: Source, rows: int) -> pa.Array[Any]:
        """A statistic by the run's tensors; null where not observed."""
        kind = pa.list_(pa.float64())
        if values is None:
            return pa.nulls(rows, kind)
        wide = np.full((rows, len(self.tensors)), np.nan)
        places = source.catalogue[: values.shape[1]]
        known = places < len(self.tensors)
        wide[:, places[known]] = values[:, : len(places)][:, known]
        flat = wide.reshape(-1)
        offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(len(self.tensors))
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, mask=np.isnan(flat)))

    def _documents(
        self, source: Source, model: type[Evaluation | Report], name: str, fields: tuple[str, ...]
    ) -> Iterator[pa.RecordBatch]:
        """Evaluations or reports: a row each, the fields as JSON in the column of this name."""
        stored = model._default_manager.filter(run_id=self.run_id, writer=source.uuid).order_by("seq")
        # One by one, by name: a cursor would hold a connection while the client reads.
        for key in list(stored.values_list("pk", flat=True)):
            if (found := model._default_manager.filter(pk=key).first()) is None:
                continue
            document = {field: getattr(found, field) for field in fields}
            yield self._document(source.place, found.seq, found.step, name, document)

    def _document(
        self, writer: int, seq: int, step: int, name: str, document: Mapping[str, Any]
    ) -> pa.RecordBatch:
        values = {
            "writer": writer,
            "seq": seq,
            "step": step,
            name: json.dumps(document, allow_nan=False),
        }
        types = {field: self.schema.field(field).type for field in values}
        return self._piece(1, {field: pa.array([values[field]], types[field]) for field in values})

    def _histograms(self, source: Source) -> Iterator[pa.RecordBatch]:
        """A row for each tensor of each message."""
        together = max(1, MOST_CELLS // (queries.EXPONENT_BINS + len(self.schema)))
        next_seq = 0
        while (found := queries.histogram_rows(self.run_id, source.uuid, next_seq, together)) is not None:
            next_seq = int(found.seqs[-1]) + 1
            # A tensor that joined the catalogue after the description was written is not in the file.
            known = np.flatnonzero(np.isin(found.tensors, source.catalogue))
            for begin in range(0, len(known), together):
                yield self._sampled(source, found, known[begin : begin + together])

    def _sampled(self, source: Source, found: queries.HistogramRows, chosen: Int64s) -> pa.RecordBatch:
        count = len(chosen)
        offsets = np.arange(count + 1, dtype=np.int32) * np.int32(queries.EXPONENT_BINS)
        columns: dict[str, pa.Array[Any]] = {
            "writer": pa.array(np.full(count, source.place, np.int32)),
            "seq": pa.array(found.seqs[chosen]),
            "step": pa.array(found.steps[chosen]),
            "time": _times(found.times[chosen]),
            "tensor": pa.array(found.tensors[chosen], pa.int32()),
            "histogram": pa.ListArray.from_arrays(
                pa.array(offsets), pa.array(found.counts[chosen].reshape(-1))
            ),
        }
        return self._piece(count, columns)

    def _piece(self, count: int, columns: Mapping[str, pa.Array[Any]]) -> pa.RecordBatch:
        """So many rows; columns that are not given are null."""
        arrays = [
            columns[field.name] if field.name in columns else pa.nulls(count, field.type)
            for field in self.schema
        ]
        return pa.record_batch(arrays, schema=self.schema)


def _times(times: NDArray[np.datetime64]) -> pa.Array[Any]:
    return pa.array(times.astype("datetime64[us]").astype(np.int64)).cast(TIME_TYPE)


def content_of(run: Run, *, with_histograms: bool) -> Content:
    """What there is to export of a run."""
    tensors = list(Tensor.objects.filter(run=run).order_by("index"))
    writers = list(Writer.objects.filter(run=run).order_by("attempt", "rank", "created_at", "uuid"))
    scalars, statistics = tuple(queries.scalar_names(run.pk)), tuple(run.statistics)
    histograms = queries.histogram_count(run.pk) if with_histograms else 0
    documents = sum(model._default_manager.filter(run=run).count() for model in DOCUMENTS)
    fields: list[pa.Field[Any]] = [
        pa.field("writer", pa.int32(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
        pa.field("time", TIME_TYPE),
        *(pa.field(SCALAR + name, pa.float64()) for name in scalars),
        *(pa.field(TENSOR + name, pa.list_(pa.float64())) for name in statistics),
        pa.field("evaluation", pa.string()),
        pa.field("report", pa.string()),
        pa.field("alert", pa.string()),
        pa.field("command", pa.string()),
    ]
    if with_histograms:
        fields += [pa.field("tensor", pa.int32()), pa.field("histogram", pa.list_(pa.float64()))]
    return Content(
        run.pk,
        {**_describe(run, tensors, writers), "histograms": histograms, "documents": documents},
        pa.schema(fields),
        tuple(Source(i, one.uuid, np.asarray(one.catalogue, np.int64)) for i, one in enumerate(writers)),
        scalars,
        statistics,
        tuple(tensor.name for tensor in tensors),
        with_histograms,
        run.rows_stored + documents + histograms,
    )


def _describe(run: Run, tensors: list[Tensor], writers: list[Writer]) -> dict[str, Any]:
    # Ranks mostly share one catalogue: each is written once.
    catalogues: dict[tuple[int, ...], int] = {}
    described = [
        {
            "uuid": str(writer.uuid),
            "rank": writer.rank,
            "hostname": writer.hostname,
            "attempt": writer.attempt,
            "catalogue": catalogues.setdefault(tuple(writer.catalogue), len(catalogues)),
            "finished": writer.finished_at is not None,
            "failed": writer.failed,
            "error": writer.error,
            "dropped": writer.rows_dropped,
            "errors": writer.errors,
        }
        for writer in writers
    ]
    return {
        "format": FORMAT,
        "id": str(run.pk),
        "run": {
            **{name: getattr(run, name) for name in REGISTRATION},
            "total_steps": run.total_steps,
            "created_at": run.created_at.isoformat(),
        },
        "state": run.state,
        "rows": run.rows_stored,
        "points": run.points_stored,
        "tensors": [{name: getattr(tensor, name) for name in TENSOR_FIELDS} for tensor in tensors],
        "catalogues": [list(catalogue) for catalogue in catalogues],
        "writers": described,
    }
