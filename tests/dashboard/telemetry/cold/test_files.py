"""Files go with the runs and values that they hold; runs come back; a check finds what is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import pytest
from dashboard.helpers.object_stores import (
    ColdFolder,
    cold_bodies,
    everything,
    old_run,
    sample,
    warm_bodies,
)
from django.db.models import F
from django.utils import timezone

from fp8scope_dashboard.cold_store.errors import ColdStoreAwayError, ColdValuesLostError
from fp8scope_dashboard.cold_store.locations import file_name
from fp8scope_dashboard.cold_store.object_store import object_store
from fp8scope_dashboard.cold_store.reading import read_bodies
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import deletion, queries, retention
from fp8scope_dashboard.telemetry.cold import checking, files, moving, returning
from fp8scope_dashboard.telemetry.models import Block, ColdFile, ColdFileState, Histogram, Rolling

pytestmark = pytest.mark.django_db(transaction=True)


@contextmanager
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The store rests, as after an operation that it has not answered."""
    with monkeypatch.context() as patched:
        patched.setattr(object_store(), "_rests_until", float("inf"))
        yield


def ten_minutes_pass() -> None:
    ColdFile.objects.update(changed_at=F("changed_at") - timedelta(minutes=11))


def test_it_works(any_cold: ColdFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is deleted while the store is away; its file goes later."""
    recorder = old_run(330)
    moving.move_run(recorder.run.pk)
    with away(monkeypatch):
        deletion.begin(recorder.run)
        deletion.delete_run(recorder.run.pk)
        assert not Run.with_deleted.filter(pk=recorder.run.pk).exists()
        files._release_deleted_runs()
        ten_minutes_pass()
        with pytest.raises(ColdStoreAwayError):
            files.delete_unneeded()
    assert len(any_cold.names()) == 1
    assert files.delete_unneeded() == 1
    assert any_cold.names() == [] and not ColdFile.objects.exists()


def test_files_of_runs_that_are_there_stay(cold: ColdFolder) -> None:
    recorder = old_run(330)
    moving.move_run(recorder.run.pk)
    ten_minutes_pass()
    assert files.delete_unneeded() == 0 and len(cold.names()) == 1


def test_a_file_that_is_gone_already_holds_up_nothing(any_cold: ColdFolder) -> None:
    recorder = old_run(330)
    moving.move_run(recorder.run.pk)
    any_cold.remove(any_cold.names()[0])
    ColdFile.objects.update(state=ColdFileState.UNNEEDED)
    ten_minutes_pass()
    assert files.delete_unneeded() == 1 and not ColdFile.objects.exists()


def test_retention_releases_files(cold: ColdFolder) -> None:
    recorder = old_run()
    moving.move_run(recorder.run.pk)
    run = recorder.run
    run.project.raw_days = 30
    run.project.save()
    Block.objects.update(received_at=timezone.now() - timedelta(days=100))
    retention.retain_run(run.pk)
    # Histograms are in the same file.
    assert ColdFile.objects.get().state == ColdFileState.STORED
    Histogram.objects.update(received_at=timezone.now() - timedelta(days=100))
    retention.retain_run(run.pk)
    assert not cold_bodies() and ColdFile.objects.get().state == ColdFileState.UNNEEDED
    assert files.delete_unneeded() == 0, "something may still read it"
    ten_minutes_pass()
    assert files.delete_unneeded() == 1 and cold.names() == []


def test_runs_come_back(any_cold: ColdFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = old_run(330)
    before, bodies = everything(recorder), warm_bodies()
    moving.move_run(recorder.run.pk)
    monkeypatch.setattr(returning, "MAX_BYTES", 2_000)
    assert returning.runs_in_store() == [recorder.run.pk]
    assert returning.bring_back(recorder.run.pk) == bodies == warm_bodies()
    assert returning.runs_in_store() == [] and everything(recorder) == before
    assert moving.runs_due() == [], "it stays"
    ten_minutes_pass()
    assert files.delete_unneeded() == 1 and any_cold.names() == []
    # Its old file may have been marked, and it moves again under the same name.
    assert moving.move_run(recorder.run.pk).bodies == bodies and everything(recorder) == before


def test_a_run_moves_again_before_its_file_is_deleted(cold: ColdFolder) -> None:
    recorder = old_run(330)
    before = everything(recorder)
    moving.move_run(recorder.run.pk)
    (name,) = cold.names()
    returning.bring_back(recorder.run.pk)
    moving.move_run(recorder.run.pk)
    ten_minutes_pass()
    assert files.delete_unneeded() == 0 and cold.names() == [name]
    assert everything(recorder) == before


def test_a_return_that_is_interrupted_goes_on(cold: ColdFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = old_run(330)
    before = everything(recorder)
    moving.move_run(recorder.run.pk)
    monkeypatch.setattr(returning, "MAX_BYTES", 2_000)
    read, calls = read_bodies, iter(range(2))

    def read_some(*arguments: object, **options: object) -> object:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return read(*arguments, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(returning, "read_bodies", read_some)
        returning.bring_back(recorder.run.pk)
    assert warm_bodies() and cold_bodies() and everything(recorder) == before
    assert not Rolling.objects.get().cold_due
    returning.bring_back(recorder.run.pk)
    assert not cold_bodies() and everything(recorder) == before


def test_the_check_reads_everything(any_cold: ColdFolder) -> None:
    recorder = old_run(330)
    moving.move_run(recorder.run.pk)
    any_cold.write("notes.txt", b"not ours")
    result = checking.check_store()
    assert (result.files, result.bodies) == (1, cold_bodies())
    assert result.bytes == ColdFile.objects.get().bytes
    assert (result.unknown, result.unknown_bytes) == (1, 8) and not result.lost


def test_a_damaged_body_is_found_and_not_shown(any_cold: ColdFolder) -> None:
    recorder = old_run(330)
    moving.move_run(recorder.run.pk)
    (name,) = any_cold.names()
    content = bytearray(any_cold.read(name))
    content[10] ^= 1
    any_cold.write(name, bytes(content))
    result = checking.check_store()
    assert dict(result.lost) == {name: 1} and result.missing == []
    assert result.bodies == cold_bodies() - 1
    # The first body in the file is that of the first statistic.
    with pytest.raises(ColdValuesLostError, match="damaged"):
        queries.tensor_series(recorder.run.pk, 0, "amax")
    assert len(queries.tensor_series(recorder.run.pk, 0, "saturated"))


def test_a_missing_file_is_found(any_cold: ColdFolder) -> None:
    recorder = old_run(330)
    moving.move_run(recorder.run.pk)
    sample(recorder, range(20, 21), np.random.default_rng(1))
    moving.move_run(recorder.run.pk)
    first = file_name(recorder.run.pk, bytes(ColdFile.objects.order_by("-bytes")[0].digest))
    any_cold.remove(first)
    result = checking.check_store()
    assert dict(result.lost) == {first: cold_bodies() - 1} and result.missing == [first]
    assert result.bodies == 1
    with pytest.raises(ColdValuesLostError, match="lacks the file"):
        queries.tensor_series(recorder.run.pk, 0, "amax")
    with pytest.raises(ColdValuesLostError, match="lacks the file"):
        returning.bring_back(recorder.run.pk)


def test_a_short_file_is_found(cold: ColdFolder) -> None:
    recorder = old_run(330)
    moving.move_run(recorder.run.pk)
    (name,) = cold.names()
    cold.write(name, cold.read(name)[:100])
    with pytest.raises(ColdValuesLostError, match="only the beginning"):
        queries.heatmap(recorder.run.pk, "saturated")
    assert sum(checking.check_store().lost.values()) == cold_bodies()
