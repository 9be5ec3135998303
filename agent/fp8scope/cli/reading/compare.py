"""`fp8scope compare`: two runs, of which one is the other's baseline."""

import argparse

from fp8scope.cli.reading.common import NO, OK, answered, client_of, parser_of, write_json
from fp8scope.cli.reading.printing import difference
from fp8scope.cli.reading.show import write_scores, write_verdict
from fp8scope.cli.reading.terminal import TableCell, TableColumn, Terminal
from fp8scope.client import RunPair
from fp8scope.client.plain_text import printable

SEED_COLUMNS = (
    TableColumn(title="run of the group", gives=True),
    TableColumn(title="seed", is_number=True, rank=1),
    TableColumn(title="own difference", is_number=True),
)


def compare(arguments: list[str]) -> int:
    """Compare a run with its baseline: verdict, difference, interval, seeds and scores."""
    parser = parser_of("compare", compare.__doc__)
    parser.add_argument("a", help="the name or the id of a run")
    parser.add_argument("b", help="another run; one of the two is the other's baseline")
    options = parser.parse_args(arguments)
    return answered("compare", lambda: _compare(options))


def _compare(options: argparse.Namespace) -> int:
    pair = client_of(options).compare(options.a, options.b)
    status = OK if pair.verdict is not None and pair.verdict.verdict else NO
    if options.json:
        write_json(pair)
        return status
    terminal = Terminal()
    judged, other = (pair.a, pair.b) if pair.judged == pair.a[0] else (pair.b, pair.a)
    if pair.verdict is None:
        terminal.line(printable(f"{pair.a[1]} and {pair.b[1]}: no verdict"), "strong")
        terminal.line(f"  {printable(pair.reason)}")
        return status
    terminal.line(printable(f"{judged[1]} against the baseline of {other[1]}"), "strong")
    write_verdict(terminal, pair.verdict)
    if pair.costs:
        terminal.line(f"  {printable(pair.costs)}")
    _seeds(terminal, pair)
    write_scores(terminal, list(pair.evaluations))
    return status


def _seeds(terminal: Terminal, pair: RunPair) -> None:
    if pair.verdict is None or len(pair.seeds) < 2:
        return
    unit = pair.verdict.unit
    rows = []
    for seed in pair.seeds:
        own = "not finite" if seed.difference is None else difference(seed.difference, unit)
        colour = "danger" if seed.left else ""
        number = "" if seed.seed is None else str(seed.seed)
        rows.append([TableCell(printable(seed.name), colour), TableCell(number), TableCell(own, colour)])
    terminal.line()
    terminal.table(SEED_COLUMNS, rows)
