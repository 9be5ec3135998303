"""A run's last words: how it failed, and what of it has not been sent yet."""

import logging
import sys
import traceback

from fp8scope.config import Mode
from fp8scope.entries import FinishReport
from fp8scope.environment import clean, redact

logger = logging.getLogger("fp8scope")

MAX_ERROR_TEXT = 20_000


def failure(text: str) -> str:
    """Why a run has failed, as it is told to the server: its end, which says most, without secrets."""
    return redact(clean(text[-MAX_ERROR_TEXT:]))


def with_place_of(thread: int, why: str) -> str:
    """`why`, and what the thread of this ident, the training's, is doing at the moment."""
    training = sys._current_frames().get(thread)
    where = "".join(traceback.format_stack(training)) if training is not None else ""
    return f"{why}\n\nThe training was here:\n{where}" if where else why


def tell_what_is_left(name: str, mode: Mode, report: FinishReport, trouble: str) -> None:
    """Say where the rest of the run is kept, and how to send it. `trouble`: why it could not be; or empty."""
    why = f" ({trouble})" if trouble else ""
    if report.directory is None:
        logger.warning("run %s: not everything was sent%s, and there was no disk to keep it on.", name, why)
    elif mode == "offline":
        logger.info("run %s is kept in %s: upload it with: fp8scope sync %s", name, *[report.directory] * 2)
    else:
        logger.warning(
            "run %s: not everything was sent yet%s. Nothing is lost; send it with: fp8scope sync %s",
            name,
            why,
            report.directory,
        )
