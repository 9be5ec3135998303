"""The commands `fp8scope backup` and `fp8scope restore`.

A backup is one tar file: the database as a dump of `pg_dump`, the secret key, and a manifest. Redis holds
nothing that cannot be rebuilt, and the logs are not data.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fp8scope_dashboard.administration.database import CONNECT_SECONDS, private_database
from fp8scope_dashboard.embedded import processes
from fp8scope_dashboard.embedded.postgres import EmbeddedPostgres, installed_binaries
from fp8scope_dashboard.embedded.processes import ServerError
from fp8scope_dashboard.servers import configuration
from fp8scope_dashboard.servers.configuration import DataDir, default_data_dir

FORMAT: Final = 1
MANIFEST, DUMP, KEY = "manifest.json", "fp8scope.dump", "secret_key"
MAX_MANIFEST_BYTES: Final = 64 * 1024
MAX_KEY_BYTES: Final = 4096


class BackupError(ServerError):
    """The backup cannot be made or restored; the message says what to do."""


def backup(argv: list[str]) -> int:
    """Save the database and the secret key to a file, while the server runs or not."""
    options = _parser("backup", backup.__doc__ or "", "the file to write; it must not exist").parse_args(argv)
    return _carry_out("backup", lambda: _backup(options.file, DataDir(_directory(options))))


def restore(argv: list[str]) -> int:
    """Make an installation of a file that `fp8scope backup` wrote, in a directory that has none."""
    options = _parser("restore", restore.__doc__ or "", "a file of `fp8scope backup`").parse_args(argv)
    return _carry_out("restore", lambda: _restore(options.file, DataDir(_directory(options))))


def _carry_out(name: str, action: Callable[[], None]) -> int:
    try:
        action()
    except ServerError as error:
        print(f"fp8scope {name}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"fp8scope {name}: {error.filename or ''}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130
    return 0


def _check_one_server(url: str) -> None:
    """Refuse a store on several servers: pg_dump reads one after the other, while compaction moves rows."""
    with _connected(url) as connection:
        row = connection.execute("SELECT to_regclass('pg_catalog.pg_dist_partition') IS NOT NULL").fetchone()
    if row is not None and row[0]:
        raise BackupError(
            "this database has Citus, and pg_dump reads its servers at different moments: back up each one "
            "with PostgreSQL's own programs, see docs/distributed_store.md"
        )


def _backup(file: Path, data: DataDir) -> None:
    if file.exists():
        raise BackupError(f"{file} exists: name another file")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".backup-", dir=file.parent)))
        url = configuration.secret("DATABASE_URL") or private_database(data, stack)[0]
        _check_one_server(url)
        major = _major_version(url)
        dump = [
            _program("pg_dump", major),
            "--format=custom",
            "--compress=1",
            "--no-owner",
            "--no-privileges",
        ]
        _run([*dump, "--file", str(folder / DUMP)], url)
        manifest = {
            "format": FORMAT,
            "fp8scope": version("fp8scope"),
            "postgresql": major,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        key = configuration.secret("FP8SCOPE_SECRET_KEY") or (
            data.secret_key() if data.has_secret_key() else ""
        )
        (folder / KEY).write_text(f"{key}\n" if key else "")
        # The name appears when the file is whole. It holds the secret key, so only its owner may read it.
        whole = folder / "backup.tar"
        with open(os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            with tarfile.open(fileobj=stream, mode="w") as archive:
                for name in (MANIFEST, KEY, DUMP):
                    archive.add(folder / name, arcname=name)
            stream.flush()
            os.fsync(stream.fileno())
        whole.rename(file)
    print(f"Saved {file} ({file.stat().st_size / 1e6:,.1f} MB). It contains the secret key: keep it private.")


def _restore(file: Path, data: DataDir) -> None:
    with ExitStack() as stack:
        archive = stack.enter_context(_opened(file))
        manifest = _manifest(file, archive)
        if url := configuration.secret("DATABASE_URL"):
            _restore_database(archive, url, manifest)
            key = _key(archive)
            if key and key != configuration.secret("FP8SCOPE_SECRET_KEY"):
                print(
                    "Set FP8SCOPE_SECRET_KEY to the key of the backup: `tar -xOf FILE secret_key` prints it."
                )
            print("Restored into the database of DATABASE_URL.")
            return
        stack.enter_context(_locked(data))
        _restore_directory(archive, data, manifest)
    print(f"Restored into {data.root}. Start it with: fp8scope up --data-dir {data.root}")


@contextmanager
def _opened(file: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(file) as archive:
            yield archive
    except tarfile.TarError as error:
        raise BackupError(f"{file} is not a backup of fp8scope, or is damaged ({error})") from error


@contextmanager
def _locked(data: DataDir) -> Iterator[None]:
    data.make()
    with processes.locked(data.root):
        if (data.root / "postgres").exists() or data.has_secret_key():
            raise BackupError(
                f"{data.root} already has an installation: name an empty directory with --data-dir, and move "
                "it here once you have seen that it is complete"
            )
        yield


def _restore_directory(archive: tarfile.TarFile, data: DataDir, manifest: dict[str, Any]) -> None:
    """Restore into a draft beside the real name, so that a failure or a kill leaves no half installation."""
    draft = data.root / "restoring"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=0o700)
    try:
        with EmbeddedPostgres(draft / "postgres") as url:
            _restore_database(archive, url, manifest)
        if key := _key(archive):
            with open(os.open(draft / KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
                stream.write(key)
            (draft / KEY).rename(data.root / KEY)
        (draft / "postgres").rename(data.root / "postgres")
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _restore_database(archive: tarfile.TarFile, url: str, manifest: dict[str, Any]) -> None:
    _check_empty(url)
    major = _major_version(url)
    if major < manifest["postgresql"]:
        raise BackupError(
            f"the backup is of PostgreSQL {manifest['postgresql']}, and this server is the older {major}: "
            "restore it into the same or a newer version"
        )
    dump = archive.extractfile(DUMP) if DUMP in archive.getnames() else None
    if dump is None:
        raise BackupError("the backup has no database, so it is damaged: use another one")
    program = _program("pg_restore", major)
    # All or nothing: an error leaves the database empty. From a pipe, pg_restore reads the file in its order.
    options = ["--exit-on-error", "--single-transaction", "--no-owner", "--no-privileges"]
    target, environment = _target(url)
    process = subprocess.Popen(
        [program, *options, *target], env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None and process.stderr is not None
    with suppress(BrokenPipeError), process.stdin as pipe:
        shutil.copyfileobj(dump, pipe, 1024 * 1024)
    message = process.stderr.read().decode(errors="replace").strip()
    if process.wait() != 0:
        raise BackupError(f"pg_restore failed, and nothing was restored: {_last_line(message)}")
    with psycopg.connect(url, autocommit=True) as connection:
        # The planner knows nothing of restored tables.
        connection.execute("ANALYZE")


def _check_empty(url: str) -> None:
    query = "SELECT count(*) FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
    with _connected(url) as connection:
        row = connection.execute(query).fetchone()
    if row and row[0]:
        raise BackupError("the database of DATABASE_URL is not empty: create a new one for the backup")


def _manifest(file: Path, archive: tarfile.TarFile) -> dict[str, Any]:
    try:
        manifest = json.loads(_text(archive, MANIFEST, MAX_MANIFEST_BYTES))
        if int(manifest["format"]) > FORMAT:
            raise BackupError(
                f"{file} was made by fp8scope {manifest['fp8scope']}, which is newer: "
                "restore it with that version"
            )
        return {**manifest, "postgresql": int(manifest["postgresql"])}
    except (KeyError, TypeError, ValueError) as error:
        raise BackupError(f"{file} is not a backup of fp8scope, or is damaged (its manifest)") from error


def _key(archive: tarfile.TarFile) -> str:
    return _text(archive, KEY, MAX_KEY_BYTES).strip()


def _text(archive: tarfile.TarFile, name: str, limit: int) -> str:
    """The content of a small member.

    Raises:
        KeyError: there is no such member.
        ValueError: it is no file, or larger than `limit` bytes.
    """
    stream = archive.extractfile(name)
    content = b"" if stream is None else stream.read(limit + 1)
    if stream is None or len(content) > limit:
        raise ValueError(name)
    return content.decode()


def _major_version(url: str) -> int:
    with _connected(url) as connection:
        return connection.info.server_version // 10_000


def _connected(url: str) -> psycopg.Connection:
    try:
        return psycopg.connect(url, connect_timeout=CONNECT_SECONDS)
    except psycopg.Error as error:
        # libpq's message contains host and user, but no password.
        raise BackupError(
            f"the database does not answer: {str(error).strip().partition(chr(10))[0]}"
        ) from error


def _program(name: str, major: int) -> str:
    """The program of the server's own version, else a newer one of the wheel, else the one on PATH.

    Raises:
        BackupError: none is as new as the server.
    """
    binaries = installed_binaries()
    for candidate in sorted(binaries):
        if candidate >= major:
            return str(binaries[candidate] / name)
    if path := shutil.which(name):
        return path
    raise BackupError(f"{name} of PostgreSQL {major} is not installed. On Debian: postgresql-client-{major}")


def _target(url: str) -> tuple[list[str], dict[str, str]]:
    """The options and the environment that name a database. Other users can read options, so no password."""
    parameters = conninfo_to_dict(url)
    password = parameters.pop("password", None)
    environment = {**os.environ, "PGPASSWORD": str(password)} if password else dict(os.environ)
    return ["--dbname", make_conninfo("", **parameters)], environment


def _run(command: Sequence[str], url: str) -> None:
    target, environment = _target(url)
    finished = subprocess.run(
        [*command, *target], env=environment, capture_output=True, text=True, check=False
    )
    if finished.returncode != 0:
        raise BackupError(f"{os.path.basename(command[0])} failed: {_last_line(finished.stderr)}")


def _last_line(text: str) -> str:
    """The end of a program's message. libpq names host and user in it, but no password."""
    return text.strip().rpartition("\n")[2][:500]


def _directory(options: argparse.Namespace) -> Path:
    directory: Path = options.data_dir
    return directory.expanduser().absolute()


def _parser(name: str, description: str, file: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"fp8scope {name}",
        description=f"{description} Uses DATABASE_URL if it is set, else the database of `fp8scope up`.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help=file)
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=default_data_dir(),
        help="the directory of `fp8scope up` (default: FP8SCOPE_DATA_DIR, else ~/.fp8scope)",
    )
    return parser
