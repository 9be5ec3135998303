"""Raw tensor values are deleted after N days; roll-ups and scalars are kept."""

from __future__ import annotations

import uuid
from datetime import timedelta

import numpy as np
import pytest
from contract.helpers.histograms import counts, message
from contract.helpers.wire_client import WireClient
from dashboard.helpers.recorder import Recorder
from django.utils import timezone

from fp8scope_dashboard.analysis.reading import read_arms
from fp8scope_dashboard.runs.models import Run, Writer
from fp8scope_dashboard.telemetry import compaction, histograms, locks, queries, retention, storage, tasks
from fp8scope_dashboard.telemetry.models import Block, Histogram, Rolling, Tile

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


def kept() -> set[str]:
    """The columns that have raw values."""
    return set(Tile.objects.values_list("name", flat=True))


def test_it_works(run: Run) -> None:
    assert retention.runs_due() == [run.pk]
    assert retention.retain_run(run.pk) == STEPS
    assert kept() == {"axis", "scalar:loss"}
    assert Rolling.objects.get().raw_from >= STEPS
    assert retention.runs_due() == []
    spiked = queries.tensor_series(run.pk, 1, "amax", points=200)
    assert np.nanmax(spiked.values) == 77.0
    loss = queries.scalar(run.pk, "loss")
    assert loss.steps.tolist() == list(range(STEPS))
    assert loss.values.tolist() == [1.0 / (1 + step) for step in range(STEPS)]
    assert queries.heatmap(run.pk, "amax", columns=10).values.max() == 77.0
    assert Run.objects.get().rows_stored == STEPS


def test_keeps_everything_without_a_policy(run: Run) -> None:
    run.project.raw_days = None
    run.project.save()
    assert retention.runs_due() == [] and retention.retain_run(run.pk) == 0
    assert len(queries.scalar(run.pk, "loss")) == STEPS


def test_keeps_recent_values(run: Run) -> None:
    Block.objects.update(received_at=timezone.now() - timedelta(days=DAYS - 1))
    assert retention.runs_due() == [] and retention.retain_run(run.pk) == 0
    assert len(queries.scalar(run.pk, "loss")) == STEPS


def test_keeps_values_that_are_not_rolled_up(run: Run) -> None:
    Rolling.objects.update(until=0)
    assert retention.retain_run(run.pk) == 0
    assert "tensor:amax" in kept()


def test_deletes_in_many_transactions(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "BLOCKS_AT_ONCE", 1)
    tasks.retain_run(str(run.pk))
    assert "tensor:amax" not in kept()


def test_a_verdict_still_uses_every_loss(run: Run) -> None:
    before = read_arms([run.pk], [])[0][0].curve
    assert retention.retain_run(run.pk) == STEPS
    after = read_arms([run.pk], [])[0][0].curve
    assert len(after.steps) == STEPS and np.array_equal(after.steps, before.steps)
    assert np.array_equal(after.losses, before.losses)


def test_a_run_without_tensors_is_never_due(run: Run) -> None:
    Tile.objects.filter(name__startswith="tensor:").delete()
    assert retention.runs_due() == [] and retention.retain_run(run.pk) == 0


def sampled(run: Run, steps: range, days: int) -> None:
    """Histograms of the run's first tensor at these steps, received so many days ago."""
    writer = Writer.objects.get(run=run).uuid
    client = WireClient("", None, run.pk, writer)
    for step in steps:
        body = message(client, 10_000 + step, step, {0: counts(e0=step)})
        histograms.append(run.pk, writer, 10_000 + step, step, [0], body)
    Histogram.objects.filter(step__in=steps).update(received_at=timezone.now() - timedelta(days=days))


def test_deletes_old_histograms(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled(run, range(100, 600, 100), DAYS + 1)
    sampled(run, range(600, 900, 100), DAYS - 1)
    before = storage.of_run(run.pk).tables["telemetry_histogram"]
    monkeypatch.setattr(retention, "HISTOGRAMS_AT_ONCE", 2)
    assert retention.retain_run(run.pk) == STEPS
    assert sorted(Histogram.objects.values_list("step", flat=True)) == [600, 700, 800]
    assert queries.histogram(run.pk, 0, 599) is None
    histogram = queries.histogram(run.pk, 0, 650)
    assert histogram is not None and (histogram.step, histogram.total) == (600, 600)
    after = storage.of_run(run.pk).tables["telemetry_histogram"]
    assert after[1] == 3 and after[0] < before[0]


def test_a_run_that_has_only_old_histograms_is_due(run: Run) -> None:
    assert retention.retain_run(run.pk) == STEPS and retention.runs_due() == []
    sampled(run, range(100, 101), DAYS - 1)
    assert retention.runs_due() == []
    sampled(run, range(200, 201), DAYS + 1)
    assert retention.runs_due() == [run.pk]
    assert retention.retain_run(run.pk) == 0 and retention.runs_due() == []
    assert Histogram.objects.get().step == 100


def test_resumes_after_a_kill_between_transactions(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled(run, range(100, 900, 100), DAYS + 1)
    monkeypatch.setattr(retention, "HISTOGRAMS_AT_ONCE", 3)
    transactions = iter(range(4))

    def lock_run(run_id: uuid.UUID, *, wait: bool) -> bool:
        if next(transactions, None) is None:
            raise KeyboardInterrupt
        return locks.lock_run(run_id, wait=wait)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(retention, "lock_run", lock_run)
        retention.retain_run(run.pk)
    # Blocks took two transactions (the second found none), histograms the other two.
    assert "tensor:amax" not in kept() and Histogram.objects.count() == 2
    assert retention.runs_due() == [run.pk]
    retention.retain_run(run.pk)
    assert not Histogram.objects.exists() and retention.runs_due() == []


def test_histograms_without_a_policy_are_kept(run: Run) -> None:
    sampled(run, range(100, 300, 100), 10_000)
    run.project.raw_days = None
    run.project.save()
    assert retention.retain_run(run.pk) == 0 and Histogram.objects.count() == 2
