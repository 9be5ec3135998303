"""A project with a run that is being written, and a process that takes commands."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from dashboard.helpers.recording import Recorder, make_run
from pydantic import TypeAdapter

from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.control import reports, schemas
from fp8scope_dashboard.receipts.dedup import identify
from fp8scope_dashboard.runs.models import Run

Tell = Callable[..., bool]


@pytest.fixture
def run(db: None) -> Run:
    return make_run(create_project("research", "Research"))


@pytest.fixture
def writer(run: Run) -> Recorder:
    return Recorder(run, tensors=["blocks.0.up.input", "blocks.1.down.grad_output"])


def tell(writer: Recorder, **document: Any) -> bool:
    """Store a report as this writer's next message."""
    body = TypeAdapter(schemas.ReportIn).validate_python(
        {"writer": str(writer.uuid), "seq": writer.seq, **document}
    )
    message = identify(writer.run.id, writer.uuid, writer.seq, "report", repr(document).encode())
    stored = reports.store(writer.run, message, body)
    writer.seq += stored
    return stored


@pytest.fixture
def listening(writer: Recorder) -> Recorder:
    """The writer, after it has said what it takes."""
    tell(writer, kind="accepts", accepts=["fallback", "checkpoint", "pause", "resume"])
    return writer


def another(run: Run, rank: int = 1) -> Recorder:
    """A further process of the run."""
    return Recorder(run, rank=rank, uuid=uuid.uuid4())
