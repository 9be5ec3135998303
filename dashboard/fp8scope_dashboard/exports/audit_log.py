"""The audit log as CSV or JSON lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from typing import Final, Literal

from fp8scope_dashboard.audit.models import Entry
from fp8scope_dashboard.exports.spreadsheet import safe_header

AuditForm = Literal["csv", "jsonl"]
FORMS: Final[tuple[AuditForm, ...]] = ("csv", "jsonl")
COLUMNS: Final = ("at", "project", "action", "text", "by", "address", "undone_at")


def as_bytes(pieces: Iterable[list[Entry]], form: AuditForm) -> Iterator[bytes]:
    """The entries in UTF-8, one line each; CSV begins with the names of the columns.

    No cell of a CSV file begins a formula: such a text gets an apostrophe in front.
    """
    if form == "csv":
        yield _csv([list(COLUMNS)])
    for piece in pieces:
        rows = [_row(entry) for entry in piece]
        if form == "csv":
            yield _csv([[safe_header(" ".join(row[name].split())) for name in COLUMNS] for row in rows])
        else:
            yield "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def _row(entry: Entry) -> dict[str, str]:
    undone = entry.undone_at
    return {
        "at": entry.at.isoformat(),
        "project": "" if entry.project is None else entry.project.slug,
        "action": entry.action,
        "text": entry.text,
        "by": entry.by,
        "address": entry.address,
        "undone_at": "" if undone is None else undone.isoformat(),
    }


def _csv(rows: list[list[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows(rows)
    return text.getvalue().encode()
