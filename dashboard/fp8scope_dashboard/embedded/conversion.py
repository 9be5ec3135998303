"""Moving the data of the private PostgreSQL to a newer major version.

A dump of the old server streams into a new one beside it. The number of rows of every table is compared, and
only then the folders change their names. The old one stays. `pg_upgrade` would be faster, but asks for equal
locales, and changes the old files where it saves their copy.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import psycopg
from psycopg import sql

from fp8scope_dashboard.embedded.postgres import EmbeddedPostgres, installed_binaries
from fp8scope_dashboard.embedded.processes import ServerError

FOLDER: Final = "postgres"
DRAFT, WHOLE = "upgrading", "complete"
# Of the size of the old files: a new cluster has no dead rows, but its log of changes.
SPACE: Final = 1.2


class ConversionError(ServerError):
    """The data cannot be moved; the message says what to do. Nothing has changed."""


def cluster_version(root: Path) -> int | None:
    """The major version of PostgreSQL that made the files; None without files."""
    try:
        return int((root / FOLDER / "cluster" / "PG_VERSION").read_text())
    except FileNotFoundError:
        return None


def newer_version(root: Path) -> int | None:
    """The newest installed major version, if the files are of an older one."""
    current, newest = cluster_version(root), max(installed_binaries(), default=0)
    return newest if current is not None and current < newest else None


def size_of(root: Path) -> int:
    """Bytes of the files of PostgreSQL."""
    return sum(path.stat().st_size for path in (root / FOLDER).rglob("*") if path.is_file())


def convert(root: Path, newest: int) -> Path:
    """Move the data to PostgreSQL `newest`. The caller holds the lock of `root`.

    Returns:
        The folder of the old files.

    Raises:
        ConversionError: there is no space, or the copy failed or differs. The installation is as it was.
    """
    old = root / f"{FOLDER}-{cluster_version(root)}"
    if old.exists():
        raise ConversionError(f"{old} exists, of an earlier upgrade: remove it, or move it away")
    _check_space(root)
    draft = root / DRAFT
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=0o700)
    try:
        with EmbeddedPostgres(root / FOLDER) as source, EmbeddedPostgres(draft / FOLDER) as copy:
            _copy(source, copy, installed_binaries()[newest])
            _compare(source, copy)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    # From here on a conversion that is interrupted is completed by the next start.
    (draft / WHOLE).touch()
    (root / FOLDER).rename(old)
    finish_interrupted(root)
    return old


def finish_interrupted(root: Path) -> None:
    """Complete a conversion that ended between its renamings, and remove what else one has left.

    The caller holds the lock of `root`.
    """
    draft = root / DRAFT
    if not (root / FOLDER).exists() and (draft / WHOLE).exists():
        (draft / FOLDER).rename(root / FOLDER)
    shutil.rmtree(draft, ignore_errors=True)


def _copy(source: str, copy: str, binaries: Path) -> None:
    """Stream a dump from one server into another, all or nothing."""
    dump = [str(binaries / "pg_dump"), "--format=custom", "--compress=0", "--dbname", source]
    options = ["--exit-on-error", "--single-transaction", "--dbname", copy]
    with subprocess.Popen(dump, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
        restored = subprocess.run(
            [str(binaries / "pg_restore"), *options],
            stdin=writer.stdout,
            capture_output=True,
            text=True,
            check=False,
        )
        assert writer.stdout is not None and writer.stderr is not None
        # Otherwise a dump whose reader has ended would wait for it.
        writer.stdout.close()
        said = writer.stderr.read().decode(errors="replace")
    for code, message in ((restored.returncode, restored.stderr), (writer.returncode, said)):
        if code != 0:
            raise ConversionError(f"the copy failed, and nothing has changed: {message.strip()[-500:]}")
    with psycopg.connect(copy, autocommit=True) as connection:
        # The planner knows nothing of restored tables.
        connection.execute("ANALYZE")


def _compare(source: str, copy: str) -> None:
    copied = _rows(copy)
    if differing := [name for name, rows in _rows(source).items() if copied.get(name) != rows]:
        raise ConversionError(f"the copy differs in {', '.join(differing)}, and nothing has changed")


def _rows(url: str) -> dict[str, int]:
    """The number of rows of each table."""
    with psycopg.connect(url) as connection:
        tables = connection.execute(
            "SELECT schemaname, tablename FROM pg_tables WHERE schemaname !~ '^(pg_|information_schema$)'"
        ).fetchall()
        counts = {}
        for schema, table in tables:
            query = sql.SQL("SELECT count(*) FROM ONLY {}").format(sql.Identifier(schema, table))
            row = connection.execute(query).fetchone()
            counts[f"{schema}.{table}"] = 0 if row is None else int(row[0])
        return counts


def _check_space(root: Path) -> None:
    needed, free = SPACE * size_of(root), shutil.disk_usage(root).free
    if free < needed:
        raise ConversionError(
            f"the copy needs {needed / 1e9:.1f} GB, and {root} has {free / 1e9:.1f} GB free: free space, or "
            "use `fp8scope backup` and `fp8scope restore` with a directory on another disk"
        )
