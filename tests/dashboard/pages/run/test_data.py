"""The data page of a run: storage, missing messages, export, deletion; and the retention setting."""

from __future__ import annotations

import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.visitors import Visitor, html
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import deletion


@pytest.fixture
def run(admin: Visitor) -> Run:
    run = make_run(admin.project, "the <run>")
    recorder = Recorder(run=run, tensors=["a.input"])
    recorder.rows(range(40), {"loss": [1.0] * 40}, {"amax": [[2.0]] * 40})
    return run


def test_it_works(member: Visitor, run: Run) -> None:
    shown = html(member, f"runs/{run.pk}/data/")
    assert "the &lt;run&gt;" in shown and "bytes a point" in shown and "80 points" in shown
    assert "None missing" in shown and "Batches, not compacted yet" in shown
    assert f"runs/{run.pk}/data/" in html(member, f"runs/{run.pk}/?tab=notes"), "a part of the details"


def test_shows_missing_messages(member: Visitor, run: Run) -> None:
    recorder = Recorder(run=run, rank=1, seq=5)
    recorder.rows([41], {"loss": [1.0]})
    shown = html(member, f"runs/{run.pk}/data/")
    assert "5 missing" in shown and "None missing" not in shown


# A thread with a separate connection writes the file and sees only committed data.
@pytest.mark.django_db(transaction=True)
def test_downloads_the_run_as_a_file(member: Visitor, run: Run) -> None:
    answer = member.client.get(member.address(f"runs/{run.pk}/data/run.csv"))
    body = b"".join(answer)
    assert answer["Content-Disposition"].startswith('attachment; filename="the-run-')
    assert body.count(b"\n") == 2 + 40
    assert member.client.get(member.address(f"runs/{run.pk}/data/run.xlsx")).status_code == 404


def test_deleting_needs_the_name_of_the_run(admin: Visitor, run: Run) -> None:
    address = admin.address(f"runs/{run.pk}/data/delete")
    refused = admin.client.post(address, {"name": "another"}, follow=True).content.decode()
    assert "The run was not deleted" in refused and Run.objects.count() == 1
    assert admin.client.get(address).status_code == 405
    done = admin.client.post(address, {"name": "the <run>"}, follow=True).content.decode()
    assert "Deleted “the &lt;run&gt;”" in done and not Run.objects.exists()
    assert admin.client.get(admin.address(f"runs/{run.pk}/")).status_code == 404
    assert "left</p>" not in html(admin, "settings/"), "it can be undone still"
    Run.with_deleted.filter(pk=run.pk).update(erase_at=timezone.now())
    assert "left</p>" in html(admin, "settings/")
    deletion.delete_run(run.pk)
    assert "left</p>" not in html(admin, "settings/")
    assert not Run.with_deleted.exists()


def test_only_members_can_delete(viewer: Visitor, stranger: Visitor, run: Run) -> None:
    name = {"name": "the <run>"}
    assert "Delete this run" not in html(viewer, f"runs/{run.pk}/data/")
    assert viewer.client.post(viewer.address(f"runs/{run.pk}/data/delete"), name).status_code == 403
    for rest in ("", "run.csv"):
        assert stranger.client.get(viewer.address(f"runs/{run.pk}/data/{rest}")).status_code == 404
    assert stranger.client.post(viewer.address(f"runs/{run.pk}/data/delete"), name).status_code == 404
    assert Run.objects.count() == 1


@pytest.mark.parametrize(
    ("text", "kept"), [("30", 30), ("", None), ("0", 7), ("x", 7), ("-1", 7), ("99999999", 7)]
)
def test_an_administrator_sets_the_retention(
    admin: Visitor, member: Visitor, text: str, kept: int | None
) -> None:
    Project.objects.update(raw_days=7)
    assert member.client.post(member.address("settings/retention"), {"raw_days": "1"}).status_code == 403
    answer = admin.client.post(admin.address("settings/retention"), {"raw_days": text}, follow=True)
    assert Project.objects.get().raw_days == kept
    assert ("Saved." in answer.content.decode()) == (kept != 7)
