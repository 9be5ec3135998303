"""A loss that becomes NaN or infinite is stored as it is and raises an alert at that step."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from agent.helpers.loops import regression, squares, update
from helpers.live_servers import Server, Worker
from helpers.waiting import wait_until

import fp8scope
from fp8scope_dashboard.alerts.models import Alert
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries

WAIT_SECONDS = 60
STEPS, BAD_STEP = 40, 31


def train(server: Server, directory: Path, factor: float) -> Run:
    """Train with the loss of step BAD_STEP multiplied by `factor`, and skip the update of that step."""
    model, optimizer = regression()
    run = fp8scope.attach(
        model, optimizer, name="bad loss", url=server.url, token=server.token, directory=directory
    )
    for number in range(1, STEPS + 1):
        loss = squares(model, number)
        (loss * factor if number == BAD_STEP else loss).backward()  # type: ignore[no-untyped-call]
        if number == BAD_STEP:
            # As a script does that clips gradients or skips the update.
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        update(optimizer)
    report = run.finish()
    assert report.complete and report.errors == 0, report
    return Run.objects.get(pk=run.id)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_it_works(factor: float, server: Server, worker: Worker, tmp_path: Path) -> None:
    run = train(server, tmp_path, factor)
    stored = queries.scalar(run.id, "loss")
    assert stored.steps.tolist() == list(range(1, STEPS + 1))
    assert np.flatnonzero(~np.isfinite(stored.values)).tolist() == [BAD_STEP - 1]
    bad_loss = stored.values[BAD_STEP - 1]
    assert math.isnan(bad_loss) if math.isnan(factor) else bad_loss == factor
    events = Alert.objects.filter(run=run, kind="loss_not_finite")
    wait_until(events.exists, "the alert")
    assert [event.onset_step for event in events] == [BAD_STEP]
