"""Reading the new rows of many writers at once returns what reading each writer by itself returns."""

from __future__ import annotations

import uuid

import numpy as np
import pytest
from dashboard.helpers.compacting import compact, over
from dashboard.helpers.recorder import Recorder

from fp8scope_dashboard.telemetry import new_rows, queries
from fp8scope_dashboard.telemetry.models import Block, Chunk
from fp8scope_dashboard.telemetry.new_rows import Pieces, Request

pytestmark = pytest.mark.django_db


def recorded(batches: int, first: int = 0) -> Recorder:
    """A writer that has sent so many batches of two rows."""
    recorder = Recorder.of_new_run(["a", "b"])
    for seq in range(first, first + batches):
        steps = [2 * seq, 2 * seq + 1]
        recorder.send(steps, {"loss": [float(seq), np.nan]}, {"amax": np.full((2, 2), seq + 0.5)}, seq=seq)
    return recorder


def request(recorder: Recorder, first: int, until: int = 2**63 - 1) -> Request:
    return Request(run_id=recorder.run.id, writer=recorder.writer, first=first, until=until)


def rows(pieces: Pieces) -> list[tuple[int, list[int], str, str]]:
    return [
        (seq, data.steps.tolist(), str(data.scalars), str(data.statistics)) for seq, data in pieces.pieces
    ]


def test_it_works() -> None:
    """Several writers at different places, one of them with nothing new."""
    first, second, third = recorded(4), recorded(2), recorded(1)
    asked = [request(first, 1, 3), request(second, 0), request(third, 1)]
    read = new_rows.read(asked, 16)
    for each, pieces in zip(asked, read, strict=True):
        alone = queries.stream(each.run_id, each.writer, each.first, 16, until=each.until)
        assert rows(pieces) == rows(Pieces(alone, True)) and pieces.is_all
        assert [data.seqs.tolist() for _, data in pieces.pieces if data.seqs is not None] == [
            [seq, seq] for seq, _ in alone
        ]
    assert [len(pieces.pieces) for pieces in read] == [2, 2, 0]


def test_reads_only_the_columns_that_are_asked_for() -> None:
    recorder = recorded(1)
    only = Request(run_id=recorder.run.id, writer=recorder.writer, first=0, scalars=["loss"], statistics=[])
    (_, data), *_ = new_rows.read([only], 16)[0].pieces
    assert (list(data.scalars), list(data.statistics)) == (["loss"], [])


def test_reads_what_compaction_has_moved() -> None:
    moved, fresh = recorded(5), recorded(2)
    over(moved)
    compact(moved)
    assert Block.objects.filter(run=moved.run).exists()
    moved.send([100], {"loss": [1.0]}, {"amax": [[1.0, 2.0]]}, seq=5)
    read, beside = new_rows.read([request(moved, 2), request(fresh, 0)], 16)
    assert [step for _, data in read.pieces for step in data.steps.tolist()] == [4, 5, 6, 7, 8, 9, 100]
    assert read.is_all and len(beside.pieces) == 2


def test_what_is_too_much_at_once_is_left_for_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorded(5)
    (some,) = new_rows.read([request(recorder, 0)], 3)
    assert [seq for seq, _ in some.pieces] == [0, 1, 2] and not some.is_all
    # A message is read however large it is.
    monkeypatch.setattr(new_rows, "MAX_BYTES", 1)
    (some,) = new_rows.read([request(recorder, 3)], 3)
    assert [seq for seq, _ in some.pieces] == [3] and not some.is_all
    (some,) = new_rows.read([request(recorder, 4)], 3)
    assert [seq for seq, _ in some.pieces] == [4] and some.is_all


def test_finds_gaps() -> None:
    recorder, late = recorded(2), recorded(1, first=3)
    recorder.send([50], {"loss": [1.0]}, {"amax": [[1.0, 1.0]]}, seq=4)
    asked = [
        (recorder.run.id, recorder.writer, 0),
        (recorder.run.id, recorder.writer, 1),
        (late.run.id, late.writer, 0),
        (late.run.id, late.writer, 3),
        (late.run.id, uuid.uuid4(), 7),
    ]
    arrived = new_rows.arrived(asked)
    for (run, writer, start), each in zip(asked, arrived, strict=True):
        assert each.until == queries.contiguous_until(run, writer, start)
    assert [each.after_gap and each.after_gap[0] for each in arrived] == [4, 4, 3, None, None]
    assert new_rows.arrived([]) == [] and new_rows.read([], 16) == []
    assert Chunk.objects.count() == 4
