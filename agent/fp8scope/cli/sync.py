"""`fp8scope sync`: send the spools of training processes that ended before everything was sent."""

import argparse
import sys
from pathlib import Path

from fp8scope.cli.progress import MIB, ProgressLine
from fp8scope.cli.server import server_settings
from fp8scope.config import ConfigurationError, Settings
from fp8scope.delivery.resend import SyncReport, send_spool
from fp8scope.guard import configure_logging
from fp8scope.recording.spool import find_spools

PATIENCE_SECONDS = 60.0


def sync(arguments: list[str]) -> int:
    """Send the runs that are kept in a spool directory."""
    parser = argparse.ArgumentParser(prog="fp8scope sync", description=sync.__doc__)
    parser.add_argument("directory", type=Path, help="a spool directory, or a directory above one")
    parser.add_argument("--url", help="the server's address (default: FP8SCOPE_URL, or `fp8scope login`)")
    parser.add_argument("--project", help="the project whose login to use")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_SECONDS,
        help="give up after this many seconds without progress (default: %(default)g)",
    )
    options = parser.parse_args(arguments)
    configure_logging()
    try:
        settings = server_settings(options.url, options.project)
    except ConfigurationError as error:
        print(f"fp8scope sync: {error}", file=sys.stderr)
        return 2
    if not options.directory.is_dir():
        print(f"fp8scope sync: {options.directory} is not a directory.", file=sys.stderr)
        return 2
    reports = [_send(spool, settings, options.patience) for spool in find_spools(options.directory)]
    for report in reports:
        print(_describe(report))
    if not reports:
        print("Nothing to send.")
    return 1 if any(report.problem or report.refused for report in reports) else 0


def _send(spool: Path, settings: Settings, patience: float) -> SyncReport:
    line = ProgressLine(f"{spool.parent.name[:8]}/{spool.name[:8]}", unit="MiB", scale=MIB)
    try:
        return send_spool(spool, settings, patience, line.update)
    finally:
        line.end()


def _describe(report: SyncReport) -> str:
    parts = [f"{report.rows} steps sent"]
    if report.killed:
        parts.append("its process was killed: marked as failed")
    if report.torn:
        parts.append(f"{report.torn} bytes of an unfinished write skipped")
    if report.refused:
        parts.append(f"{report.refused} messages refused, kept in {report.directory / 'refused'}")
    if report.errors:
        parts.append(f"{report.errors} internal errors of the agent")
    if report.problem:
        parts.append(f"incomplete: {report.problem}")
    return f"{report.directory.parent.name}: {', '.join(parts)}."
