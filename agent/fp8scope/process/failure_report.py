"""A run's last words: how it failed, and what of it has not been sent yet."""

import logging
import sys
import traceback
from collections import Counter
from collections.abc import Sequence

from fp8scope.config import Mode
from fp8scope.guard import Guard
from fp8scope.metadata.redaction import clean, redact
from fp8scope.recording.entries import FinishReport
from fp8scope.recording.records import Kind, Record, dump_json, load_json

logger = logging.getLogger("fp8scope")

MAX_ERROR_TEXT = 20_000
MAX_LAST_WORDS = 8 << 10
"""Bytes that how a run ended may take where the disk is full; its error's text gives way."""
DESCRIBING = (Kind.REGISTRATION, Kind.TENSORS)


def failure(text: str) -> str:
    """Why a run has failed, as it is told to the server: its end, which says most, without secrets."""
    return redact(clean(text[-MAX_ERROR_TEXT:]))


def with_place_of(thread: int, why: str) -> str:
    """`why`, and what the thread of this ident, the training's, is doing at the moment."""
    training = sys._current_frames().get(thread)
    where = "".join(traceback.format_stack(training)) if training is not None else ""
    return f"{why}\n\nThe training was here:\n{where}" if where else why


def count_lost(lost: Sequence[Record], guard: Guard, trouble: OSError | None) -> bytes:
    """Count records that neither the server nor the disk took; returns how the run ended, corrected.

    Empty where it was not among them.
    """
    kinds = Counter(record.kind for record in lost)
    why = "there is no disk to keep them on"
    if trouble is not None:
        why = f"the disk takes no more ({trouble.strerror or trouble})"
    if rows := kinds[Kind.ROW]:
        guard.drop(rows, why)
    others = {kind: kinds[kind] for kind in kinds if kind not in (Kind.ROW, Kind.FINISH, *DESCRIBING)}
    for kind, count in others.items():
        for _ in range(count):
            guard.error(f"keeping a record ({kind.name.lower()})", why)
    for record in lost:
        if record.kind is Kind.FINISH:
            document = load_json(record.payload)
            document["dropped"] += rows
            document["errors"] += sum(others.values())
            return _shortened(document)
    return b""


def _shortened(document: dict[str, object]) -> bytes:
    """The document in MAX_LAST_WORDS bytes: of its error the end, which says most."""
    error = str(document["error"])
    while len(payload := dump_json({**document, "error": error})) > MAX_LAST_WORDS:
        error = error[-(len(error) * 3 // 4) :]
    return payload


def tell_what_is_left(name: str, mode: Mode, report: FinishReport, trouble: str) -> None:
    """Say where the rest of the run is kept, how to send it, and what is lost. `trouble`: why it could not be
    sent; or empty.
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
        kept = "What was recorded is kept" if report.errors else "Nothing is lost"
        logger.warning(
            "run %s: not everything was sent yet%s. %s; send it with: fp8scope sync %s", name, why, kept, left
        )


def tell_counts(name: str, report: FinishReport) -> None:
    """Say how much is missing of a run of which the server has everything else."""
    if report.rows_dropped or report.errors:
        logger.warning(
            "run %s: %d steps were dropped, and the agent had %d errors of its own; the run's page says so.",
            name,
            report.rows_dropped,
            report.errors,
        )
