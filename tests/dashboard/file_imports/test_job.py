"""Imports of uploads: the real importer as a process, with a real server to send to."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import urllib3
from agent.helpers.import_files import PNG, write_aim, write_csv, write_jsonl, write_trackio, write_wandb
from dashboard.helpers.import_state import state
from dashboard.helpers.visitors import visitor_of
from django.core.files.uploadedfile import SimpleUploadedFile
from django.utils import timezone
from helpers.live_servers import Server, celery_worker
from helpers.waiting import wait_until

from fp8scope_dashboard.accounts.models import ApiToken, Project, Role, User
from fp8scope_dashboard.file_imports import job as jobs
from fp8scope_dashboard.file_imports import limits, services
from fp8scope_dashboard.file_imports.models import ImportAccess, ImportChunk, ImportJob
from fp8scope_dashboard.file_imports.services import UploadError, accept
from fp8scope_dashboard.media.models import MediaContent, MediaItem
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries


@pytest.fixture(autouse=True)
def own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any, server: Server
) -> Iterator[Path]:
    """Imports write below this folder, and send to the test's server."""
    settings.BASE_URL = server.url
    folder = tmp_path / "imports"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert importers(folder) == []


def importers(folder: Path) -> list[int]:
    """The processes that import from a folder."""
    processes = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # It has ended meanwhile.
            if f"{folder}/{jobs.FOLDER_PREFIX}".encode() in entry.read_bytes():
                processes.append(int(entry.parent.name))
    return processes


@pytest.fixture
def user(server: Server) -> User:
    return visitor_of(server.project, "mia", Role.MEMBER).user


def upload(name: str, body: bytes) -> SimpleUploadedFile:
    return SimpleUploadedFile(name, body)


def zipped(entries: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, body in entries.items():
            archive.writestr(name, body)
    return buffer.getvalue()


def run_import(project: Project, user: User, *files: SimpleUploadedFile, **options: str) -> ImportJob:
    """Import uploads as a worker would."""
    job = accept(project, user, files, options)
    jobs.run(job.pk)
    job.refresh_from_db()
    assert job.is_over and not ImportChunk.objects.exists()
    assert all(token.revoked_at for token in ApiToken.objects.filter(name="imports of files"))
    assert os.listdir(tempfile.gettempdir()) == []
    return job


def csv(tmp_path: Path, rows: int = 20) -> SimpleUploadedFile:
    return upload("log.csv", write_csv(tmp_path, rows).read_bytes())


def test_it_works(server: Server, user: User, tmp_path: Path) -> None:
    job = run_import(server.project, user, csv(tmp_path), group="fp8", baseline="bf16", precision="fp8")
    run = Run.objects.get()
    assert (job.state, job.problems) == ("done", []) and job.results == [[str(run.pk), job.results[0][1]]]
    assert job.results[0][1].startswith("20 rows, ")
    assert (run.name, run.group, run.baseline, run.precision) == ("log", "fp8", "bf16", "fp8")
    assert queries.scalar(run.pk, "loss").values.tolist() == [3 / (step + 1) for step in range(20)]
    assert run.registered_with is not None and run.registered_with.created_by == user


def test_importing_again_is_a_no_op_and_a_file_that_has_grown_adds_to_its_run(
    server: Server, user: User, tmp_path: Path
) -> None:
    run_import(server.project, user, csv(tmp_path, 20_000))
    before = state()
    again = run_import(server.project, user, csv(tmp_path, 20_000))
    assert state() == before and [what for _, what in again.results] == ["nothing new"]
    grown = run_import(server.project, user, csv(tmp_path, 30_000))
    assert grown.results[0][1].startswith("10,000 rows") and Run.objects.get().rows_stored == 30_000
    assert ImportAccess.objects.count() == 1 and ApiToken.objects.filter(name="imports of files").count() == 1


def test_the_same_file_in_another_project_is_another_run(server: Server, user: User, tmp_path: Path) -> None:
    from fp8scope_dashboard.accounts.services import create_project

    other = create_project("other", "Other", owner=user)
    for project in (server.project, other):
        job = run_import(project, user, csv(tmp_path))
        assert job.problems == [] and Run.objects.filter(project=project).count() == 1


def test_an_archive_of_a_folder(server: Server, user: User, tmp_path: Path) -> None:
    """With the media that are beside its files; a path that leads out of the folder is left out."""
    write_wandb(tmp_path)
    write_trackio(tmp_path)
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    entries = {f"runs/{path.relative_to(tmp_path)}": path.read_bytes() for path in paths}
    job = run_import(server.project, user, upload("all.zip", zipped(entries)))
    assert len(job.results) == Run.objects.count() == 3
    assert all("media left out: their " in problem for problem in job.problems)
    assert Counter(MediaItem.objects.values_list("name", flat=True)) == {
        **{"picture": 3, "table": 3, "sample": 2, "several": 1}
    }
    assert MediaContent.objects.filter(sha256=hashlib.sha256(PNG).digest()).count() == 1
    before = state()
    assert {
        what for _, what in run_import(server.project, user, upload("all.zip", zipped(entries))).results
    } == {"nothing new"}
    assert state() == before


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="aimrocks has no wheels for Python 3.13")
def test_an_archive_of_a_repository_of_aim(server: Server, user: User, tmp_path: Path) -> None:
    folder = tmp_path / "gpt"
    files = [path for path in write_aim(folder).rglob("*") if path.is_file()]
    entries = {str(path.relative_to(tmp_path)): path.read_bytes() for path in files}
    job = run_import(server.project, user, upload("gpt.zip", zipped(entries)))
    assert job.problems == [] and len(job.results) == 2
    assert set(Run.objects.values_list("state", flat=True)) == {"finished", "running"}


