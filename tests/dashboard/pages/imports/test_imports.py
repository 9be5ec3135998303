"""The page of imports: who may upload, what is refused, and what became of each import."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.visitors import Visitor, html
from django.core.files.uploadedfile import SimpleUploadedFile

from fp8scope.importing.registry import FORMATS as OF_IMPORTER
from fp8scope_dashboard.audit.models import Entry
from fp8scope_dashboard.file_imports import limits
from fp8scope_dashboard.file_imports.models import ImportChunk, ImportJob
from fp8scope_dashboard.pages.imports.views import FORMATS, MAX_LINKS


def post(visitor: Visitor, *files: tuple[str, bytes], **fields: str) -> Any:
    uploads = [SimpleUploadedFile(name, body) for name, body in files]
    return visitor.client.post(visitor.address("imports/new"), {"files": uploads, **fields})


def test_it_works(member: Visitor) -> None:
    assert "No imports yet" in html(member, "imports/")
    answer = post(member, ("a.csv", b"step,loss\n1,2\n"), group=" fp8 ", baseline="bf16", precision="fp8")
    assert (answer.status_code, answer["Location"]) == (302, member.address("imports/"))
    job = ImportJob.objects.get()
    assert (job.title, job.bytes, job.state, job.created_by) == ("a.csv", 14, "waiting", member.user)
    assert job.options == {"group": "fp8", "baseline": "bf16", "precision": "fp8", "format": ""}
    assert [bytes(chunk.body) for chunk in job.chunks.all()] == [b"step,loss\n1,2\n"]
    page = html(member, "imports/")
    assert "Uploaded a.csv." in page and "Waiting" in page and 'hx-trigger="every 2s"' in page
    assert Entry.objects.latest("id").text == "a.csv"


def test_a_viewer_imports_nothing(viewer: Visitor) -> None:
    assert viewer.client.get(viewer.address("imports/")).status_code == 403
    assert post(viewer, ("a.csv", b"x")).status_code == 403 and not ImportJob.objects.exists()
    assert "Import files" not in html(viewer) and "imports/" not in html(viewer)


def test_members_get_there_from_the_list_of_runs(member: Visitor) -> None:
    address = f'href="{member.address("imports/")}"'
    assert address in html(member)
    make_run(member.project)
    assert address in html(member) and "Import files" in html(member)


def test_large_files_are_stored_in_parts(member: Visitor) -> None:
    body = bytes(range(256)) * (9 << 12)
    assert post(member, ("large.csv", body), ("empty.csv", b"")).status_code == 302
    chunks = ImportChunk.objects.order_by("number")
    assert [chunk.name for chunk in chunks] == ["large.csv"] * 3 + ["empty.csv"]
    assert b"".join(bytes(chunk.body) for chunk in chunks) == body
    assert ImportJob.objects.get().title == "large.csv and 1 other file"


@pytest.mark.parametrize(
    ("files", "fields", "problem"),
    [
        ((), {}, "Choose a file"),
        ((("a.csv", b"x"), ("a.csv", b"y")), {}, "Two files have the same name"),
        ((("a.csv", b"x"),), {"precision": "int1"}, "Choose a precision of the list"),
        ((("a.csv", b"x"),), {"format": "pickle"}, "Choose a format of the list"),
        ((("a.csv", b"x"),), {"group": "g" * 129}, "at most 128 printable characters"),
        ((("a.csv", b"x"),), {"baseline": "a\nb"}, "at most 128 printable characters"),
    ],
)
def test_what_is_refused_keeps_what_was_entered(
    member: Visitor, files: tuple[tuple[str, bytes], ...], fields: dict[str, str], problem: str
) -> None:
    answer = post(member, *files, **{"group": "fp8", **fields})
    page = answer.content.decode()
    assert answer.status_code == 422 and problem in page and not ImportJob.objects.exists()
    assert f'value="{fields.get("group", "fp8")}"' in page


def test_folders_in_names_are_left_out(member: Visitor) -> None:
    post(member, ("../../etc/evil.csv", b"x"))
    assert ImportJob.objects.get().title == "evil.csv"


def test_outcomes(member: Visitor, stranger: Visitor) -> None:
    runs = [make_run(member.project, f"run {number}") for number in range(MAX_LINKS + 3)]
    foreign = make_run(stranger.project, "of another project")
    ImportJob.objects.create(
        project=member.project,
        title="<b>done.zip</b>",
        bytes=1,
        state="done",
        results=[[str(foreign.pk), "1 rows"], *([str(run.pk), "20 rows, 40 values"] for run in runs)],
        notes=["2 rows were skipped"],
    )
    ImportJob.objects.create(
        project=member.project, title="bad.csv", bytes=1, state="failed", problems=["bad.csv has no format"]
    )
    page = html(member, "imports/")
    assert "&lt;b&gt;done.zip" in page and "<b>done" not in page
    assert page.count("20 rows, 40 values") == MAX_LINKS - 1 and "4 more are in the" in page
    assert "of another project" not in page and str(foreign.pk) not in page
    assert "2 rows were skipped" in page and "bad.csv has no format" in page and "Failed" in page
    assert "every 2s" not in page


def test_an_import_with_problems_and_runs_is_one_in_part(member: Visitor) -> None:
    run = make_run(member.project, "a run")
    ImportJob.objects.create(
        project=member.project,
        title="a.zip",
        bytes=1,
        state="done",
        results=[[str(run.pk), "nothing new"]],
        problems=["b.csv: a line is too long"],
    )
    assert "Imported in part" in html(member, "imports/list")


def test_progress_is_shown_while_it_runs(member: Visitor) -> None:
    ImportJob.objects.create(
        project=member.project, title="a.zip", bytes=1, state="running", stage="importing gpt", share=0.41
    )
    part = html(member, "imports/list")
    assert "importing gpt" in part and 'value="41"' in part and "Importing" in part
    assert "<!doctype" not in part.lower()


def test_without_the_agents_package_the_page_says_so(
    member: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where its package would be found, as on a server without it.
    look = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fp8scope" else look(name))
    page = html(member, "imports/")
    assert "The agent&#x27;s package is not installed on this server" in page and "disabled" in page
    answer = post(member, ("a.csv", b"x"))
    assert answer.status_code == 422 and not ImportJob.objects.exists()


def test_an_upload_that_is_too_large_is_refused(member: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BYTES", 10)
    answer = post(member, ("a.csv", b"x" * 11))
    assert answer.status_code == 422 and "run fp8scope import" in answer.content.decode()


def test_the_formats_are_those_of_the_importer() -> None:
    assert {form.name for form in OF_IMPORTER} - {"tensorboard"} == {*FORMATS} - {"fp8scope"}
