"""`fp8scope upgrade`: a data directory of an older PostgreSQL, and interruptions at any time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from contract.helpers.wire_client import WireClient
from dashboard.helpers.installation import Up, clean_environment, names_below, status_of

from fp8scope_dashboard.embedded import conversion, processes
from fp8scope_dashboard.embedded.postgres import (
    DATABASE,
    EmbeddedPostgres,
    allow_traversal,
    installed_binaries,
)

OLD, NEW = min(installed_binaries()), max(installed_binaries())


def run(*arguments: object, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fp8scope_dashboard.cli", *map(str, arguments)]
    variables = {**clean_environment(), **(environment or {})}
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300, check=False)


def digests(url: str) -> dict[str, str]:
    """A hash of all rows of each table."""
    with psycopg.connect(url) as connection:
        names = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        hashes = {}
        for (name,) in names:
            query = f"SELECT coalesce(md5(string_agg(t::text, '|' ORDER BY t::text)), '') FROM \"{name}\" t"
            row = connection.execute(query.encode()).fetchone()
            assert row is not None
            hashes[name] = str(row[0])
        return hashes


def make_old_cluster(folder: Path) -> None:
    """An empty cluster of the oldest installed PostgreSQL, made as it was made then."""
    server = EmbeddedPostgres(folder)
    folder.mkdir(parents=True)
    if os.geteuid() == 0:
        server.account = server.server_account()
        os.chown(folder, server.account.uid, server.account.gid)
        allow_traversal(folder)
        allow_traversal(installed_binaries()[OLD])
    child = processes.spawn(
        [
            str(installed_binaries()[OLD] / "initdb"),
            *("--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync"),
            *(f"--username={DATABASE}", "-D", str(folder / "cluster")),
        ],
        death_signal=signal.SIGKILL,
        output=subprocess.DEVNULL,
        account=server.account,
        cwd=folder,
        environment={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
    )
    assert child.wait(60) == 0


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A stopped installation with a run on the older PostgreSQL, and the hashes of its tables."""
    data = tmp_path_factory.mktemp("installation of an older PostgreSQL") / "data"
    make_old_cluster(data / "postgres")
    with Up(data) as up:
        with psycopg.connect(EmbeddedPostgres(data / "postgres").url) as connection:
            assert connection.info.server_version // 10_000 == OLD
        made = run("admin", "--data-dir", data, "invite", "ada", "--project", "default", "--role", "member")
        assert made.returncode == 0, made.stderr
        token = _token(data)
        client = WireClient(up.url, token)
        client.register()
        assert client.send(client.batch(0, [1, 2, 3], scalars={"loss": [3.0, 2.5, 2.0]})).status == 201
    with EmbeddedPostgres(data / "postgres") as url:
        before = digests(url)
    yield data, before
    assert names_below(data.parent) == []