def test_several_files_of_which_one_is_bad(server: Server, user: User, tmp_path: Path) -> None:
    table = upload("log.jsonl", write_jsonl(tmp_path).read_bytes())
    body = write_wandb(tmp_path).read_bytes()
    bad = upload("run-bad.wandb", body[:60] + bytes(200) + body[260:])
    job = run_import(server.project, user, table, bad)
    assert job.state == "done" and [run.name for run in Run.objects.filter(pk=job.results[0][0])] == ["log"]
    assert job.problems == ["run-bad.wandb: a record is damaged: its checksum differs"]


def test_a_file_of_no_format_is_told_in_the_importers_words(server: Server, user: User) -> None:
    job = run_import(server.project, user, upload("holiday.txt", b"nothing of this kind\0"))
    (problem,) = job.problems
    assert job.state == "failed" and problem.startswith("holiday.txt has no format that can be imported: ")
    assert not Run.objects.exists()


def archive_with(name: str, kind: int = 0) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        entry = zipfile.ZipInfo(name)
        entry.external_attr = (kind | 0o644) << 16
        archive.writestr(entry, "step,loss\n1,2\n")
    return buffer.getvalue()


def encrypted() -> bytes:
    body = bytearray(archive_with("a.csv"))
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        body[body.index(signature) + offset] |= 1
    return bytes(body)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        pytest.param(archive_with("../../evil.csv"), "leads out of its folder", id="traversal"),
        pytest.param(archive_with("/etc/evil.csv"), "leads out of its folder", id="absolute"),
        pytest.param(archive_with("a\\..\\evil.csv"), "leads out of its folder", id="backslash"),
        pytest.param(archive_with("link.csv", stat.S_IFLNK), "a link or a device", id="link"),
        pytest.param(archive_with("/".join("abcdefghij")), "nested deeper than 8", id="nested"),
        pytest.param(encrypted(), "encrypted", id="encrypted"),
        pytest.param(archive_with("a.csv")[:-30], "damaged", id="cut off"),
        pytest.param(b"PK\x03\x04 no archive", "damaged", id="no archive"),
    ],
)
def test_what_is_wrong_with_an_archive(
    server: Server, user: User, tmp_path: Path, body: bytes, problem: str
) -> None:
    job = run_import(server.project, user, upload("x.zip", body))
    assert job.state == "failed" and problem in job.problems[0] and not Run.objects.exists()
    assert not list(tmp_path.rglob("evil*"))


