"""`fp8scope alerts`: the alerts of a project or of a run."""

import argparse
import sys
from collections.abc import Sequence
from itertools import islice

from fp8scope.cli.reading.common import OK, answered, client_of, parser_of, write_json
from fp8scope.cli.reading.printing import count
from fp8scope.cli.reading.runs import day_of
from fp8scope.cli.reading.terminal import TableCell, TableColumn, Terminal
from fp8scope.client import RunAlert
from fp8scope.client.plain_text import printable

STATES = ("open", "acknowledged", "muted", "resolved", "all")
SEVERITIES = {"critical": "danger", "warning": "warning"}
RUN = TableColumn(title="run", gives=True, rank=2)
COLUMNS = (
    TableColumn(title="severity"),
    TableColumn(title="state", rank=3),
    TableColumn(title="step", is_number=True, rank=1),
    TableColumn(title="opened", rank=4),
    TableColumn(title="alert", gives=True),
)


def alerts(arguments: list[str]) -> int:
    """List alerts, the newest first."""
    parser = parser_of("alerts", alerts.__doc__)
    parser.add_argument("--run", help="only those of a run, by its name or id")
    parser.add_argument("--state", choices=STATES, default="open", help="default: %(default)s")
    parser.add_argument("--severity", choices=sorted(SEVERITIES), default="", help="only of this severity")
    parser.add_argument("--kind", default="", help="only of this kind of rule; docs/alerts.md lists them")
    parser.add_argument("--limit", type=int, default=50, help="the most alerts (%(default)s)")
    options = parser.parse_args(arguments)
    if options.limit < 1:
        parser.error("--limit is at least 1")
    return answered("alerts", lambda: _alerts(options))


def _alerts(options: argparse.Namespace) -> int:
    client = client_of(options)
    chosen = {"state": options.state, "severity": options.severity, "kind": options.kind}
    listed = iter(client.run(options.run).alerts(**chosen)) if options.run else client.alerts(**chosen)
    shown = list(islice(listed, options.limit))
    if options.json:
        write_json(shown)
    elif not shown:
        print(f"No {'' if options.state == 'all' else options.state + ' '}alerts.", file=sys.stderr)
    else:
        alert_table(Terminal(), shown, with_runs=not options.run)
    return OK


def alert_table(terminal: Terminal, alerts: Sequence[RunAlert], *, with_runs: bool) -> None:
    """Write a table of alerts."""
    columns = [*COLUMNS[:4], *([RUN] if with_runs else []), COLUMNS[4]]
    rows = []
    for alert in alerts:
        cells = [
            TableCell(printable(alert.severity), SEVERITIES.get(alert.severity, "")),
            TableCell(printable(alert.state)),
            TableCell(count(alert.onset_step)),
            TableCell(day_of(alert.opened_at), "muted"),
        ]
        run = [TableCell(printable(alert.run), "strong")] if with_runs else []
        rows.append([*cells, *run, TableCell(printable(f"{alert.title}: {alert.message}"))])
    terminal.table(columns, rows)
