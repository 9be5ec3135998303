"""`fp8scope backup` and `restore`: a running and a stopped installation, and files that are no backups."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from dashboard.helpers.installation import Up, clean_environment, names_below, status_of

from fp8scope_dashboard.administration.backup import DUMP, KEY, MANIFEST
from fp8scope_dashboard.embedded.postgres import EmbeddedPostgres


def run(*arguments: object, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fp8scope_dashboard.cli", *map(str, arguments)]
    variables = {**clean_environment(), **(environment or {})}
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300, check=False)


def counts(url: str) -> dict[str, int]:
    """The number of rows of each table, partitions apart."""
    with psycopg.connect(url) as connection:
        names = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        rows = {}
        for (name,) in names:
            row = connection.execute(f'SELECT count(*) FROM "{name}"'.encode()).fetchone()
            assert row is not None
            rows[name] = row[0]
        return rows


MEDIA = random.Random(5).randbytes(2_500_000)
"""The content of a media: three chunks."""


def store_media(url: str) -> None:
    """Store the content of a media as the server does, in chunks."""
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "INSERT INTO media_mediacontent (project_id, sha256, size, type, stored_at)"
            " SELECT min(id), %s, %s, '', now() FROM accounts_project RETURNING id",
            [hashlib.sha256(MEDIA).digest(), len(MEDIA)],
        ).fetchone()
        assert row is not None
        for number in range(3):
            connection.execute(
                "INSERT INTO media_mediachunk (content_id, number, body) VALUES (%s, %s, %s)",
                [row[0], number, MEDIA[number << 20 : number + 1 << 20]],
            )


def media(url: str) -> list[tuple[bytes, bytes]]:
    """The SHA-256 that each content says, and its bytes."""
    with psycopg.connect(url) as connection:
        return connection.execute(
            "SELECT sha256, string_agg(body, '' ORDER BY number) FROM media_mediacontent"
            " JOIN media_mediachunk ON content_id = media_mediacontent.id GROUP BY sha256"
        ).fetchall()


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, dict[str, int]]]:
    """A stopped installation, its backup from the time when it ran, and the rows of its tables then."""
    folder = tmp_path_factory.mktemp("backup of an installation")
    data, file = folder / "data", folder / "fp8scope.backup"
    with Up(data):
        assert run("admin", "--data-dir", data, "invite", "ada").returncode == 0
        store_media(EmbeddedPostgres(data / "postgres").url)
        saved = run("backup", file, "--data-dir", data)
        assert saved.returncode == 0, saved.stderr
        before = counts(EmbeddedPostgres(data / "postgres").url)
    yield data, file, before
    assert names_below(folder) == []


def test_it_works(installation: tuple[Path, Path, dict[str, int]], tmp_path: Path) -> None:
    data, file, before = installation
    restored = run("restore", file, "--data-dir", tmp_path / "new")
    assert restored.returncode == 0, restored.stderr
    assert (tmp_path / "new" / "secret_key").read_text() == (data / "secret_key").read_text().strip()
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {"lock", "logs", "postgres", "run", "secret_key"}
    with EmbeddedPostgres(tmp_path / "new" / "postgres") as url:
        assert counts(url) == before
        assert before["accounts_user"] == 2
        assert media(url) == [(hashlib.sha256(MEDIA).digest(), MEDIA)]
    with Up(tmp_path / "new") as up:
        assert status_of(up.url + "/") == 302
        link = run("admin", "--data-dir", tmp_path / "new", "link", "--user", "ada")
        assert status_of(link.stdout.strip()) == 200


def test_a_backup_is_private_and_whole(installation: tuple[Path, Path, dict[str, int]]) -> None:
    _, file, _ = installation
    assert file.stat().st_mode & 0o777 == 0o600
    with tarfile.open(file) as archive:
        assert archive.getnames() == [MANIFEST, KEY, DUMP]
    assert [path.name for path in file.parent.iterdir() if path.name.startswith(".backup")] == []


def test_a_stopped_installation_is_saved(
    installation: tuple[Path, Path, dict[str, int]], tmp_path: Path
) -> None:
    data, _, _ = installation
    assert run("backup", tmp_path / "again", "--data-dir", data).returncode == 0
    finished = run("backup", tmp_path / "again", "--data-dir", data)
    assert (finished.returncode, "exists: name another file" in finished.stderr) == (1, True)


def test_nothing_that_is_there_is_replaced(installation: tuple[Path, Path, dict[str, int]]) -> None:
    data, file, before = installation
    finished = run("restore", file, "--data-dir", data)
    assert finished.returncode == 1
    assert "already has an installation" in finished.stderr
    with EmbeddedPostgres(data / "postgres") as url:
        assert counts(url) == before


def test_restores_into_a_named_database(
    installation: tuple[Path, Path, dict[str, int]], tmp_path: Path
) -> None:
    _, file, before = installation
    with EmbeddedPostgres(tmp_path / "another", durable=False) as url:
        environment = {"DATABASE_URL": url}
        finished = run("restore", file, environment=environment)
        assert finished.returncode == 0, finished.stderr
        assert "FP8SCOPE_SECRET_KEY" in finished.stdout
        assert counts(url) == before
        again = run("restore", file, environment=environment)
        assert (again.returncode, "is not empty" in again.stderr) == (1, True)
        assert run("backup", tmp_path / "saved", environment=environment).returncode == 0
        assert counts(url) == before


def archive_of(file: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(file, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file


def members_of(file: Path) -> dict[str, bytes]:
    with tarfile.open(file) as archive:
        streams = {name: archive.extractfile(name) for name in archive.getnames()}
        return {name: stream.read() for name, stream in streams.items() if stream is not None}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("no tar", "is not a backup of fp8scope"),
        ("half", "is damaged|pg_restore failed"),
        ("no manifest", "is not a backup of fp8scope"),
        ("no database", "has no database"),
        ("another dump", "pg_restore failed, and nothing was restored"),
        ("newer format", "which is newer: restore it with that version"),
        ("newer PostgreSQL", "this server is the older"),
    ],
)
def test_what_is_no_backup_leaves_nothing(
    installation: tuple[Path, Path, dict[str, int]], tmp_path: Path, damage: str, message: str
) -> None:
    _, whole, _ = installation
    members, file = members_of(whole), tmp_path / "file"
    manifest = json.loads(members[MANIFEST])
    if damage == "no tar":
        file.write_bytes(os.urandom(5000))
    elif damage == "half":
        file.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    else:
        changes: dict[str, dict[str, bytes]] = {
            "no manifest": {MANIFEST: b"[]"},
            "no database": {},
            "another dump": {DUMP: members[DUMP][: len(members[DUMP]) // 2]},
            "newer format": {MANIFEST: json.dumps({**manifest, "format": 99}).encode()},
            "newer PostgreSQL": {MANIFEST: json.dumps({**manifest, "postgresql": 99}).encode()},
        }
        changed = {**members, **changes[damage]}
        if damage == "no database":
            del changed[DUMP]
        archive_of(file, changed)
    finished = run("restore", file, "--data-dir", tmp_path / "new")
    assert finished.returncode == 1
    assert "Traceback" not in finished.stderr
    assert re.search(message, finished.stderr), finished.stderr
    assert not (tmp_path / "new" / "postgres").exists()
    assert not (tmp_path / "new" / "secret_key").exists()
    assert names_below(tmp_path) == []
