"""Storing runs as an agent would send them, for tests of analysis, alerts and pages."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.evaluations.services import Scores, store_evaluation
from fp8scope_dashboard.ingest import services
from fp8scope_dashboard.ingest.batch import read_arrow
from fp8scope_dashboard.receipts.dedup import identify
from fp8scope_dashboard.runs.models import Run, Tensor, Writer
from fp8scope_dashboard.telemetry.codec import ChunkData, encode

ROWS_PER_BATCH = 20


@dataclass(kw_only=True)
class Recorder:
    """One writer of one run."""

    run: Run
    rank: int = 0
    tensors: Sequence[str] = ()
    uuid: uuid.UUID = field(default_factory=uuid.uuid4)
    seq: int = 0
    attempt: int = 0

    def __post_init__(self) -> None:
        known = dict(Tensor.objects.filter(run=self.run).values_list("name", "index"))
        added = [name for name in dict.fromkeys(self.tensors) if name not in known]
        for index, name in enumerate(added, len(known)):
            known[name] = index
        Tensor.objects.bulk_create([self._tensor(name, known[name]) for name in added])
        indices = [known[name] for name in self.tensors]
        Writer.objects.create(
            run=self.run, uuid=self.uuid, rank=self.rank, attempt=self.attempt, catalogue=indices
        )

    def _tensor(self, name: str, index: int) -> Tensor:
        module, _, role = name.rpartition(".")
        return Tensor(
            run=self.run, name=name, index=index, module=module, role=role, format="e4m3", numel=1000
        )

    def rows(
        self,
        steps: ArrayLike,
        scalars: Mapping[str, ArrayLike] | None = None,
        statistics: Mapping[str, ArrayLike] | None = None,
        *,
        rows_per_batch: int = ROWS_PER_BATCH,
    ) -> None:
        """Send rows in order, in batches. A loss of NaN counts as logged."""
        data = _chunk(steps, scalars or {}, statistics or {})
        for first in range(0, len(data), rows_per_batch):
            self.batch(data.rows(slice(first, first + rows_per_batch)))

    def batch(self, data: ChunkData) -> None:
        """Send one batch."""
        metadata = {"protocol": "1", "run": str(self.run.id), "writer": str(self.uuid), "seq": str(self.seq)}
        body = encode(data, metadata={f"fp8scope.{key}": value for key, value in metadata.items()})
        message = identify(self.run.id, self.uuid, self.seq, "batch", body)
        self.run.refresh_from_db()
        assert services.store_batch(self.run, message, read_arrow(body))
        self.seq += 1

    def evaluation(
        self,
        step: int,
        items: Sequence[float],
        *,
        name: str = "heldout",
        metric: str = "accuracy",
        kind: str = "proportion",
        item_ids: Sequence[str] | None = None,
        higher_is_better: bool = True,
        precision: str | None = None,
        margin: float | None = None,
        matrix: Mapping[str, Any] | None = None,
    ) -> None:
        """Send one evaluation."""
        message = identify(self.run.id, self.uuid, self.seq, "evaluation", str((step, name, items)).encode())
        scores = Scores(
            step=step,
            name=name,
            metric=metric,
            kind=kind,
            higher_is_better=higher_is_better,
            items=items,
            item_ids=item_ids,
            clusters=None,
            precision=precision,
            margin=margin,
            matrix=matrix,
        )
        assert store_evaluation(self.run, message, scores)
        self.seq += 1

    def finish(self, error: str = "") -> None:
        """Finish this writer; with an error, as failed."""
        message = identify(self.run.id, self.uuid, self.seq, "finish", b"")
        ending = services.Ending(
            failed=bool(error), error=error, rows_sent=0, points_sent=0, dropped=0, errors=0
        )
        assert services.store_finish(self.run, message, ending)
        self.seq += 1
        self.run.refresh_from_db()


def make_run(project: Project, name: str = "run", **fields: Any) -> Run:
    """A registered run."""
    return Run.objects.create(project=project, name=name, **fields)


def _chunk(
    steps: ArrayLike, scalars: Mapping[str, ArrayLike], statistics: Mapping[str, ArrayLike]
) -> ChunkData:
    numbers: NDArray[np.int64] = np.asarray(steps, dtype=np.int64)
    times = np.datetime64("2026-01-01T00:00:00", "us") + numbers * np.timedelta64(100_000, "us")
    values = {name: np.asarray(column, dtype=np.float64) for name, column in scalars.items()}
    return ChunkData(
        steps=numbers,
        times=times,
        scalars=values,
        logged={name: np.ones(len(numbers), dtype=bool) for name in values},
        statistics={name: np.asarray(matrix, dtype=np.float64) for name, matrix in statistics.items()},
    )
