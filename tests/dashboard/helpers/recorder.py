"""Storing rows as ingest does, without HTTP."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import numpy as np
from contract.helpers.wire_client import TIME, arrow_batch

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.ingest.batch import read_arrow
from fp8scope_dashboard.ingest.services import store_batch
from fp8scope_dashboard.receipts.dedup import identify
from fp8scope_dashboard.runs.catalogue import TensorEntry, extend
from fp8scope_dashboard.runs.models import Run


@dataclass
class Recorder:
    """One writer of one run."""

    run: Run
    rank: int = 0
    writer: UUID = field(default_factory=uuid.uuid4)
    seq: int = 0

    @classmethod
    def of_new_run(cls, tensors: Sequence[str] = ()) -> Recorder:
        project = Project.objects.get_or_create(slug="default", name="Default")[0]
        recorder = cls(Run.objects.create(project=project, name="a run"))
        recorder.catalogue(tensors)
        return recorder

    def another(self, rank: int, tensors: Sequence[str] = ()) -> Recorder:
        """Another writer of the same run."""
        recorder = Recorder(self.run, rank)
        recorder.catalogue(tensors)
        return recorder

    def catalogue(self, tensors: Sequence[str], offset: int = 0) -> None:
        entries = [
            TensorEntry(name=name, module="", role="input", format="e4m3", shape=(8,), numel=8)
            for name in tensors
        ]
        extend(self.run, self.writer, offset, entries, rank=self.rank, hostname="")

    def send(
        self,
        steps: Sequence[int],
        scalars: Mapping[str, Sequence[float | None]] | None = None,
        tensors: Mapping[str, Any] | None = None,
        seq: int | None = None,
        *,
        urgent: bool = False,
    ) -> int:
        """Store a batch; returns its seq. `tensors` are [rows][tensors] per statistic, NaN for null."""
        number = self.seq if seq is None else seq
        self.seq = max(self.seq, number + 1)
        lists = {
            name: [[None if np.isnan(v) else float(v) for v in row] for row in np.asarray(values, float)]
            for name, values in (tensors or {}).items()
        }
        body = arrow_batch(self.run.id, self.writer, number, steps, scalars=scalars, tensors=lists)
        self.run.refresh_from_db()
        message = identify(self.run.id, self.writer, number, "batch", body)
        assert store_batch(self.run, message, read_arrow(body), urgent=urgent)
        return number


def time_of(row: int) -> np.datetime64:
    """The time of a row by its index in its batch."""
    return np.datetime64(TIME + 1000 * row, "us")
