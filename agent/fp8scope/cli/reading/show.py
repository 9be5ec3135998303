"""`fp8scope show`: one run, its verdict first."""

import argparse

from fp8scope.cli.reading.alerts import alert_table
from fp8scope.cli.reading.common import OK, answered, client_of, parser_of, write_json
from fp8scope.cli.reading.printing import NOTHING, count, difference, number, sparkline
from fp8scope.cli.reading.runs import STATES, VERDICTS
from fp8scope.cli.reading.terminal import TableCell, TableColumn, Terminal
from fp8scope.client import JudgedScore, RunAlert, RunHistory, RunVerdict, StoredRun
from fp8scope.client.plain_text import printable
from fp8scope.client.tensors import RankedTensors, TensorRank

SPARK_WIDTH = 60
POINTS = 1_000
TENSORS = 5
ALERTS = 5
RATE = "_rate"
TENSOR_COLUMNS = (
    TableColumn(title="tensor", gives=True),
    TableColumn(title="left its range at", is_number=True, rank=1),
    TableColumn(title="now", is_number=True, rank=2),
    TableColumn(title="worst", is_number=True, rank=3),
)
SCORE_COLUMNS = (
    TableColumn(title="score", gives=True),
    TableColumn(title="step", is_number=True, rank=3),
    TableColumn(title="value", is_number=True, rank=1),
    TableColumn(title="baseline", is_number=True, rank=2),
    TableColumn(title="verdict", gives=True),
)


def show(arguments: list[str]) -> int:
    """Show a run: its verdict, its loss, its worst tensors and its alerts."""
    parser = parser_of("show", show.__doc__)
    parser.add_argument("run", help="the name or the id of a run")
    options = parser.parse_args(arguments)
    return answered("show", lambda: _show(options))


def _show(options: argparse.Namespace) -> int:
    run = client_of(options).run(options.run).refresh()
    verdict, loss = run.verdict(), run.history("loss", points=POINTS)
    ranking = run.ranking(limit=TENSORS) if run.statistics else None
    alerts, scores = run.alerts(), run.score_verdicts()
    if options.json:
        write_json(
            {
                "run": run.fields,
                "verdict": verdict,
                "loss": {"steps": loss.steps, "values": loss.values, "thinned": loss.thinned},
                "ranking": ranking,
                "alerts": alerts,
                "scores": scores,
            }
        )
        return OK
    terminal = Terminal()
    _head(terminal, run)
    write_verdict(terminal, verdict)
    _loss(terminal, loss)
    _alerts(terminal, alerts)
    if ranking is not None:
        _tensors(terminal, ranking)
    write_scores(terminal, scores)
    terminal.line()
    terminal.line(printable(run.url), "muted")
    return OK


def _head(terminal: Terminal, run: StoredRun) -> None:
    facts = [run.precision, run.group, "" if run.seed is None else f"seed {run.seed}"]
    step = count(run.last_step) + (f" of {run.total_steps:,}" if run.total_steps else "")
    rest = printable(", ".join([*filter(None, facts), f"step {step}"]))
    state = TableCell(printable(run.state), STATES.get(run.state, ""))
    terminal.cells([TableCell(printable(run.name), "strong"), state, TableCell(rest)])


def write_verdict(terminal: Terminal, verdict: RunVerdict) -> None:
    """Write a verdict with its numbers, its explanation and what it does not cover."""
    terminal.line(printable(verdict.label), VERDICTS.get(verdict.verdict, "strong"))
    facts = []
    if verdict.delta is not None:
        facts.append(f"difference {difference(verdict.delta, verdict.unit)}")
    if verdict.interval is not None:
        low, high = (difference(end, verdict.unit) for end in verdict.interval)
        facts.append(f"interval {low} to {high}")
    if verdict.tolerance is not None:
        facts.append(f"tolerance {difference(verdict.tolerance, verdict.unit, signed=False)}")
    if verdict.smallest_detectable is not None:
        facts.append(f"would have seen {difference(verdict.smallest_detectable, verdict.unit, signed=False)}")
    if facts:
        terminal.line(f"  {', '.join(facts)}")
    for text in (verdict.explanation, verdict.coverage):
        if text:
            terminal.line(f"  {printable(text)}")
    for text in verdict.not_judged:
        terminal.line(f"  Not judged: {printable(text)}", "warning")
    for text in verdict.warnings:
        terminal.line(f"  Note: {printable(text)}", "warning")


def _loss(terminal: Terminal, loss: RunHistory) -> None:
    if not len(loss):
        terminal.line("No loss yet.")
        return
    drawn = sparkline(loss.values, min(SPARK_WIDTH, (terminal.width or 100) - 20))
    terminal.line(f"Loss {number(float(loss.values[-1]))}  {drawn}")


def _alerts(terminal: Terminal, alerts: list[RunAlert]) -> None:
    if not alerts:
        terminal.line("No alerts.")
        return
    opened = sum(alert.state == "open" for alert in alerts)
    terminal.line()
    terminal.line(f"Alerts: {opened} open of {len(alerts)}", "strong")
    first = sorted(alerts, key=lambda alert: (alert.state != "open", alert.severity != "critical"))
    alert_table(terminal, first[:ALERTS], with_runs=False)


def _tensors(terminal: Terminal, ranking: RankedTensors) -> None:
    if not ranking.tensors:
        return
    terminal.line()
    left = f"{ranking.out_of_range:,} of {ranking.total:,} tensors left their range"
    terminal.cells([TableCell(printable(ranking.statistic), "strong"), TableCell(left)])
    is_rate = ranking.statistic.endswith(RATE)
    rows = [
        [
            TableCell(printable(tensor.name)),
            TableCell(_onset(tensor), "danger"),
            TableCell(_value(tensor.now, is_rate=is_rate)),
            TableCell(_value(tensor.ever, is_rate=is_rate)),
        ]
        for tensor in ranking.tensors
    ]
    terminal.table(TENSOR_COLUMNS, rows)


def _onset(tensor: TensorRank) -> str:
    if tensor.onset is None:
        return ""
    before = tensor.earliest
    return count(tensor.onset) if before == tensor.onset else f"{count(before)} to {count(tensor.onset)}"


def _value(value: float | None, *, is_rate: bool) -> str:
    if value is None:
        return NOTHING
    return f"{100.0 * value:.3g} %" if is_rate else number(value)


def write_scores(terminal: Terminal, scores: list[JudgedScore]) -> None:
    """Write the table of scores against the baseline, if there are any."""
    if not scores:
        return
    terminal.line()
    terminal.line("Scores", "strong")
    rows = [
        [
            TableCell(printable(f"{score.name} {score.metric}")),
            TableCell(count(score.step)),
            TableCell(number(score.score)),
            TableCell(number(score.baseline_score)),
            TableCell(printable(score.label), VERDICTS.get(score.verdict, "")),
        ]
        for score in scores
    ]
    terminal.table(SCORE_COLUMNS, rows)
