"""Sends the spool of a training process that ended before everything was sent."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fp8scope.config import Settings
from fp8scope.delivery.cursor import Cursor
from fp8scope.delivery.cursor import Progress as SendProgress
from fp8scope.delivery.sender import Sender
from fp8scope.guard import Guard
from fp8scope.recording.records import Kind, dump_json
from fp8scope.recording.reserve import Counts
from fp8scope.recording.segments import Owner, SpoolBusyError
from fp8scope.recording.spool import Spool

OnProgress = Callable[[int, int], None]
"""Called with the bytes sent and the bytes in all."""


@dataclass(frozen=True)
class SyncReport:
    """What became of one spool. `problem` is empty when everything in it was answered."""

    directory: Path
    rows: int = 0
    refused: int = 0
    torn: int = 0
    problem: str = ""
    errors: int = 0
    """What failed of our own while it was sent."""
    killed: bool = False
    """Its process had ended without a word, and the server was told so."""


def sync_one(directory: Path, settings: Settings, patience: float, on_progress: OnProgress) -> SyncReport:
    """Send what one spool holds, and how its process ended; remove it when nothing is left.

    Gives up after `patience` seconds in which nothing was acknowledged; what is left stays.
    """
    try:
        spool = Spool(directory)
    except (SpoolBusyError, OSError) as error:
        return SyncReport(directory, problem=str(error))
    cursor = Cursor(directory / "cursor", SendProgress(writer=directory.name))
    guard = Guard()
    sender = Sender(directory.parent.name, spool, cursor, settings, guard, live=False)
    before = cursor.progress.rows_sent
    begin, position, moved_at = cursor.progress.position, -1, time.monotonic()
    problem, killed = "", False
    while not problem and not (sender.is_done() and (killed or not _was_killed(cursor, directory))):
        if sender.is_done():
            spool.append(Kind.FINISH, _obituary(directory, cursor.progress.rows_sent))
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
        directory,
        progress.rows_sent - before,
        progress.messages_refused,
        spool.torn,
        problem,
        guard.errors,
        killed and not problem,
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
    """Whether the process that wrote the spool is gone from this machine without having said how it ended.

    Its lock is ours, so nobody writes any more; but of a spool that was copied from elsewhere this says
    nothing.
    """
    owner = Owner.of(directory)
    return not cursor.progress.finished and owner is not None and owner.host == Owner.me().host


def _obituary(directory: Path, sent: int) -> bytes:
    """How a run ended that could not say so itself. `sent`: the rows of the writer that the server has."""
    owner = Owner.of(directory)
    assert owner is not None
    error = (
        f"Process {owner.pid} on {owner.host} was killed, or ended without finishing the run. Nobody could"
        " say why: look for kill -9, for memory that ran out (dmesg), os._exit, or a crash in native code."
    )
    counts = Counts.of(directory)
    # Steps that were in memory alone, since the disk was full, have died with the process.
    dropped = counts.dropped + max(0, counts.recorded - sent) if counts is not None else 0
    return dump_json(
        {"state": "failed", "error": error, "ends_run": not owner.child, "dropped": dropped, "errors": 0}
    )
