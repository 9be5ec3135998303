"""The console log on the run's page: which lines it shows."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlencode

from django.http import QueryDict

from fp8scope_dashboard.runs import console
from fp8scope_dashboard.runs.models import ConsoleLine, Run, Writer

LINES: Final = 500
SEARCH_LENGTH: Final = 200


def console_context(run: Run, query: QueryDict) -> dict[str, Any]:
    """Return what the list of lines needs.

    The address may name `rank`, `q` (a search), and `line` or `before`.
    """
    everyone = console.writers_with_lines(run)
    ranks = sorted({writer.rank for writer in everyone})
    rank = _number(query.get("rank"))
    if rank not in ranks:
        rank = ranks[0] if ranks else None
    writers = [writer for writer in everyone if writer.rank == rank]
    search = query.get("q", "")[:SEARCH_LENGTH].replace("\x00", "").strip()
    marked = _line(writers, query.get("line"))
    edge = _line(writers, query.get("before"))
    if marked is not None:
        shown = console.around(marked, LINES)
        has_earlier = bool(console.before(writers, shown[0], 1, search))
    else:
        # With one more it is known whether there are earlier ones.
        lines = (
            console.newest(writers, LINES + 1, search)
            if edge is None
            else console.before(writers, edge, LINES + 1, search)
        )
        shown, has_earlier = lines[-LINES:], len(lines) > LINES
    return {
        "lines": _with_headings(shown, rank),
        "earlier": _query(rank, before=shown[0].pk, q=search) if shown and has_earlier else "",
        "marked": marked,
        "is_newest": marked is None and edge is None,
        "ranks": ranks,
        "rank": rank,
        "q": search,
        "count": len(shown),
    }


def _query(rank: int | None, **fields: int | str) -> str:
    """The query of the page that shows lines of a rank; empty fields are left out."""
    filled = {name: value for name, value in fields.items() if value != ""}
    return urlencode({"tab": "console", "rank": rank, **filled})


def _with_headings(lines: list[ConsoleLine], rank: int | None) -> list[dict[str, Any]]:
    """The lines, each with whether another process begins there, and the query of the page that marks it."""
    rows: list[dict[str, Any]] = []
    previous: ConsoleLine | None = None
    for line in lines:
        begins = previous is None or previous.writer_id != line.writer_id
        rows.append({"line": line, "begins": begins, "query": _query(rank, line=line.pk)})
        previous = line
    return rows


def _line(writers: list[Writer], text: str | None) -> ConsoleLine | None:
    key = _number(text)
    if key is None:
        return None
    return console.line_of(writers, key)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 19 else None
