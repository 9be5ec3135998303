"""What an export holds: a description of the run, and its rows, piece by piece.

docs/operating.md shows the columns. A piece has a bounded number of cells, however long the run is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import numpy as np
import pyarrow as pa

from fp8scope_dashboard.analysis.models import Evaluation
from fp8scope_dashboard.runs.models import Run, Tensor, Writer
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.codec import SCALAR, TENSOR, TIME_TYPE, ChunkData, Float64s, Int64s

FORMAT: Final = 1
# Of a piece; 16 MB of float64.
MOST_CELLS = 2_000_000
REGISTRATION = ("name", "precision", "recipe", "config", "environment", "tags", "group", "baseline", "seed")
TENSOR_FIELDS = ("name", "module", "role", "format", "shape", "numel")
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
    """

    run_id: UUID
    description: dict[str, Any]
    schema: pa.Schema
    sources: tuple[Source, ...]
    scalars: tuple[str, ...]
    statistics: tuple[str, ...]
    tensors: tuple[str, ...]
    rows: int

    def pieces(self) -> Iterator[pa.RecordBatch]:
        """Every stored row once: writer by writer in the order of sending, then the writer's evaluations."""
        for source in self.sources:
            next_seq = 0
            while found := queries.stream(self.run_id, source.uuid, next_seq, 1):
                (last_seq, data) = found[-1]
                yield from self._cut(source, data, last_seq)
                next_seq = last_seq + 1
            yield from self._evaluations(source)

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
            pa.array(data.times.astype("datetime64[us]").astype(np.int64)).cast(TIME_TYPE),
        ]
        for name in self.scalars:
            if name in data.logged:
                columns.append(pa.array(data.scalars[name], pa.float64(), mask=~data.logged[name]))
            else:
                columns.append(pa.nulls(count, pa.float64()))
        columns += [self._lists(data.statistics.get(name), source, count) for name in self.statistics]
        columns.append(pa.nulls(count, pa.string()))
        return pa.record_batch(columns, schema=self.schema)

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

    def _evaluations(self, source: Source) -> Iterator[pa.RecordBatch]:
        stored = Evaluation.objects.filter(run_id=self.run_id, writer=source.uuid).order_by("seq")
        # One by one, by name: a cursor would hold a connection while the client reads.
        for key in list(stored.values_list("pk", flat=True)):
            if (scores := Evaluation.objects.filter(pk=key).first()) is None:
                continue
            text = json.dumps({name: getattr(scores, name) for name in SCORES}, allow_nan=False)
            values: dict[str, Any] = {
                "writer": source.place,
                "seq": scores.seq,
                "step": scores.step,
                "evaluation": text,
            }
            arrays = [pa.array([values.get(field.name)], field.type) for field in self.schema]
            yield pa.record_batch(arrays, schema=self.schema)


def content_of(run: Run) -> Content:
    """What there is to export of a run."""
    tensors = list(Tensor.objects.filter(run=run).order_by("index"))
    writers = list(Writer.objects.filter(run=run).order_by("attempt", "rank", "created_at", "uuid"))
    scalars, statistics = tuple(queries.scalar_names(run.pk)), tuple(run.statistics)
    fields: list[pa.Field[Any]] = [
        pa.field("writer", pa.int32(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
        pa.field("time", TIME_TYPE),
        *(pa.field(SCALAR + name, pa.float64()) for name in scalars),
        *(pa.field(TENSOR + name, pa.list_(pa.float64())) for name in statistics),
        pa.field("evaluation", pa.string()),
    ]
    return Content(
        run.pk,
        _describe(run, tensors, writers),
        pa.schema(fields),
        tuple(Source(i, one.uuid, np.asarray(one.catalogue, np.int64)) for i, one in enumerate(writers)),
        scalars,
        statistics,
        tuple(tensor.name for tensor in tensors),
        run.rows_stored,
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