def _token(data: Path) -> str:
    """A token that may write runs, made as the settings page makes one."""
    code = (
        "import django; django.setup()\n"
        "from fp8scope_dashboard.accounts.models import Project\n"
        "from fp8scope_dashboard.accounts.tokens import create_token\n"
        "print(create_token(Project.objects.get(slug='default'), 'test')[1])"
    )
    environment = {
        **clean_environment(),
        "DJANGO_SETTINGS_MODULE": "fp8scope_dashboard.settings.base",
        "DATABASE_URL": EmbeddedPostgres(data / "postgres").url,
        "FP8SCOPE_SECRET_KEY": (data / "secret_key").read_text(),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def copy(old: tuple[Path, dict[str, str]], tmp_path: Path) -> Iterator[Path]:
    """A copy of the installation."""
    data = tmp_path / "data"
    subprocess.run(["cp", "-a", str(old[0]), str(data)], check=True)
    allow_traversal(data / "postgres")
    yield data
    assert names_below(tmp_path) == []


def test_it_works(old: tuple[Path, dict[str, str]], copy: Path) -> None:
    checked = run("upgrade", "--check", "--data-dir", copy)
    assert checked.returncode == 3, checked.stderr
    assert f"PostgreSQL {OLD} becomes {NEW}" in checked.stdout and "fp8scope backup" in checked.stdout
    done = run("upgrade", "--data-dir", copy)
    assert done.returncode == 0, done.stderr
    assert f"Remove {copy}/postgres-{OLD}" in done.stdout and "up to date" in done.stdout
    with EmbeddedPostgres(copy / "postgres") as url:
        assert digests(url) == old[1]
        with psycopg.connect(url) as connection:
            assert connection.info.server_version // 10_000 == NEW
    with Up(copy) as up:
        assert status_of(up.url + "/") == 302
        assert run("upgrade", "--check", "--data-dir", copy).stdout.endswith("Nothing is to be done.\n")
        refused = run("upgrade", "--data-dir", copy)
        assert (refused.returncode, "is in use by process" in refused.stderr) == (1, True)
    again = run("upgrade", "--data-dir", copy)
    assert (again.returncode, again.stdout) == (0, "The tables are up to date.\n")


def test_a_killed_upgrade_changes_nothing_or_is_completed(
    old: tuple[Path, dict[str, str]], copy: Path
) -> None:
    """It is killed at several moments, and then runs to its end."""
    for seconds in (0.7, 1.8):
        command = [sys.executable, "-m", "fp8scope_dashboard.cli", "upgrade", "--data-dir", str(copy)]
        process = subprocess.Popen(command, env=clean_environment(), stdout=subprocess.DEVNULL)
        time.sleep(seconds)
        process.kill()
        process.wait()
    done = run("upgrade", "--data-dir", copy)
    assert done.returncode == 0, done.stderr
    assert not (copy / conversion.DRAFT).exists()
    with EmbeddedPostgres(copy / "postgres") as url:
        assert digests(url) == old[1]


def test_an_end_between_the_renamings_is_completed_by_up(
    old: tuple[Path, dict[str, str]], copy: Path
) -> None:
    conversion.convert(copy, NEW)
    draft = copy / conversion.DRAFT
    draft.mkdir()
    (draft / conversion.WHOLE).touch()
    (copy / "postgres").rename(draft / "postgres")
    with Up(copy) as up:
        assert status_of(up.url + "/") == 302
    assert not draft.exists() and conversion.cluster_version(copy) == NEW
    with EmbeddedPostgres(copy / "postgres") as url:
        assert digests(url)["telemetry_chunk"] == old[1]["telemetry_chunk"]


def test_a_copy_that_differs_is_refused(
    old: tuple[Path, dict[str, str]], copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = conversion._copy

    def lossy(source: str, target: str, binaries: Path) -> None:
        real(source, target, binaries)
        with psycopg.connect(target) as connection:
            connection.execute("DELETE FROM accounts_membership")

    monkeypatch.setattr(conversion, "_copy", lossy)
    with pytest.raises(conversion.ConversionError, match=r"differs in public\.accounts_membership"):
        conversion.convert(copy, NEW)
    assert conversion.cluster_version(copy) == OLD and not (copy / conversion.DRAFT).exists()
    with EmbeddedPostgres(copy / "postgres") as url:
        assert digests(url) == old[1]


def test_a_failed_copy_changes_nothing(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that its own table no longer accepts."""
    monkeypatch.setattr(conversion, "_compare", lambda source, target: pytest.fail("it was not copied"))
    with EmbeddedPostgres(copy / "postgres") as url, psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE FUNCTION broken() RETURNS int LANGUAGE sql AS 'SELECT 1'")
        connection.execute("CREATE TABLE needs (n int CHECK (n = broken()))")
        connection.execute("INSERT INTO needs VALUES (1)")
        connection.execute("CREATE OR REPLACE FUNCTION broken() RETURNS int LANGUAGE sql AS 'SELECT 2'")
    with pytest.raises(conversion.ConversionError, match="the copy failed.*violates"):
        conversion.convert(copy, NEW)
    assert conversion.cluster_version(copy) == OLD and not (copy / conversion.DRAFT).exists()


def test_says_how_much_space_it_needs(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "SPACE", 1e9)
    with pytest.raises(conversion.ConversionError, match=r"needs [\d.]+ GB.*has [\d.]+ GB free"):
        conversion.convert(copy, NEW)
    assert conversion.cluster_version(copy) == OLD


def test_old_files_of_an_earlier_upgrade_are_kept(copy: Path) -> None:
    (copy / f"postgres-{OLD}").mkdir()
    refused = run("upgrade", "--data-dir", copy)
    assert (refused.returncode, "remove it, or move it away" in refused.stderr) == (1, True)
    assert conversion.cluster_version(copy) == OLD


def test_a_directory_without_an_installation(tmp_path: Path) -> None:
    for options in ((), ("--check",)):
        refused = run("upgrade", *options, "--data-dir", tmp_path / "none")
        assert refused.returncode == 1 and "Traceback" not in refused.stderr
        assert "contains no database" in refused.stderr


def test_changes_of_tables_are_named_and_made(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "another", durable=False) as url:
        environment = {"DATABASE_URL": url}
        checked = run("upgrade", "--check", environment=environment)
        assert checked.returncode == 3 and "the tables change: contenttypes 0001_initial" in checked.stdout
        done = run("upgrade", environment=environment)
        assert done.returncode == 0, done.stderr
        assert "The tables have changed: " in done.stdout and "contenttypes 0001_initial" in done.stdout
