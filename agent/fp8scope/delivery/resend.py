"""Sends the spool of a process that has ended or was killed."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fp8scope.config import Settings
from fp8scope.delivery.cursor import Cursor, SendProgress
from fp8scope.delivery.sender import Sender
from fp8scope.guard import Guard
from fp8scope.recording.records import RecordKind, dump_json
from fp8scope.recording.reserve import RowCounts
from fp8scope.recording.segments import Owner, SpoolBusyError
from fp8scope.recording.spool import Spool

BUSY_SECONDS = 0.5
"""So long the lock of a spool is waited for."""
OnProgress = Callable[[int, int], None]
"""Called with the bytes sent and the total number of bytes."""


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """The result of sending one spool. `problem` is empty if the server answered everything."""

    directory: Path
    rows: int = 0
    refused: int = 0
    torn: int = 0
    problem: str = ""
    errors: int = 0
    """Failures of the agent itself while it sent the spool."""
    killed: bool = False
    """True if the process had ended without finishing the run; this was reported to the server."""


def _ignore_progress(done: int, total: int) -> None:
    pass


def _opened(directory: Path) -> Spool:
    """Open a spool whose process has ended.

    A child that the process was starting when it was killed, such as git, has the lock of the spool for some
    milliseconds more, until it is another program.

    Raises:
        SpoolBusyError: the process runs.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return Spool(directory)
        except SpoolBusyError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.02)


def send_spool(
    directory: Path, settings: Settings, patience: float, on_progress: OnProgress = _ignore_progress
) -> SyncReport:
    """Send the records of one spool, and how its process ended. Remove the spool if nothing is left.

    Gives up after `patience` seconds without an acknowledgement; unsent records stay in the spool.
    """
    # Before the spool is opened, because that may shorten its last segment.
    ended = _last_written(directory)
    try:
        spool = _opened(directory)
    except (SpoolBusyError, OSError) as error:
        return SyncReport(directory=directory, problem=str(error))
    cursor = Cursor(directory / "cursor", SendProgress(writer=directory.name))
    guard = Guard()
    sender = Sender(directory.parent.name, spool, cursor, settings, guard, live=False)
    before = cursor.progress.rows_sent
    begin, position, moved_at = cursor.progress.position, -1, time.monotonic()
    problem, killed = "", False
    while not problem and not (sender.is_done() and (killed or not _was_killed(cursor, directory))):
        if sender.is_done():
            spool.append(RecordKind.FINISH, _killed_document(directory, cursor.progress.rows_sent, ended))
            killed = True
        pause = sender.advance()
        if cursor.progress.position != position:
            position, moved_at = cursor.progress.position, time.monotonic()
            on_progress(position - begin, spool.end - begin)
        elif sender.held or time.monotonic() + pause - moved_at > patience:
            problem = sender.trouble or "nothing was acknowledged"
        time.sleep(pause if not problem else 0)
    progress = cursor.progress
    report = SyncReport(
        directory=directory,
        rows=progress.rows_sent - before,
        refused=progress.messages_refused,
        torn=spool.torn,
        problem=problem,
        errors=guard.errors,
        killed=killed and not problem,
    )
    sender.close()
    cursor.close()
    if problem or report.refused:
        spool.close()
    else:
        spool.remove()
        with contextlib.suppress(OSError):
            directory.parent.rmdir()
    return report


def _was_killed(cursor: Cursor, directory: Path) -> bool:
    """Return whether the spool's process ran on this machine and ended without finishing the run.

    The caller holds the spool's lock, so no process writes to it. For a spool copied from another machine
    the lock proves nothing.
    """
    owner = Owner.of(directory)
    return not cursor.progress.finished and owner is not None and owner.host == Owner.me().host


def _last_written(directory: Path) -> datetime | None:
    """Return when the process wrote to its spool for the last time; None if it has written nothing."""
    times = [path.stat().st_mtime for path in directory.glob("*.log")]
    return datetime.fromtimestamp(max(times), UTC) if times else None


def _killed_document(directory: Path, sent: int, ended: datetime | None) -> bytes:
    """Return the FINISH document of a killed process.

    `sent`: rows of this writer that the server has. `ended`: when it wrote its last record.
    """
    owner = Owner.of(directory)
    assert owner is not None
    error = (
        f"Process {owner.pid} on {owner.host} was killed, or ended without finishing the run. The cause is"
        " unknown: check for kill -9, the out-of-memory killer (dmesg), os._exit, or a crash in native code."
    )
    counts = RowCounts.of(directory)
    # Steps that were only in memory because the disk was full were lost with the process.
    dropped = counts.dropped + max(0, counts.recorded - sent) if counts is not None else 0
    document = {
        "state": "failed",
        "error": error,
        "ends_run": not owner.child,
        "dropped": dropped,
        "errors": 0,
    }
    if ended is not None:
        document["finished_at"] = ended.isoformat()
    return dump_json(document)
