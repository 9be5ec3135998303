"""Contents are stored once in a project, within quotas, and go with the last run that names them."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
from dashboard.helpers.logged_media import log, picture, sent, table
from dashboard.helpers.recording import Recorder, make_run
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.media import contents, limits, queries, services
from fp8scope_dashboard.media.models import MediaChunk, MediaContent, MediaItem
from fp8scope_dashboard.receipts.dedup import identify
from fp8scope_dashboard.receipts.models import Receipt
from fp8scope_dashboard.runs.models import Run, Writer
from fp8scope_dashboard.telemetry import deletion, retention, storage
from fp8scope_dashboard.wire.errors import ContentNeededError, InvalidError, MediaFullError

pytestmark = pytest.mark.django_db


def recorder(project: Project, name: str = "r", attempt: int = 0) -> Recorder:
    return Recorder(run=make_run(project, name), attempt=attempt)


def test_it_works(project: Project) -> None:
    first, second = recorder(project, "a"), recorder(project, "b")
    large = os.urandom(2 * limits.CHUNK_BYTES + 5)
    item = log(first, "weights", large, kind="file")
    again = log(second, "weights", large, kind="file", body=None)
    assert item.content == again.content and MediaContent.objects.count() == 1
    assert MediaChunk.objects.count() == 3 and contents.read(item.content) == large
    assert services.bytes_of_run(second.run.id) == services.bytes_of_project(project.pk) == len(large)
    assert storage.of_run(second.run.id).tables["media_mediachunk"][0] == len(large)


def test_a_message_is_stored_once(project: Project) -> None:
    writer = recorder(project)
    message = identify(writer.run.id, writer.uuid, 0, "media", b"head")
    assert services.store(writer.run, message, sent("t", b"text"))
    assert not services.store(writer.run, message, sent("t", b"text"))
    assert MediaItem.objects.count() == 1


def test_a_hash_of_another_project_is_not_enough(project: Project) -> None:
    log(recorder(create_project("other", "Other")), "t", b"secret")
    writer = recorder(project)
    with pytest.raises(ContentNeededError):
        log(writer, "t", b"secret", body=None)
    assert not Receipt.objects.filter(run=writer.run).exists(), "the message can be sent again"


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        ("image", b"<svg/>", "no PNG"),
        ("text", b"\xff\xfe", "no UTF-8"),
        ("text", b"x" * (limits.TEXT_BYTES + 1), "65,536 bytes"),
        ("table", b"[]", "no JSON object"),
        ("table", b"[" * 100_000, "no JSON object"),
        ("table", table([], []), "1 to 64 columns"),
        ("table", table(["a"], [[1]] * 1_001), "1,000 rows"),
        ("table", table(["a"], [[1, 2]]), "another length"),
        ("table", table(["a"], [[{"x": 1}]]), "no number"),
    ],
)
def test_a_content_must_be_what_it_says(project: Project, kind: str, body: bytes, message: str) -> None:
    with pytest.raises(InvalidError, match=message):
        log(recorder(project), "n", body, kind=kind)
    assert not MediaContent.objects.exists()
    # Nor by the hash of a file that the project has.
    writer = recorder(project, "b")
    log(writer, "f", body, kind="file")
    with pytest.raises(InvalidError, match=message):
        log(writer, "n", body, kind=kind, body=None)


def test_quotas(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RUN_BYTES", 10)
    monkeypatch.setattr(limits, "PROJECT_BYTES", 15)
    first, second = recorder(project, "a"), recorder(project, "b")
    log(first, "t", b"12345678")
    log(first, "t", b"12345678", step=2)
    with pytest.raises(MediaFullError, match="The run has media of"):
        log(first, "t", b"abc")
    log(second, "t", b"12345678")
    with pytest.raises(MediaFullError, match="The project has media of"):
        log(recorder(project, "c"), "t", b"abcdefgh")
    monkeypatch.setattr(limits, "NAMES", 1)
    with pytest.raises(InvalidError, match="of 1 names"):
        log(second, "other", b"1")
    monkeypatch.setattr(limits, "ITEMS_AT_STEP", 1)
    with pytest.raises(InvalidError, match="at step 1"):
        log(second, "t", b"1")


def test_a_later_start_replaces_what_it_repeats(project: Project) -> None:
    first = recorder(project)
    again = Recorder(run=first.run, attempt=1)
    Writer.objects.filter(uuid=first.uuid).update(first_step=1)
    Writer.objects.filter(uuid=again.uuid).update(first_step=3)
    for step in (1, 2, 3, 4):
        log(first, "t", b"%d" % step, step=step)
    log(again, "t", b"again", step=3)
    run = Run.objects.get(pk=first.run.pk)
    assert [item.step for item in queries.media_of(run).filter(writer__attempt=0)] == [1, 2]
    assert queries.names_of([run])[0].steps == (1, 2, 3)
    assert [item.writer.attempt for item in queries.items_at(run, "t", 4)] == [1]


@pytest.mark.django_db(transaction=True)
def test_contents_go_with_the_last_run_that_names_them(project: Project) -> None:
    first, second = recorder(project, "a"), recorder(project, "b")
    log(first, "own", picture(seed=1), kind="image")
    log(first, "both", b"text")
    log(second, "both", b"text")
    deletion.begin(first.run)
    deletion.delete_run(first.run.pk)
    assert [contents.read(content) for content in MediaContent.objects.all()] == [b"text"]
    assert MediaItem.objects.get().run == second.run and MediaChunk.objects.count() == 1


def test_retention_deletes_old_media(project: Project) -> None:
    Project.objects.filter(pk=project.pk).update(raw_days=7)
    writer = recorder(project)
    old = log(writer, "t", b"old")
    log(writer, "t", b"new", step=2)
    MediaItem.objects.filter(pk=old.pk).update(received_at=timezone.now() - timedelta(days=8))
    assert retention.runs_due() == [writer.run.pk]
    retention.retain_run(writer.run.pk)
    assert contents.read(MediaContent.objects.get()) == b"new" and retention.runs_due() == []
