"""Storing reports as a training process would send them."""

from __future__ import annotations

import uuid
from typing import Any

from dashboard.helpers.recording import Recorder
from pydantic import TypeAdapter

from fp8scope_dashboard.control import reports, schemas
from fp8scope_dashboard.receipts.dedup import identify
from fp8scope_dashboard.runs.models import Run


def send_report(writer: Recorder, **document: Any) -> bool:
    """Store a report as this writer's next message."""
    body = TypeAdapter(schemas.ReportIn).validate_python(
        {"writer": str(writer.uuid), "seq": writer.seq, **document}
    )
    message = identify(writer.run.id, writer.uuid, writer.seq, "report", repr(document).encode())
    stored = reports.store(writer.run, message, body)
    writer.seq += stored
    return stored


def another(run: Run, rank: int = 1) -> Recorder:
    """Another writer of the run."""
    return Recorder(run=run, rank=rank, uuid=uuid.uuid4())


PRODUCT = {"layer": "blocks.0.up", "product": "dgrad", "relative_error": 0.5, "cosine": 0.9}
BISECT: dict[str, Any] = {
    "kind": "bisect",
    "step": 40,
    "products": [PRODUCT, {**PRODUCT, "product": "wgrad", "relative_error": "NaN", "cosine": "NaN"}],
    "measured": 2,
    "total_error": 0.6,
    "total_cosine": 0.8,
    "loss_bf16": 2.0,
    "loss_fp8": "Infinity",
}
REFERENCE: dict[str, Any] = {
    "kind": "reference",
    "step": 100,
    "bf16": [2.0, 1.9],
    "fp8": [2.0, "NaN"],
    "delta": "NaN",
    "noise": 0.001,
    "tolerance": 0.0025,
    "verdict": "over",
    "policy": "fallback",
    "action": "fallback",
    "layers": 4,
    "kept_bytes": 1024,
    "seconds": 1.5,
}
INCIDENT: dict[str, Any] = {
    "kind": "annotation",
    "step": 130,
    "name": "incident",
    "text": "Incident kept: steps 1 to 130",
    "incident": {
        "reason": "alert",
        "alert": 7,
        "target": 120,
        "first_step": 1,
        "last_step": 130,
        "snapshots": [80, 100],
        "folder": "/data/<run>/incident-step-120",
        "host": "gpu-7",
        "rank": 3,
        "bytes": 5_242_880,
    },
}
ANNOTATION: dict[str, Any] = {
    "kind": "annotation",
    "step": 41,
    "name": "fallback",
    "text": "2 layers to BF16",
    "why": "an alert",
    "layers": ["a", "b"],
}
