"""`fp8scope export`: download a run as a file, or write it in the form of another tool."""

import argparse
import sys
import time
import uuid
from pathlib import Path

import urllib3

from fp8scope.cli import export_to
from fp8scope.cli.progress import ProgressLine
from fp8scope.cli.server import server_settings
from fp8scope.config import ConfigurationError, Settings
from fp8scope.delivery.transport import classify
from fp8scope.guard import configure_logging
from fp8scope.importing.posting import TransferError

FORMATS = ("parquet", "csv")
CHUNK_BYTES = 1 << 20
PROGRESS_SECONDS = 1.0
"""Seconds between two requests for the number of rows that the server has written."""


def export(arguments: list[str]) -> int:
    """Download a run as a file, or write it for TensorBoard, W&B or MLflow, or as Parquet tables."""
    parser = argparse.ArgumentParser(prog="fp8scope export", description=export.__doc__)
    parser.add_argument("run", help="the run's id, as in the address of its page; with --to also its name")
    export_to.add_options(parser)
    parser.add_argument("--format", choices=FORMATS, default="parquet", help="default: %(default)s")
    parser.add_argument("-o", "--output", type=Path, help="the file to write (default: RUN.FORMAT)")
    parser.add_argument("--url", help="the server's address (default: FP8SCOPE_URL, or `fp8scope login`)")
    parser.add_argument("--project", help="the project whose login to use")
    options = parser.parse_args(arguments)
    if options.to is not None:
        return export_to.export_to(options)
    return _download(options, _id_of(parser, options.run))


def _id_of(parser: argparse.ArgumentParser, text: str) -> uuid.UUID:
    try:
        return uuid.UUID(text)
    except ValueError:
        parser.error(f"{text[:100]!r} is not the id of a run; only --to takes names")


def _download(options: argparse.Namespace, run: uuid.UUID) -> int:
    configure_logging()
    path = options.output or Path(f"{run}.{options.format}")
    try:
        settings = server_settings(options.url, options.project)
        size = download(settings, run, options.format, path)
    except (ConfigurationError, TransferError, OSError) as error:
        print(f"fp8scope export: {error}", file=sys.stderr)
        return 1
    print(f"{path}: {size:,} bytes")
    return 0


def download(settings: Settings, run: uuid.UUID, form: str, path: Path) -> int:
    """Download the export to `path`, which appears only when it is complete. Returns its size in bytes.

    Raises:
        TransferError: the server refuses the export, or the connection is lost.
    """
    headers = {"Authorization": f"Bearer {settings.token}"}
    name = str(uuid.uuid4())
    address = f"{settings.url}/api/v1/runs/{run}/export"
    pool = urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(settings.connect_timeout, read=300))
    draft = path.with_name(path.name + ".part")
    line = ProgressLine("exporting", unit="rows")
    try:
        fields = {"format": form, "progress": name}
        response = pool.request("GET", address, fields=fields, headers=headers, preload_content=False)
        if response.status != 200:
            outcome = classify(response.status, response.headers, response.read(1 << 16))
            raise TransferError(outcome.message or f"HTTP {response.status}")
        rows = int(response.headers.get("X-Fp8scope-Rows", 0))
        with draft.open("wb") as file:
            size, asked_at = 0, time.monotonic()
            for chunk in response.stream(CHUNK_BYTES):
                size += file.write(chunk)
                if time.monotonic() - asked_at > PROGRESS_SECONDS:
                    line.update(_rows_written(pool, f"{address}/{name}", headers), rows)
                    asked_at = time.monotonic()
    except urllib3.exceptions.HTTPError as error:
        draft.unlink(missing_ok=True)
        raise TransferError(f"{settings.url}: {type(error).__name__}; try again") from error
    finally:
        line.end()
    draft.replace(path)
    return size


def _rows_written(pool: urllib3.PoolManager, address: str, headers: dict[str, str]) -> int:
    """Return how many rows of the export the server has written; 0 if it does not say."""
    try:
        return int(pool.request("GET", address, headers=headers, timeout=5).json().get("rows_written") or 0)
    except (urllib3.exceptions.HTTPError, ValueError, AttributeError):
        return 0
