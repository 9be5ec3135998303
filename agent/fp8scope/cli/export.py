"""`fp8scope export`: take a run away as a file."""

import argparse
import sys
import time
import uuid
from pathlib import Path

import urllib3
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fp8scope.config import ConfigurationError, Settings, settings_from
from fp8scope.delivery.transport import classify
from fp8scope.guard import configure_logging

FORMATS = ("parquet", "csv")
PIECE = 1 << 20
PROGRESS_SECONDS = 1.0


class TransferError(RuntimeError):
    """It did not work, and why."""


def export(arguments: list[str]) -> int:
    """Download a run as a Parquet or CSV file."""
    parser = argparse.ArgumentParser(prog="fp8scope export", description=export.__doc__)
    parser.add_argument("run", type=uuid.UUID, help="the run's id, as in its page's address")
    parser.add_argument("--format", choices=FORMATS, default="parquet")
    parser.add_argument("-o", "--output", type=Path, help="default: RUN.FORMAT in this directory")
    parser.add_argument("--url", help="the server (else FP8SCOPE_URL, else `fp8scope login`)")
    parser.add_argument("--project", help="which login to use")
    options = parser.parse_args(arguments)
    configure_logging()
    path = options.output or Path(f"{options.run}.{options.format}")
    try:
        settings = connected(options.url, options.project)
        size = download(settings, options.run, options.format, path)
    except (ConfigurationError, TransferError, OSError) as error:
        print(f"fp8scope export: {error}", file=sys.stderr)
        return 1
    print(f"{path}: {size:,} bytes")
    return 0


def connected(url: str | None, project: str | None) -> Settings:
    """Where to send to. Raises TransferError without an address and a token."""
    settings = settings_from(url=url, project=project, mode="online")
    if not settings.url or not settings.token:
        raise TransferError(
            "no server is known: run `fp8scope login ADDRESS`, or set FP8SCOPE_URL and FP8SCOPE_TOKEN"
        )
    return settings


def download(settings: Settings, run: uuid.UUID, form: str, path: Path) -> int:
    """Write the export to `path`, which appears only when it is complete. Returns its size in bytes.

    Raises:
        TransferError: the server refuses it, or the connection broke.
    """
    headers = {"Authorization": f"Bearer {settings.token}"}
    name = str(uuid.uuid4())
    address = f"{settings.url}/api/v1/runs/{run}/export"
    pool = urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(settings.connect_timeout, read=300))
    draft = path.with_name(path.name + ".part")
    try:
        fields = {"format": form, "progress": name}
        answer = pool.request("GET", address, fields=fields, headers=headers, preload_content=False)
        if answer.status != 200:
            outcome = classify(answer.status, answer.headers, answer.read(1 << 16))
            raise TransferError(outcome.message or f"HTTP {answer.status}")
        rows = int(answer.headers.get("X-Fp8scope-Rows", 0))
        columns = (BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TextColumn("{task.fields[size]}"))
        with draft.open("wb") as file, Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(f"{rows:,} rows", total=max(1, rows), size="")
            size, asked = 0, time.monotonic()
            for piece in answer.stream(PIECE):
                size += file.write(piece)
                if time.monotonic() - asked > PROGRESS_SECONDS:
                    bar.update(
                        task, completed=_written(pool, f"{address}/{name}", headers), size=f"{size >> 20} MiB"
                    )
                    asked = time.monotonic()
            bar.update(task, completed=max(1, rows), size=f"{size >> 20} MiB")
    except urllib3.exceptions.HTTPError as error:
        draft.unlink(missing_ok=True)
        raise TransferError(f"{settings.url}: {type(error).__name__}; try again") from error
    draft.replace(path)
    return size


def _written(pool: urllib3.PoolManager, address: str, headers: dict[str, str]) -> int:
    try:
        return int(pool.request("GET", address, headers=headers, timeout=5).json().get("rows_written") or 0)
    except (urllib3.exceptions.HTTPError, ValueError, AttributeError):
        return 0
