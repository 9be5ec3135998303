"""Validate and store histograms of exponents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast
from uuid import UUID

import numpy as np
import pyarrow as pa
from django.db import transaction
from numpy.typing import NDArray

from fp8scope_dashboard.ingest.arrow_preflight import Envelope
from fp8scope_dashboard.ingest.batch import decompress, read_metadata, read_natural, read_uuid
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.receipts import dedup
from fp8scope_dashboard.runs import services as runs
from fp8scope_dashboard.runs.models import Run, Writer
from fp8scope_dashboard.telemetry import histograms as store
from fp8scope_dashboard.telemetry.codec import STEP, TIME, TIME_TYPE
from fp8scope_dashboard.wire import limits
from fp8scope_dashboard.wire.errors import (
    CatalogueGapRefusalError,
    InvalidError,
    MalformedError,
    TooLargeError,
)

COLUMNS = {
    STEP: pa.int64(),
    TIME: TIME_TYPE,
    "tensor": pa.int32(),
    "counts": pa.list_(pa.float64(), store.EXPONENT_BINS),
}


@dataclass(frozen=True, kw_only=True)
class HistogramMessage:
    """A message that satisfies every rule that can be checked without the database.

    Attributes:
        tensors: int32[n], distinct positions in the catalogue of the writer.
        body: the Arrow IPC stream to store.
    """

    run: UUID
    writer: UUID
    seq: int
    step: int
    tensors: NDArray[np.int32]
    body: bytes


def read_histograms(envelope: Envelope, body: bytes) -> HistogramMessage:
    """Validate a message.

    Raises:
        RefusalError: the message is invalid; the subclass and message say why.
    """
    try:
        metadata = read_metadata(envelope.schema)
        _check_columns(envelope.schema)
    except UnicodeDecodeError as error:
        raise MalformedError("A name in the schema is not UTF-8.", "Write names as text.") from error
    if not 1 <= envelope.rows <= limits.TENSORS:
        raise (InvalidError if envelope.rows < 1 else TooLargeError)(
            f"The message has {envelope.rows} histograms; it may have 1 to {limits.TENSORS}.",
            "Send one row for each tensor sampled in the step.",
        )
    batches = [decompress(message, envelope.schema) for message in envelope.batches]
    table = pa.Table.from_batches(batches, envelope.schema)
    if any(column.null_count for column in table.columns):
        raise InvalidError("A value is null.", "Omit tensors that were not sampled.")
    return HistogramMessage(
        run=read_uuid(metadata, "fp8scope.run"),
        writer=read_uuid(metadata, "fp8scope.writer"),
        seq=read_natural(metadata, "fp8scope.seq", limits.MAX_SEQ),
        step=_check_step(table),
        tensors=_check_rows(table),
        body=body,
    )


def _check_columns(schema: pa.Schema) -> None:
    if sorted(schema.names) != sorted(COLUMNS):
        raise InvalidError(
            f"The columns must be {', '.join(COLUMNS)}.", "See POST /runs/{run}/histograms in docs/wire.md."
        )
    for name, expected in COLUMNS.items():
        actual = schema.field(name).type
        same_list = pa.types.is_fixed_size_list(actual) and (actual.value_type, actual.list_size) == (
            pa.float64(),
            store.EXPONENT_BINS,
        )
        if actual != expected and not (name == "counts" and same_list):
            raise InvalidError(
                f"The column {name} must be {expected}, not {actual}."[:300], "See docs/wire.md."
            )


def _check_step(table: pa.Table) -> int:
    steps = table.column(STEP).to_numpy()
    if steps.min() != steps.max() or steps[0] < 0:
        raise InvalidError(
            "The step must be the same in all rows and not negative.", "Send one message per step."
        )
    micros = table.column(TIME).cast(pa.int64()).to_numpy()
    if micros.min() < limits.FIRST_TIME_US or micros.max() > limits.LAST_TIME_US:
        raise InvalidError(
            "A time is before 1970 or after 2199.",
            "time is in microseconds since 1970, UTC. Check the clock.",
        )
    return int(steps[0])


def _check_rows(table: pa.Table) -> NDArray[np.int32]:
    tensors: NDArray[np.int32] = table.column("tensor").to_numpy()
    if tensors.min() < 0 or len(np.unique(tensors)) != len(tensors):
        raise InvalidError(
            "A tensor is negative or repeated.", "tensor is a position in the catalogue of the writer."
        )
    for chunk in table.column("counts").chunks:
        counts = cast("pa.FixedSizeListArray[Any]", chunk).flatten()
        values = counts.to_numpy(zero_copy_only=False)
        if counts.null_count or not (np.isfinite(values) & (values >= 0)).all():
            raise InvalidError("A count is null, negative or not finite.", "Send counts of 0 or more.")
    return tensors


@transaction.atomic
def store_histograms(run: Run, message: dedup.MessageId, histograms: HistogramMessage) -> bool:
    """Store a message. Returns False if it is already stored.

    Raises:
        WriterConflictError, CatalogueGapRefusalError: see docs/wire.md.
    """
    writer = runs.writer_of(run, histograms.writer)
    stored = Writer.objects.filter(run=run, pk=writer.pk).values_list("catalogue", flat=True).get()
    catalogue = np.array(stored or [], np.int64)
    if (last := int(histograms.tensors.max())) >= len(catalogue):
        raise CatalogueGapRefusalError(
            f"A histogram has tensor {last}; the catalogue of this writer has {len(catalogue)} entries.",
            "Send the catalogue from offset 0, then this message again.",
        )
    if not dedup.record(message):
        return False
    indices = catalogue[histograms.tensors].tolist()
    store.append(run.id, histograms.writer, histograms.seq, histograms.step, indices, histograms.body)
    runs.note_contact(run, writer)
    run_changed(run.id, run.project_id, "histogram", histograms.step)
    return True