def test_a_bomb_is_not_unpacked(server: Server, user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNPACKED_BYTES", 64 << 20)
    bomb = zipped({f"{number}.csv": bytes(16 << 20) for number in range(6)})
    assert len(bomb) < 1 << 20
    job = run_import(server.project, user, upload("bomb.zip", bomb))
    assert job.problems == ["bomb.zip unpacks to more than 64 MiB: import a part of it"]


def test_an_archive_of_too_many_entries_is_not_unpacked(server: Server, user: User) -> None:
    many = zipped({str(number): b"" for number in range(limits.MAX_ENTRIES + 1)}, zipfile.ZIP_STORED)
    job = run_import(server.project, user, upload("many.zip", many))
    assert job.problems == ["many.zip has more than 10,000 entries: import a part of it"]


def test_an_importer_that_needs_too_much_memory_is_ended(
    server: Server, user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MEMORY_BYTES", 320 << 20)
    line = b'{"step": 1, "loss": [' + b"[]," * (5 << 20) + b"1]}\n"
    job = run_import(
        server.project, user, upload("deep.zip", zipped({"deep.jsonl": b'{"step":0,"loss":1}\n' + line}))
    )
    assert job.state == "failed" and "more memory than an import has (320 MiB)" in job.problems[-1]


def test_an_importer_that_takes_too_long_is_ended(
    server: Server, user: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SECONDS", 0)
    job = run_import(server.project, user, csv(tmp_path))
    assert job.state == "failed" and "took longer than 0 seconds" in job.problems[-1]


def test_the_importer_has_neither_secrets_of_the_server_nor_a_token_among_its_arguments(
    server: Server,
    user: User,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[tuple[list[str], dict[str, str], str]] = []
    started = subprocess.Popen

    def watched(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        seen.append((command, options["env"], options["cwd"]))
        process: subprocess.Popen[bytes] = started(command, **options)
        # What others see of it, as `ps` shows it.
        seen[-1][0].extend(Path(f"/proc/{process.pid}/cmdline").read_text().split("\0"))
        return process

    monkeypatch.setenv("FP8SCOPE_SECRET_KEY", "the server's key")
    monkeypatch.setattr(subprocess, "Popen", watched)
    run_import(server.project, user, csv(tmp_path))
    ((command, environment, folder),) = seen
    secret = environment["FP8SCOPE_TOKEN"]
    assert secret.startswith("fp8s_") and not any(secret in argument for argument in command)
    assert "-I" in command and folder == "/"
    assert not {"FP8SCOPE_SECRET_KEY", "DATABASE_URL", "REDIS_URL"} & environment.keys()
    assert secret not in caplog.text and "the server's key" not in environment.values()
    # It worked only while the import ran.
    answer = urllib3.request(
        "GET", f"{server.url}/api/v1/runs", headers={"Authorization": f"Bearer {secret}"}
    )
    assert answer.status == 401


def test_no_module_beside_an_upload_is_imported(server: Server, user: User, tmp_path: Path) -> None:
    trap = upload("json.py", b"raise SystemExit('a module of an upload was imported')")
    job = run_import(server.project, user, trap, upload("fp8scope.py", b"1 / 0"), csv(tmp_path))
    assert job.state == "done" and job.problems == [] and Run.objects.get().name == "log"


def test_a_revoked_token_ends_the_import(
    server: Server, user: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give = services.give_token

    def revoked(job: ImportJob) -> str:
        secret = give(job)
        services.revoke(job.project_id)
        return secret

    monkeypatch.setattr(services, "give_token", revoked)
    job = run_import(server.project, user, csv(tmp_path))
    assert job.state == "failed" and "token" in job.problems[0].lower() and not Run.objects.exists()


def test_without_the_agents_package_it_says_so(
    server: Server, user: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "can_import", lambda: False)
    job = run_import(server.project, user, csv(tmp_path))
    assert job.problems == [services.MISSING]


@pytest.fixture
def slow_file(tmp_path: Path) -> bytes:
    """A table whose import takes some seconds."""
    lines = (f"{step},{1 / (step + 1)!r},{step % 7}\n" for step in range(300_000))
    return b"step,loss,other\n" + "".join(lines).encode()


def is_sending(job: ImportJob) -> bool:
    return Run.objects.filter(project=job.project, rows_stored__gt=0).exists()


def test_a_killed_worker_doubles_nothing(
    server: Server,
    user: User,
    tmp_path: Path,
    slow_file: bytes,
    own_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The importer dies with its worker, and the sweep lets another one begin again."""
    monkeypatch.setenv("FP8SCOPE_BASE_URL", server.url)
    monkeypatch.setenv("TMPDIR", str(own_folder))
    job = accept(server.project, user, [upload("slow.csv", slow_file)], {})
    with celery_worker(tmp_path / "worker.log") as worker:
        wait_until(lambda: is_sending(job))
        (importer,) = importers(own_folder)
        os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{importer}").exists())
    job.refresh_from_db()
    assert job.state == "running" and ImportChunk.objects.exists()
    assert services.recover() == 0
    ImportJob.objects.update(seen_at=timezone.now() - timedelta(minutes=2))
    assert services.recover() == 1
    job.refresh_from_db()
    assert job.state == "waiting" and ApiToken.objects.get(name="imports of files").revoked_at
    jobs.run(job.pk)
    job.refresh_from_db()
    run = Run.objects.get()
    assert (job.state, job.attempts, job.problems) == ("done", 2, [])
    assert run.rows_stored == run.rows_sent == 300_000 and not ImportChunk.objects.exists()
    # The folder of the killed worker goes once no import could still use it.
    (left,) = own_folder.iterdir()
    jobs.remove_left_behind()
    assert left.exists()
    os.utime(left, (0, time.time() - jobs.LEFT_BEHIND_SECONDS - 10))
    jobs.remove_left_behind()
    assert not left.exists()


def test_an_import_that_was_interrupted_twice_has_failed(server: Server, user: User, tmp_path: Path) -> None:
    job = accept(server.project, user, [csv(tmp_path)], {})
    for _ in range(services.MAX_ATTEMPTS):
        assert services.claim(job.pk) is not None
        services.give_token(job)
        ImportJob.objects.update(seen_at=timezone.now() - timedelta(minutes=2))
        services.recover()
    job.refresh_from_db()
    assert job.state == "failed" and "interrupted twice" in job.problems[0]
    assert not ImportChunk.objects.exists() and ApiToken.objects.get(name="imports of files").revoked_at
    assert services.claim(job.pk) is None


def test_imports_of_a_project_take_turns(server: Server, user: User, tmp_path: Path) -> None:
    first, second = (accept(server.project, user, [csv(tmp_path)], {}) for _ in range(2))
    running = services.claim(first.pk)
    assert running is not None and services.claim(second.pk) is None and services.claim(first.pk) is None
    services.finish(running, results=[])
    assert services.claim(second.pk) is not None


def test_a_worker_that_lost_its_import_changes_nothing(server: Server, user: User, tmp_path: Path) -> None:
    job = accept(server.project, user, [csv(tmp_path)], {})
    former = services.claim(job.pk)
    assert former is not None
    ImportJob.objects.update(seen_at=timezone.now() - timedelta(minutes=2))
    services.recover()
    assert services.claim(job.pk) is not None
    services.finish(former, problems=["late"])
    job.refresh_from_db()
    assert (job.state, job.problems) == ("running", []) and ImportChunk.objects.exists()


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ([], "Choose a file"),
        ([("a.csv", 1)] * 2, "the same name"),
        ([(f"{number}.csv", 1) for number in range(limits.MAX_FILES + 1)], "at most 50"),
        ([("a.csv", limits.MAX_BYTES), ("b.csv", 1)], "larger than 31 MiB"),
        ([(".hidden", 1)], "no name for a file"),
        ([("x" * 121, 1)], "no name for a file"),
        ([("a\tb.csv", 1)], "no name for a file"),
    ],
)
def test_uploads_that_are_refused(
    server: Server, user: User, files: list[tuple[str, int]], problem: str
) -> None:
    with pytest.raises(UploadError, match=problem):
        accept(server.project, user, [upload(name, bytes(size)) for name, size in files], {})
    assert not ImportJob.objects.exists()


def test_too_many_imports_wait_for_their_turn(server: Server, user: User, tmp_path: Path) -> None:
    for _ in range(limits.MAX_WAITING):
        accept(server.project, user, [csv(tmp_path)], {})
    with pytest.raises(UploadError, match="5 imports of this project are not done"):
        accept(server.project, user, [csv(tmp_path)], {})


def test_the_outcome_of_old_imports_is_forgotten(
    server: Server, user: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "KEPT_JOBS", 2)
    for number in range(4):
        ImportJob.objects.create(project=server.project, title=str(number), bytes=1, state="done")
    accept(server.project, user, [csv(tmp_path)], {})
    assert sorted(ImportJob.objects.values_list("title", flat=True)) == ["2", "3", "log.csv"]


def test_an_export_of_fp8scope_is_imported(server: Server, user: User, tmp_path: Path) -> None:
    """Its importer prints another line than those of other formats."""
    run_import(server.project, user, csv(tmp_path))
    run = Run.objects.get()
    address = f"{server.url}/api/v1/runs/{run.pk}/export?format=csv"
    exported = urllib3.request("GET", address, headers={"Authorization": f"Bearer {server.token}"})
    assert exported.status == 200
    job = run_import(server.project, user, upload("export.csv", exported.data))
    copy = Run.objects.exclude(pk=run.pk).get()
    assert job.problems == [] and job.results == [[str(copy.pk), ""]] and copy.rows_stored == 20


def test_a_named_format_says_what_is_wrong(server: Server, user: User) -> None:
    job = run_import(server.project, user, upload("holiday.txt", b"nothing of this kind\0"), format="wandb")
    assert job.state == "failed" and "has no format" not in job.problems[0]
    assert job.problems[0].startswith("holiday.txt: ")
