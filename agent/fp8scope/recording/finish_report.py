"""The end of a run, and the log of data that did not reach the server."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from fp8scope.config import Mode

logger = logging.getLogger("fp8scope")


@dataclass(frozen=True, kw_only=True)
class FinishReport:
    """The end of a run. `complete`: the server has acknowledged everything that was recorded."""

    complete: bool
    rows_sent: int = 0
    points_sent: int = 0
    rows_dropped: int = 0
    messages_refused: int = 0
    errors: int = 0
    directory: Path | None = None
    """The spool that holds unsent data, for `fp8scope sync`; None if nothing is left."""

    def joined(self, earlier: "FinishReport") -> "FinishReport":
        """This report together with that of an earlier writer of the same process."""
        return replace(
            self,
            complete=self.complete and earlier.complete,
            rows_sent=self.rows_sent + earlier.rows_sent,
            points_sent=self.points_sent + earlier.points_sent,
            messages_refused=self.messages_refused + earlier.messages_refused,
            directory=self.directory or earlier.directory,
        )


def log_unsent(name: str, mode: Mode, report: FinishReport, trouble: str) -> None:
    """Log where the rest of run `name` is kept, how to send it, and what is lost.

    `trouble`: why it could not be sent, or empty.
    """
    why = f" ({trouble})" if trouble else ""
    lost = f"{report.rows_dropped} steps are lost: neither the disk nor the memory took them"
    left = report.directory
    if left is None:
        if report.rows_dropped:
            logger.warning("run %s: not everything was sent%s, and %s.", name, why, lost)
        else:
            logger.warning("run %s: not everything was sent%s, and it was not kept.", name, why)
    elif report.rows_dropped:
        rest = "the rest is kept; send it with" if mode == "offline" else "send the rest with"
        logger.warning(
            "run %s: not everything was sent yet%s. %s; %s: fp8scope sync %s", name, why, lost, rest, left
        )
    elif mode == "offline":
        logger.info("run %s is kept in %s: upload it with: fp8scope sync %s", name, left, left)
    else:
        consequence = "What was recorded is kept" if report.errors else "Nothing is lost"
        logger.warning(
            "run %s: not everything was sent yet%s. %s; send it with: fp8scope sync %s",
            name,
            why,
            consequence,
            left,
        )


def log_losses(name: str, report: FinishReport) -> None:
    """Log what is missing from a run that was otherwise sent completely."""
    if report.rows_dropped or report.errors:
        logger.warning(
            "run %s: %d steps were dropped, and %d values or actions failed in the agent; see its page.",
            name,
            report.rows_dropped,
            report.errors,
        )
