"""Storing exponent histograms as ingest would."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fp8scope_dashboard.runs.models import Run, Writer
from fp8scope_dashboard.telemetry import histograms
from fp8scope_dashboard.telemetry.histograms import EXPONENT_BINS, MIN_EXPONENT

Floats = NDArray[np.float64]


def histogram_of(x: Floats) -> Floats:
    """The histogram of the wire of an array: zeros, a bin per exponent, NaN and infinities."""
    counts = np.zeros(EXPONENT_BINS)
    finite = np.isfinite(x)
    counts[0], counts[-1] = np.count_nonzero(x == 0), np.count_nonzero(~finite)
    exponents = np.frexp(np.abs(x[finite & (x != 0)]))[1] - 1
    np.add.at(counts, exponents - MIN_EXPONENT + 1, 1)
    return counts


def store_histograms(
    run: Run,
    step: int,
    tensors: Mapping[int, Floats],
    *,
    seq: int | None = None,
    writer: Writer | None = None,
) -> None:
    """Store the histograms of some tensors, by Tensor.index, in one message."""
    flat = pa.array(np.concatenate(list(tensors.values())), pa.float64())
    table = pa.table({"counts": pa.FixedSizeListArray.from_arrays(flat, EXPONENT_BINS)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    sender = writer or Writer.objects.get(run=run)
    message = 1000 + step if seq is None else seq
    histograms.append(run.id, sender.uuid, message, step, list(tensors), sink.getvalue().to_pybytes())
