"""Messages of exponent histograms, as docs/wire.md describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from contract.helpers.wire_client import ARROW, TIME, Answer, WireClient, arrow_batch

from fp8scope_dashboard.telemetry.histograms import EXPONENT_BINS, MIN_EXPONENT


def counts(**bins: float) -> list[float]:
    """A histogram. Keywords: `zero`, `bad` (not finite), or `e<exponent>` with m for minus, as in `em3`."""
    values = np.zeros(EXPONENT_BINS)
    for name, count in bins.items():
        if name == "zero":
            values[0] = count
        elif name == "bad":
            values[-1] = count
        else:
            values[int(name[1:].replace("m", "-")) - MIN_EXPONENT + 1] = count
    return list(values)


def message(
    client: WireClient,
    seq: int,
    step: int,
    histograms: Mapping[int, Sequence[float]],
    columns: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
    **options: Any,
) -> bytes:
    arrays = {
        "time": pa.array([TIME] * len(histograms), pa.timestamp("us", tz="UTC")),
        "tensor": pa.array(list(histograms), pa.int32()),
        "counts": pa.array(list(histograms.values()), pa.list_(pa.float64(), EXPONENT_BINS)),
        **(columns or {}),
    }
    steps = [step] * len(histograms)
    return arrow_batch(client.run, client.writer, seq, steps, columns=arrays, metadata=metadata, **options)


def send(client: WireClient, body: bytes, content_type: str = ARROW) -> Answer:
    return client.request("POST", "/histograms", body=body, headers={"Content-Type": content_type})
