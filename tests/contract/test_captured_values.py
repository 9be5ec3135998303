"""What the agent captures for a step, in several rows, is stored and read back by the real server."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest
import torch
from helpers.live_servers import Server

import fp8scope
from fp8scope.capture.active import current
from fp8scope_dashboard.alerts.models import Alert
from fp8scope_dashboard.runs.models import Run, Writer
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.compaction import compact_run

pytestmark = pytest.mark.django_db(transaction=True)


def test_it_works(server: Server, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = fp8scope.attach(
        model, optimizer, url=server.url, token=server.token, directory=str(tmp_path), overhead=None
    )
    capture = current()
    assert capture is not None
    capture.take("tensorboard", {"return": -1.0}, 5)
    for number in range(6):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for episode in range(3):
            capture.take("tensorboard", {"return": 10.0 * number + episode}, 100 * number + episode)
    report = run.finish()
    assert report.complete and report.errors == 0
    stored = Run.objects.get(pk=run.id)
    assert stored.rows_stored == 1 + 6 * 3
    for _ in range(2):
        # Of a step the last value, and its own step beside it; then once more from compacted blocks.
        returns = queries.scalar(UUID(run.id), "return")
        assert returns.steps.tolist() == [0, 1, 2, 3, 4, 5, 6]
        assert returns.values.tolist() == [-1.0, *(10.0 * number + 2 for number in range(6))]
        beside = queries.scalar(UUID(run.id), "tracker_step/tensorboard")
        assert beside.values.tolist() == [5.0, *(100.0 * number + 2 for number in range(6))]
        assert queries.scalar(UUID(run.id), "loss").steps.tolist() == [1, 2, 3, 4, 5, 6]
        compact_run(UUID(run.id))
    # Rows that share a step are no return to an earlier one.
    assert Writer.objects.filter(run=stored).count() == 1 and not Alert.objects.filter(run=stored).exists()
    assert stored.environment["capture"]["values"] == {"tensorboard": 19}
