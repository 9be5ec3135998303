"""The demo's output in the terminal: progress bars while it runs, and tables of the results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from fp8scope_dashboard.demo.outcome import RunOutcome
from fp8scope_dashboard.demo.trainer import TrainingProcess


class Bars:
    """A progress bar per run with steps, loss, speed and alerts."""

    def __init__(self, trainers: Iterable[TrainingProcess], console: Console) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks: dict[TrainingProcess, TaskID] = {
            trainer: self.progress.add_task(
                trainer.plan.name, total=trainer.plan.steps, start=False, note="waiting"
            )
            for trainer in trainers
        }

    def refresh(self) -> None:
        """Update the bars from the reports of the processes."""
        for trainer, task in self._tasks.items():
            if not trainer.started:
                continue
            if not self.progress.tasks[task].started:
                self.progress.start_task(task)
            report = trainer.report
            self.progress.update(task, completed=report.step, note=_note(trainer))
            if report.finished is not None:
                self.progress.stop_task(task)


def tables(outcomes: Sequence[RunOutcome]) -> list[Table]:
    """Tables of losses, scores and alerts, with verdicts and delays."""
    return [_losses(outcomes), _scores(outcomes), _alerts(outcomes)]


def _losses(outcomes: Sequence[RunOutcome]) -> Table:
    table = _table(
        "Training loss, points", "run", "final loss", "delta", "tolerance", "verdict", "sent", "stored"
    )
    for outcome in outcomes:
        table.add_row(
            outcome.name,
            _number(outcome.final_loss),
            _percent(outcome.delta, "+"),
            _percent(outcome.tolerance),
            outcome.verdict or "baseline",
            f"{outcome.points_sent:,}",
            f"{outcome.points_stored:,}",
        )
    return table


def _scores(outcomes: Sequence[RunOutcome]) -> Table:
    table = _table("Held-out text", "run", "score", "", "interval", "BF16", "interval", "verdict")
    for outcome in outcomes:
        for score in outcome.scores:
            table.add_row(
                outcome.name,
                score.metric,
                _number(score.score),
                _interval(score.interval),
                _number(score.baseline),
                _interval(score.baseline_interval),
                score.verdict,
            )
    return table


def _alerts(outcomes: Sequence[RunOutcome]) -> Table:
    table = _table("Alerts", "run", "alert", "severity", "at step", "after the fault", "after its step")
    for outcome in outcomes:
        if not outcome.alerts:
            table.add_row(outcome.name, "none")
        for alert in outcome.alerts:
            steps = "" if alert.steps is None else f"{alert.steps} steps, "
            table.add_row(
                outcome.name,
                alert.kind.replace("_", " "),
                alert.severity,
                str(alert.step),
                steps + _seconds(alert.seconds),
                _seconds(alert.lag),
            )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column == "run")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.2%}"


def _interval(interval: tuple[float, float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _note(trainer: TrainingProcess) -> str:
    report = trainer.report
    if not report.step:
        return "starting"
    loss = "loss nan" if report.loss is None else f"loss {report.loss:.3f}"
    if report.finished is not None:
        return f"{loss}, {report.finished['points_sent']:,} points"
    kinds = sorted({str(alert["kind"]).replace("_", " ") for alert in report.alerts})
    return ", ".join([loss, f"{report.tokens_per_second:,.0f} tokens/s", *kinds])
