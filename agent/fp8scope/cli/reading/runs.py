"""`fp8scope runs`: the runs that a search finds."""

import argparse
import sys
from datetime import datetime
from itertools import islice

from fp8scope.cli.reading.common import OK, answered, client_of, parser_of, write_json
from fp8scope.cli.reading.printing import NOTHING, count, difference, number
from fp8scope.cli.reading.terminal import TableCell, TableColumn, Terminal
from fp8scope.client import RunVerdict, StoredRun
from fp8scope.client.fields import number_of
from fp8scope.client.plain_text import printable

COLUMNS = (
    TableColumn(title="run", gives=True),
    TableColumn(title="state", rank=1),
    TableColumn(title="FP8 against BF16", gives=True, rank=2),
    TableColumn(title="difference", is_number=True, rank=5),
    TableColumn(title="loss", is_number=True, rank=3),
    TableColumn(title="step", is_number=True, rank=4),
    TableColumn(title="alerts", is_number=True, rank=6),
    TableColumn(title="started", rank=7),
)
ID = TableColumn(title="id", rank=8)
VERDICTS = {"worse": "danger", "incomplete": "warning", "equivalent": "good", "better": "good"}
STATES = {"failed": "danger", "silent": "warning", "running": "good"}


def runs(arguments: list[str]) -> int:
    """List the runs that a search finds."""
    parser = parser_of("runs", runs.__doc__)
    parser.add_argument(
        "query", nargs="*", help="a search in the language of the page, such as state:failed 'lr>1e-3'"
    )
    parser.add_argument("--sort", default="-created", help="a column, descending after a minus (%(default)s)")
    parser.add_argument("--limit", type=_limit, default=20, help="the most runs (%(default)s); 0 for all")
    parser.add_argument("--ids", action="store_true", help="show the ids of the runs")
    options = parser.parse_args(arguments)
    return answered("runs", lambda: _runs(options))


def _limit(text: str) -> int:
    value = int(text) if text.isdecimal() and text.isascii() and len(text) < 10 else -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a number of rows, such as 20")
    return value


def _runs(options: argparse.Namespace) -> int:
    listed = client_of(options).runs(" ".join(options.query), sort=options.sort)
    shown = list(islice(listed, options.limit or None))
    if options.json:
        write_json([run.fields for run in shown])
        return OK
    if not shown:
        print("No run matches.", file=sys.stderr)
        return OK
    columns = [*COLUMNS, ID] if options.ids else list(COLUMNS)
    terminal = Terminal()
    terminal.table(columns, [_row(run)[: len(columns)] for run in shown])
    terminal.flush()
    if len(shown) == options.limit and (total := len(listed)) > len(shown):
        print(f"{len(shown)} of {total:,} runs; --limit 0 shows all.", file=sys.stderr)
    return OK


def _row(run: StoredRun) -> list[TableCell]:
    fields, verdict = run.fields, RunVerdict.of(run.fields["verdict"])
    loss, opened = number_of(fields["loss"]), fields["open_alerts"]
    step = count(run.last_step) + (f" / {run.total_steps:,}" if run.total_steps else "")
    own = NOTHING if verdict.own is None else difference(verdict.own, verdict.unit)
    return [
        TableCell(printable(run.name), "strong"),
        TableCell(printable(run.state), STATES.get(run.state, "")),
        TableCell(printable(verdict.label), VERDICTS.get(verdict.verdict, "")),
        TableCell(own),
        TableCell(number(loss)),
        TableCell(step),
        TableCell(str(opened) if opened else "", "danger"),
        TableCell(day_of(run.created_at), "muted"),
        TableCell(run.id),
    ]


def day_of(moment: datetime) -> str:
    """The minute of a time, in the zone of this machine."""
    return f"{moment.astimezone():%Y-%m-%d %H:%M}"
