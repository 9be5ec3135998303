"""A loss that a training spoils with its last operation: stored as it was, and an alert at that very step."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from agent.helpers.loops import regression, squares, update
from helpers.live_servers import Server, Worker

import fp8scope
from fp8scope_dashboard.alerts.models import Event
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries

WAIT_SECONDS = 60
STEPS, SPOILT = 40, 31


def train(server: Server, directory: Path, factor: float) -> Run:
    """The loss of step SPOILT is multiplied by `factor`, and is not learned from."""
    model, optimizer = regression()
    run = fp8scope.attach(
        model, optimizer, name="spoilt", url=server.url, token=server.token, directory=directory
    )
    for number in range(1, STEPS + 1):
        loss = squares(model, number)
        (loss * factor if number == SPOILT else loss).backward()  # type: ignore[no-untyped-call]
        if number == SPOILT:
            # As a script that clips, or skips the update, would go on.
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
    assert np.flatnonzero(~np.isfinite(stored.values)).tolist() == [SPOILT - 1]
    spoilt = stored.values[SPOILT - 1]
    assert math.isnan(spoilt) if math.isnan(factor) else spoilt == factor
    deadline = time.monotonic() + WAIT_SECONDS
    while not (events := list(Event.objects.filter(run=run, kind="loss_not_finite"))):
        assert time.monotonic() < deadline, "No alert was raised."
        time.sleep(0.1)
    assert [event.onset_step for event in events] == [SPOILT]
