"""The console log of a run: bounds, order and the exception in it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from dashboard.helpers.recording import Recorder, make_run
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.runs import console
from fp8scope_dashboard.runs.console import NewLine
from fp8scope_dashboard.runs.models import ConsoleLine, Run, Writer
from fp8scope_dashboard.telemetry import retention

AT = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def run(db: None) -> Run:
    return make_run(create_project("research", "Research"), "r")


def write(run: Run, *texts: str, rank: int = 0, attempt: int = 0, first: int = 0) -> Writer:
    writer = Writer.objects.filter(run=run, rank=rank, attempt=attempt).first()
    if writer is None:
        writer = Writer.objects.get(uuid=Recorder(run=run, rank=rank, attempt=attempt).uuid)
    lines = [NewLine(first + index, AT, 3, "stdout", text) for index, text in enumerate(texts)]
    console.store(run, writer, lines)
    return writer


def test_it_works(run: Run) -> None:
    write(run, "second", attempt=1)
    write(run, "first", "again")
    write(run, "elsewhere", rank=1)
    writers = console.writers_with_lines(run, 0)
    # The starts of the training follow one another, whatever arrived first.
    assert [line.text for line in console.newest(writers, 10)] == ["first", "again", "second"]
    last = console.newest(writers, 1)[0]
    assert [line.text for line in console.before(writers, last, 1)] == ["again"]
    assert [line.text for line in console.newest(writers, 9, "AGA")] == ["again"]
    assert "".join(console.as_text(run, 0)).splitlines()[1:3] == ["first", "again"]


def test_pieces_join_over_many_starts(
    run: Run, monkeypatch: pytest.MonkeyPatch, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    monkeypatch.setattr(console, "PIECE", 2)
    texts = [f"{attempt}.{line}" for attempt in range(40) for line in range(attempt % 4)]
    for attempt in range(40):
        write(run, *(f"{attempt}.{line}" for line in range(attempt % 4)), attempt=attempt)
    writers = console.writers_with_lines(run, 0)
    assert len(writers) == 30
    for count in (1, 2, 7, 45, 60, 99):
        with django_assert_max_num_queries(6):
            shown = console.newest(writers, count)
        assert [line.text for line in shown] == texts[-count:]
        begin = texts.index(shown[0].text)
        with django_assert_max_num_queries(6):
            earlier = console.before(writers, shown[0], count)
        assert [line.text for line in earlier] == texts[max(0, begin - count) : begin]
    with_one = [text for text in texts if "1" in text]
    assert [line.text for line in console.newest(writers, 20, "1")] == with_one[-20:]
    found = console.newest(writers, 5, "1")[0]
    assert [line.text for line in console.before(writers, found, 4, "1")] == with_one[-9:-5]
    lines = "".join(console.as_text(run, 0)).splitlines()
    assert [line for line in lines if not line.startswith("---")] == texts


def test_the_first_and_the_newest_lines_are_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FIRST_LINES", 5), ("NEWEST_LINES", 20), ("SLACK", 10)):
        monkeypatch.setattr(console, name, value)
    for begin in range(0, 200, 10):
        write(run, *["x"] * 10, first=begin)
    numbers = list(ConsoleLine.objects.order_by("number").values_list("number", flat=True))
    assert numbers[:5] == [0, 1, 2, 3, 4] and numbers[-1] == 199
    assert 160 <= numbers[5] <= 180 and len(numbers) <= 5 + 20 + 10 + 10


def test_finds_the_exception(run: Run) -> None:
    assert console.last_exception(run) == ""
    traceback = ["Traceback (most recent call last):", '  File "x.py", line 1', "    x()"]
    write(run, *traceback, "torch.OutOfMemoryError: out of memory", "cleaning up", "[rank0]: done")
    assert console.last_exception(run) == "torch.OutOfMemoryError: out of memory"
    write(run, "all is well: no Error", attempt=1)
    assert console.last_exception(run) == ""


def test_old_lines_are_deleted_with_the_raw_values(run: Run) -> None:
    run.project.raw_days = 3
    run.project.save()
    write(run, "old", "new")
    ConsoleLine.objects.filter(text="old").update(received_at=timezone.now() - timedelta(days=4))
    assert retention.runs_due() == [run.pk]
    retention.retain_run(run.pk)
    assert [line.text for line in ConsoleLine.objects.all()] == ["new"]
