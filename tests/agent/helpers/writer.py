"""Reaches into the current writer of a run."""

import time

from fp8scope.recording.spool import Spool
from fp8scope.run import Run


def settle(run: Run) -> None:
    """Have every step that has ended written to the spool, within the recorder's bounds."""
    run.session.writers.pipeline.settle()


def spool_of(run: Run) -> Spool:
    """The spool, which the first entry has opened."""
    spool = run.session.writers.pipeline.spool
    assert spool is not None
    return spool


def join_sender(run: Run, timeout: float = 30.0) -> bool:
    """Wait for the end of the sender's thread; whether it has ended."""
    return run.session.writers.pipeline.sending.join(time.monotonic() + timeout)


def rows_acknowledged(run: Run) -> int:
    """The rows that the server has stored, as far as the writer knows: it has received the answers."""
    sender = run.session.writers.pipeline.sender
    assert sender is not None
    return sender.cursor.progress.rows_sent
