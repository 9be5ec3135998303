"""The content of an export: a description of the run, and its rows in pieces of a bounded size.

docs/operating.md lists the columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import numpy as np
import pyarrow as pa
from django.db.models import Count
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.models import Alert
from fp8scope_dashboard.control import imported_history
from fp8scope_dashboard.control.models import Command, Report
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.media import contents
from fp8scope_dashboard.media.models import MediaItem
from fp8scope_dashboard.runs import console
from fp8scope_dashboard.runs.models import Artefact, ConsoleLine, Note, Run, StepNote, Tensor, Writer
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.codec import SCALAR, TENSOR, TIME_TYPE, ChunkData, Float64s, Int64s

# Version 2 added reports and histograms, version 3 alerts and commands, version 4 the console log, the note
# and the links to artefacts. Notes at steps came later, as notes with a step. Version 5 added media: files of
# runs without any keep the earlier version, which older clients read.
FORMAT: Final = 4
FORMAT_WITH_MEDIA: Final = 5
# Lines of the console log in one row.
LINES_AT_ONCE = 500
# Cells of a piece: 16 MB of float64.
MAX_CELLS = 2_000_000
REGISTRATION = (
    "name", "precision", "recipe", "config", "environment", "tags", "group", "baseline", "parent", "relation",
    "seed", "summary",
)  # fmt: skip
TENSOR_FIELDS = ("name", "module", "role", "format", "shape", "numel")
DOCUMENTS: Final[tuple[type[Evaluation | Report | Alert | Command], ...]] = (
    Evaluation,
    Report,
    Alert,
    Command,
)
MEDIA = ("name", "kind", "step", "caption", "file_name")
REPORT = ("step", "kind", "document")
SCORES = (
    *("step", "name", "metric", "kind", "higher_is_better", "items", "item_ids", "clusters"),
    *("precision", "margin", "matrix"),
)


@dataclass(frozen=True)
class ExportedWriter:
    """A writer whose rows are exported: its index among the writers, and its catalogue."""

    index: int
    uuid: UUID
    catalogue: Int64s


@dataclass(frozen=True, kw_only=True)
class ExportContent:
    """A run to export, as it is when the export begins. Columns and tensors that are added later are left
    out.

    Attributes:
        description: everything but the rows, as JSON types.
        schema: of the pieces. The column of a statistic lists a value for each tensor of the run, by index.
        with_histograms, with_media: whether the histograms of exponents, and the media, are among the pieces.
        rows: number of rows of all pieces, as stored when the export begins.
    """

    run_id: UUID
    description: dict[str, Any]
    schema: pa.Schema
    sources: tuple[ExportedWriter, ...]
    scalars: tuple[str, ...]
    statistics: tuple[str, ...]
    tensors: tuple[str, ...]
    with_histograms: bool
    with_media: bool
    rows: int

    def pieces(self) -> Iterator[pa.RecordBatch]:
        """Every stored row once: per writer its rows in the order of sending, its documents and histograms;
        then alerts and commands.
        """
        exported: set[int] = set()
        for source in self.sources:
            next_seq = 0
            while chunks := queries.stream(self.run_id, source.uuid, next_seq, 1):
                last_seq, data = chunks[-1]
                yield from self._cut(source, data, last_seq)
                next_seq = last_seq + 1
            yield from self._documents(source, Evaluation, "evaluation", SCORES)
            yield from self._documents(source, Report, "report", REPORT)
            yield from self._console(source)
            if self.with_media:
                yield from self._media(source, exported)
            if self.with_histograms:
                yield from self._histograms(source)
        yield from self._past("alert", imported_history.alerts_of(self.run_id))
        yield from self._past("command", imported_history.commands_of(self.run_id))
        if self.sources:
            yield from self._past("note", imported_history.notes_of(self.run_id))
            yield from self._past("artefact", imported_history.artefacts_of(self.run_id))

    def _past(self, name: str, documents: Iterable[tuple[int, dict[str, Any]]]) -> Iterator[pa.RecordBatch]:
        """Alerts or commands, one row each. They belong to no writer and are exported with index 0."""
        for step, document in documents:
            yield self._document(0, 0, step, name, document)

    def _cut(self, source: ExportedWriter, data: ChunkData, last_seq: int) -> Iterator[pa.RecordBatch]:
        width = max(1, len(self.scalars) + len(self.statistics) * len(self.tensors))
        together = max(1, MAX_CELLS // width)
        for begin in range(0, len(data), together):
            yield self._rows(source, data.rows(slice(begin, begin + together)), last_seq)

    def _rows(self, source: ExportedWriter, data: ChunkData, last_seq: int) -> pa.RecordBatch:
        count = len(data)
        seqs = np.full(count, last_seq, np.int64) if data.seqs is None else data.seqs
        columns: list[pa.Array[Any]] = [
            pa.array(np.full(count, source.index, np.int32)),
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

    def _lists(self, values: Float64s | None, source: ExportedWriter, rows: int) -> pa.Array[Any]:
        """A statistic as lists over the run's tensors; null where not observed."""
        kind = pa.list_(pa.float64())
        if values is None:
            return pa.nulls(rows, kind)
        wide = np.full((rows, len(self.tensors)), np.nan)
        indices = source.catalogue[: values.shape[1]]
        is_tensor = indices < len(self.tensors)
        wide[:, indices[is_tensor]] = values[:, : len(indices)][:, is_tensor]
        flat = wide.reshape(-1)
        offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(len(self.tensors))
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, mask=np.isnan(flat)))

    def _documents(
        self, source: ExportedWriter, model: type[Evaluation | Report], name: str, fields: tuple[str, ...]
    ) -> Iterator[pa.RecordBatch]:
        """Evaluations or reports, one row each, with the fields as JSON in the column `name`."""
        stored = model.objects.filter(run_id=self.run_id, writer=source.uuid).order_by("seq")
        # One query per row: a cursor would hold a database connection while the client reads.
        for key in list(stored.values_list("pk", flat=True)):
            if (row := model.objects.filter(pk=key).first()) is None:
                continue
            document = {field: getattr(row, field) for field in fields}
            yield self._document(source.index, row.seq, row.step, name, document)

    def _console(self, source: ExportedWriter) -> Iterator[pa.RecordBatch]:
        """The console log of a writer, in rows of LINES_AT_ONCE lines."""
        for lines in console.pieces_of(self.run_id, source.uuid, LINES_AT_ONCE):
            document = {"lines": [console.as_json(line) for line in lines]}
            yield self._document(source.index, 0, lines[-1].step, "console", document)

    def _media(self, source: ExportedWriter, exported: set[int]) -> Iterator[pa.RecordBatch]:
        """The media of a writer, one row each; a content is in the first row that names it."""
        mine = MediaItem.objects.filter(run_id=self.run_id, writer__uuid=source.uuid).order_by("pk")
        for key in list(mine.values_list("pk", flat=True)):
            if (item := MediaItem.objects.filter(pk=key).select_related("content").first()) is None:
                continue
            body = None if item.content_id in exported else contents.read(item.content)
            exported.add(item.content_id)
            document = {field: getattr(item, field) for field in MEDIA}
            document |= {"sha256": item.hex, "size": item.content.size}
            values: dict[str, Any] = {"writer": source.index, "seq": 0, "step": item.step}
            values["media"] = json.dumps(document)
            columns = {
                name: pa.array([value], self.schema.field(name).type) for name, value in values.items()
            }
            yield self._piece(1, {**columns, "content": pa.array([body], pa.binary())})

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

    def _histograms(self, source: ExportedWriter) -> Iterator[pa.RecordBatch]:
        """One row for each tensor of each message."""
        together = max(1, MAX_CELLS // (queries.EXPONENT_BINS + len(self.schema)))
        next_seq = 0
        while (rows := queries.histogram_rows(self.run_id, source.uuid, next_seq, together)) is not None:
            next_seq = int(rows.seqs[-1]) + 1
            # Without tensors that joined the catalogue after the description was written.
            positions = np.flatnonzero(np.isin(rows.tensors, source.catalogue))
            for begin in range(0, len(positions), together):
                yield self._sampled(source, rows, positions[begin : begin + together])

    def _sampled(self, source: ExportedWriter, rows: queries.HistogramRows, chosen: Int64s) -> pa.RecordBatch:
        count = len(chosen)
        offsets = np.arange(count + 1, dtype=np.int32) * np.int32(queries.EXPONENT_BINS)
        columns: dict[str, pa.Array[Any]] = {
            "writer": pa.array(np.full(count, source.index, np.int32)),
            "seq": pa.array(rows.seqs[chosen]),
            "step": pa.array(rows.steps[chosen]),
            "time": _times(rows.times[chosen]),
            "tensor": pa.array(rows.tensors[chosen], pa.int32()),
            "histogram": pa.ListArray.from_arrays(
                pa.array(offsets), pa.array(rows.counts[chosen].reshape(-1))
            ),
        }
        return self._piece(count, columns)

    def _piece(self, count: int, columns: Mapping[str, pa.Array[Any]]) -> pa.RecordBatch:
        """A record batch of `count` rows; columns that are not given are null."""
        arrays = [
            columns[field.name] if field.name in columns else pa.nulls(count, field.type)
            for field in self.schema
        ]
        return pa.record_batch(arrays, schema=self.schema)


def _times(times: NDArray[np.datetime64]) -> pa.Array[Any]:
    return pa.array(times.astype("datetime64[us]").astype(np.int64)).cast(TIME_TYPE)


def content_of(run: Run, *, with_binary: bool) -> ExportContent:
    """Prepare the export of a run. `with_binary`: its histograms and media too, which are no text."""
    tensors = list(Tensor.objects.filter(run=run).order_by("index"))
    writers = list(Writer.objects.filter(run=run).order_by("attempt", "rank", "created_at", "uuid"))
    scalars, statistics = tuple(queries.scalar_names(run.pk)), tuple(run.statistics)
    histograms = queries.histogram_count(run.pk) if with_binary else 0
    media = MediaItem.objects.filter(run=run).count() if with_binary else 0
    documents = media + sum(model.objects.filter(run=run).count() for model in DOCUMENTS)
    documents += Note.objects.filter(run=run).exclude(text="").count()
    documents += StepNote.objects.filter(run=run).count()
    documents += Artefact.objects.filter(run=run).count()
    lines = ConsoleLine.objects.filter(run=run).values("writer").annotate(count=Count("pk"))
    documents += sum(-(-writer["count"] // LINES_AT_ONCE) for writer in lines)
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
        *(pa.field(name, pa.string()) for name in ("command", "console", "note", "artefact")),
    ]
    if media:
        fields += [pa.field("media", pa.string()), pa.field("content", pa.binary())]
    if with_binary:
        fields += [pa.field("tensor", pa.int32()), pa.field("histogram", pa.list_(pa.float64()))]
    return ExportContent(
        run_id=run.pk,
        description={
            **_describe(run, tensors, writers),
            "format": FORMAT_WITH_MEDIA if media else FORMAT,
            "histograms": histograms,
            "documents": documents,
        },
        schema=pa.schema(fields),
        sources=tuple(
            ExportedWriter(i, writer.uuid, np.asarray(writer.catalogue, np.int64))
            for i, writer in enumerate(writers)
        ),
        scalars=scalars,
        statistics=statistics,
        tensors=tuple(tensor.name for tensor in tensors),
        with_histograms=with_binary,
        with_media=media > 0,
        rows=run.rows_stored + documents + histograms,
    )


def _describe(run: Run, tensors: list[Tensor], writers: list[Writer]) -> dict[str, Any]:
    # Most ranks share one catalogue: each distinct one is written once.
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
