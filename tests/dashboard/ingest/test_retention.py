"""Raw values for N days, roll-ups for ever."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
from dashboard.telemetry.recorder import Recorder
from django.utils import timezone

from fp8scope_dashboard.ingest import tasks
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import compaction, queries, retention
from fp8scope_dashboard.telemetry.models import Block, Rolling, Tile

pytestmark = pytest.mark.django_db(transaction=True)

STEPS, DAYS = 1000, 30


@pytest.fixture
def run() -> Run:
    """A finished, compacted run of 1,000 steps with one spike, received 100 days ago; 30 days are kept."""
    recorder = Recorder.of_new_run(["a.input", "b.input"])
    amax = np.ones((STEPS, 2))
    amax[333, 1] = 77.0
    for begin in range(0, STEPS, 100):
        part = range(begin, begin + 100)
        recorder.send(
            list(part), {"loss": [1.0 / (1 + step) for step in part]}, {"amax": amax[begin : begin + 100]}
        )
    recorder.run.project.raw_days = DAYS
    recorder.run.project.save()
    Run.objects.update(state="finished")
    while compaction.compact_run(recorder.run.pk):
        pass
    Block.objects.update(received_at=timezone.now() - timedelta(days=100))
    assert Block.objects.exists() and Tile.objects.exists()
    return Run.objects.get()


def test_it_works(run: Run) -> None:
    assert retention.runs_due() == [run.pk]
    assert retention.retain_run(run.pk) == STEPS
    assert not Block.objects.exists() and not Tile.objects.exists()
    assert Rolling.objects.get().raw_from >= STEPS
    assert retention.runs_due() == []
    spiked = queries.tensor_series(run.pk, 1, "amax", points=200)
    assert np.nanmax(spiked.values) == 77.0
    assert len(queries.scalar(run.pk, "loss")) > 0
    assert queries.heatmap(run.pk, "amax", columns=10).values.max() == 77.0
    assert Run.objects.get().rows_stored == STEPS


def test_without_a_policy_all_is_kept(run: Run) -> None:
    run.project.raw_days = None
    run.project.save()
    assert retention.runs_due() == [] and retention.retain_run(run.pk) == 0
    assert len(queries.scalar(run.pk, "loss")) == STEPS


def test_what_is_young_is_kept(run: Run) -> None:
    Block.objects.update(received_at=timezone.now() - timedelta(days=DAYS - 1))
    assert retention.runs_due() == [] and retention.retain_run(run.pk) == 0
    assert len(queries.scalar(run.pk, "loss")) == STEPS


def test_what_is_not_rolled_up_is_kept(run: Run) -> None:
    Rolling.objects.update(until=0)
    assert retention.retain_run(run.pk) == 0
    assert Block.objects.exists()


def test_in_many_transactions(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "BLOCKS_AT_ONCE", 1)
    tasks.retain_run(str(run.pk))
    assert not Tile.objects.exists()
