"""What the demo shows in the terminal: bars while it runs, a table at its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from fp8scope_dashboard.demo.outcome import Outcome
from fp8scope_dashboard.demo.trainer import Trainer


class Bars:
    """One bar a run: steps, loss, speed, alerts."""

    def __init__(self, trainers: Iterable[Trainer], console: Console) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks: dict[Trainer, TaskID] = {
            trainer: self.progress.add_task(
                trainer.plan.name, total=trainer.plan.steps, start=False, note="waits"
            )
            for trainer in trainers
        }

    def refresh(self) -> None:
        """Show what the processes have told since."""
        for trainer, task in self._tasks.items():
            if not trainer.started:
                continue
            if not self.progress.tasks[task].started:
                self.progress.start_task(task)
            told = trainer.told
            self.progress.update(task, completed=told.step, note=_note(trainer))
            if told.finished is not None:
                self.progress.stop_task(task)


def tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """Losses with their verdicts, scores with theirs, and alerts with their delays."""
    return [_losses(outcomes), _scores(outcomes), _alerts(outcomes)]


def _losses(outcomes: Sequence[Outcome]) -> Table:
    shown = _table(
        "Training loss, points", "run", "final loss", "delta", "tolerance", "verdict", "sent", "stored"
    )
    for one in outcomes:
        shown.add_row(
            one.name,
            _number(one.final_loss),
            _percent(one.delta, "+"),
            _percent(one.tolerance),
            one.verdict or "baseline",
            f"{one.points_sent:,}",
            f"{one.points_stored:,}",
        )
    return shown


def _scores(outcomes: Sequence[Outcome]) -> Table:
    shown = _table("Held-out text", "run", "score", "", "interval", "BF16", "interval", "verdict")
    for one in outcomes:
        for score in one.scores:
            shown.add_row(
                one.name,
                score.metric,
                _number(score.score),
                _interval(score.interval),
                _number(score.baseline),
                _interval(score.baseline_interval),
                score.verdict,
            )
    return shown


def _alerts(outcomes: Sequence[Outcome]) -> Table:
    shown = _table("Alerts", "run", "alert", "severity", "at step", "after the fault", "after its step")
    for one in outcomes:
        if not one.alerts:
            shown.add_row(one.name, "none")
        for alert in one.alerts:
            steps = "" if alert.steps is None else f"{alert.steps} steps, "
            shown.add_row(
                one.name,
                alert.kind.replace("_", " "),
                alert.severity,
                str(alert.step),
                steps + _seconds(alert.seconds),
                _seconds(alert.lag),
            )
    return shown


def _table(title: str, *columns: str) -> Table:
    shown = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        shown.add_column(column, no_wrap=column == "run")
    return shown


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.2%}"


def _interval(interval: tuple[float, float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _note(trainer: Trainer) -> str:
    told = trainer.told
    if not told.step:
        return "starts"
    loss = "loss nan" if told.loss is None else f"loss {told.loss:.3f}"
    if told.finished is not None:
        return f"{loss}, {told.finished['points_sent']:,} points"
    kinds = sorted({str(alert["kind"]).replace("_", " ") for alert in told.alerts})
    return ", ".join([loss, f"{told.tokens_per_second:,.0f} tokens/s", *kinds])
