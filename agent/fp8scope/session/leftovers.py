"""Data that did not reach the server: sent later in the background, or counted as lost."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from fp8scope.config import Settings
from fp8scope.delivery.resend import send_spool
from fp8scope.guard import Guard
from fp8scope.recording.records import Record, RecordKind, dump_json, load_json
from fp8scope.recording.spool import find_spools

PATIENCE_SECONDS = 60.0
"""Leftovers are given up for now when nothing was acknowledged for so long."""
MAX_FINISH_BYTES = 8 << 10
"""Size of a FINISH record on a full disk; the text of its error is shortened to fit."""
DESCRIPTIONS = (RecordKind.REGISTRATION, RecordKind.TENSORS)


def send_leftovers(
    run: str, settings: Settings, own: Path, on_error: Callable[[str, Exception], None]
) -> threading.Thread | None:
    """Send what ended processes have left of this run, in the background. None if there is nothing.

    `own`: the spool of this process. `on_error` is called with what fails.
    """
    left = [spool for spool in find_spools(settings.directory / run) if spool != own]
    if settings.mode != "online" or not left:
        return None

    def send() -> None:
        for spool in left:
            try:
                send_spool(spool, settings, PATIENCE_SECONDS)
            except Exception as error:
                on_error("sending what an earlier process has left", error)

    thread = threading.Thread(target=send, name="fp8scope-leftovers", daemon=True)
    thread.start()
    return thread


def count_lost(lost: Sequence[Record], guard: Guard, trouble: OSError | None) -> bytes:
    """Count records that neither the server nor the disk took.

    Returns the FINISH record among them with its counts corrected; empty if there is none.
    """
    kinds = Counter(record.kind for record in lost)
    why = "there is no disk to keep them on"
    if trouble is not None:
        why = f"the disk takes no more ({trouble.strerror or trouble})"
    if rows := kinds[RecordKind.ROW]:
        guard.drop(rows, why)
    silent = (RecordKind.ROW, RecordKind.FINISH, *DESCRIPTIONS)
    others = {kind: kinds[kind] for kind in kinds if kind not in silent}
    for kind, count in others.items():
        for _ in range(count):
            guard.error(f"keeping a record ({kind.name.lower()})", why)
    for record in lost:
        if record.kind is RecordKind.FINISH:
            document = load_json(record.payload)
            document["dropped"] += rows
            document["errors"] += sum(others.values())
            return _shortened(document)
    return b""


def _shortened(document: dict[str, object]) -> bytes:
    """The document in MAX_FINISH_BYTES bytes. Of its error the end is kept, which says most."""
    error = str(document["error"])
    while len(payload := dump_json({**document, "error": error})) > MAX_FINISH_BYTES:
        error = error[-(len(error) * 3 // 4) :]
    return payload
