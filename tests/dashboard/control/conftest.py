"""Fixtures: a running run, its writer, and a writer that accepts commands."""

from __future__ import annotations

import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.reporting import send_report

from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.runs.models import Run


@pytest.fixture
def run(db: None) -> Run:
    return make_run(create_project("research", "Research"))


@pytest.fixture
def writer(run: Run) -> Recorder:
    return Recorder(run=run, tensors=["blocks.0.up.input", "blocks.1.down.grad_output"])


@pytest.fixture
def listening(writer: Recorder) -> Recorder:
    """The writer, after it has reported the commands that it accepts."""
    send_report(writer, kind="accepts", accepts=["fallback", "checkpoint", "pause", "resume"])
    return writer
