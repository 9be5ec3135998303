"""`fp8scope sync`: send what ended or killed training processes could not."""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fp8scope.config import ConfigurationError, Settings, settings_from
from fp8scope.delivery.resend import SyncReport, send_spool
from fp8scope.guard import configure_logging
from fp8scope.recording.spool import find_spools

PATIENCE_SECONDS = 60.0


def sync(arguments: list[str]) -> int:
    """Upload what a spool directory still holds."""
    parser = argparse.ArgumentParser(prog="fp8scope sync", description=sync.__doc__)
    parser.add_argument("directory", type=Path, help="a spool directory, or any directory above")
    parser.add_argument("--url", help="the server (else FP8SCOPE_URL, else `fp8scope login`)")
    parser.add_argument("--project", help="which login to use")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_SECONDS,
        help="seconds without any progress before giving up",
    )
    options = parser.parse_args(arguments)
    configure_logging()
    try:
        settings = settings_from(url=options.url, project=options.project, mode="online")
        spools = list(find_spools(options.directory))
        if not settings.url or not settings.token:
            raise ConfigurationError(
                "no server is known: set FP8SCOPE_URL and FP8SCOPE_TOKEN, or run `fp8scope login`."
            )
    except ConfigurationError as error:
        print(f"fp8scope sync: {error}", file=sys.stderr)
        return 2
    if not options.directory.is_dir():
        print(f"fp8scope sync: {options.directory} is not a directory.", file=sys.stderr)
        return 2
    reports = _sync_all(spools, settings, options.patience)
    for report in reports:
        print(_describe(report))
    if not reports:
        print("Nothing to send.")
    return 1 if any(report.problem or report.refused for report in reports) else 0


def _sync_all(spools: list[Path], settings: Settings, patience: float) -> list[SyncReport]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        reports: list[SyncReport] = []
        for spool in spools:
            bar = bars.add_task(f"{spool.parent.name[:8]}/{spool.name[:8]}", total=None)

            def advance(done: int, total: int, bar: TaskID = bar) -> None:
                bars.update(bar, completed=done, total=total)

            reports.append(send_spool(spool, settings, patience, advance))
        return reports


def _describe(report: SyncReport) -> str:
    parts = [f"{report.rows} steps sent"]
    if report.killed:
        parts.append("its process was killed: marked as failed")
    if report.torn:
        parts.append(f"{report.torn} bytes of an unfinished write skipped")
    if report.refused:
        parts.append(f"{report.refused} messages refused, kept in {report.directory / 'refused'}")
    if report.errors:
        parts.append(f"{report.errors} errors of the agent itself")
    if report.problem:
        parts.append(f"not complete: {report.problem}")
    return f"{report.directory.parent.name}: {', '.join(parts)}."
