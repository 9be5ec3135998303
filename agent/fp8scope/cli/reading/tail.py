"""`fp8scope tail`: follow a run until it ends, or a log directory of TensorBoard's event files."""

import argparse
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from fp8scope.cli.reading import tail_directory
from fp8scope.cli.reading.common import NO, OK, answered, client_of, parser_of, write_json
from fp8scope.cli.reading.printing import count, number
from fp8scope.cli.reading.terminal import Terminal
from fp8scope.client import RunAlert, RunHistory, StoredRun, UnreachableError
from fp8scope.client.plain_text import printable

ENDED = ("finished", "failed")
SETTLE_SECONDS = 2.0
"""After its end, the last rows of a run may still be on their way."""
PATIENCE = 3.0
"""Seconds after which it says that the server is away. It goes on asking."""
POINTS = 1_000
"""Steps that are read at a time."""


def tail(arguments: list[str]) -> int:
    """Follow a run: its new steps and alerts, until it ends. Or send the event files below a directory."""
    parser = parser_of("tail", tail.__doc__)
    parser.add_argument(
        "run", help="the name or the id of a run; or a directory, whose TensorBoard event files are sent"
    )
    parser.add_argument(
        "--scalar", action="append", metavar="NAME", help="print this scalar; may be repeated (default: loss)"
    )
    parser.add_argument("--last", type=int, default=10, help="begin with so many steps (%(default)s)")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two requests (%(default)s)")
    tail_directory.add_options(parser)
    options = parser.parse_args(arguments)
    if options.last < 0 or not 0.1 <= options.every <= 3_600:
        parser.error("--last is at least 0, and --every from 0.1 to 3600")
    if Path(options.run).is_dir():
        return tail_directory.send(options)
    if tail_directory.is_asked_for(options):
        parser.error(f"{options.run} is no directory: --once, --name, --precision and --ended-after need one")
    return answered("tail", lambda: _tail(options))


def _tail(options: argparse.Namespace) -> int:
    run = client_of(options, patience=PATIENCE).run(options.run)
    follower = RunFollower(
        run=run, scalars=options.scalar or ["loss"], terminal=Terminal(), as_json=options.json
    )
    follower.begin(options.last)
    ended_at = None
    while True:
        is_over = follower.turn()
        now = time.monotonic()
        ended_at = (ended_at or now) if is_over else None
        if ended_at is not None and now - ended_at >= SETTLE_SECONDS:
            return follower.end()
        time.sleep(options.every if ended_at is None else min(options.every, 0.5))


@dataclass(kw_only=True)
class RunFollower:
    """The state of following a run: what of it was printed.

    Attributes:
        next_step: the first step that was not.
        attempt: the start of the training that they belong to.
        alerts: those that were, with their states.
        is_waiting: the server does not answer, and it was said.
    """

    run: StoredRun
    scalars: list[str]
    terminal: Terminal
    as_json: bool
    next_step: int = 0
    attempt: int = 0
    alerts: dict[int, str] = field(default_factory=dict)
    is_waiting: bool = False

    def begin(self, last: int) -> None:
        """Begin with the last steps, and without the alerts that are there."""
        stored = self.run.refresh().last_step
        self.next_step = 0 if stored is None else max(0, stored + 1 - last)
        self.attempt = max((attempt["attempt"] for attempt in self.run.attempts), default=0)
        self.alerts = {alert.id: alert.state for alert in self.run.alerts()}

    def turn(self) -> bool:
        """Print what is new, and return whether the run is over. While the server is away, wait."""
        try:
            is_over = self.run.refresh().state in ENDED
            last = self._newest_attempt()
            if last is not None:
                self._steps(last)
            self._alerts()
        except UnreachableError as error:
            if not self.is_waiting:
                print(f"fp8scope tail: {printable(error)}; waiting", file=sys.stderr)
            self.is_waiting = True
            return False
        if self.is_waiting:
            print("fp8scope tail: the server is back", file=sys.stderr)
            self.is_waiting = False
        self.terminal.flush()
        return is_over

    def end(self) -> int:
        """Say how the run ended; returns the exit status."""
        if self.as_json:
            write_json({"type": "end", "state": self.run.state, "step": self.run.last_step})
        else:
            ending = f"The run has {printable(self.run.state)} at step {count(self.run.last_step)}."
            self.terminal.line(ending, "danger" if self.run.state == "failed" else "good")
        return OK if self.run.state == "finished" else NO

    def _newest_attempt(self) -> int | None:
        """Say that the run has begun again, maybe at an earlier step; returns the last stored step of it."""
        attempts = [attempt for attempt in self.run.attempts if attempt["last_step"] is not None]
        if not attempts:
            return None
        newest = attempts[-1]
        number_of_it, first = newest["attempt"], newest["first_step"]
        if number_of_it > self.attempt:
            self.attempt, self.next_step = number_of_it, first
            if self.as_json:
                write_json({"type": "attempt", "attempt": number_of_it, "first_step": first})
            else:
                self.terminal.line(f"Attempt {number_of_it} begins at step {first:,}.", "warning")
        return int(newest["last_step"])

    def _steps(self, last: int) -> None:
        """Print the steps from `next_step` to the last one."""
        while self.next_step <= last:
            until = min(last, self.next_step + POINTS - 1)
            read = {name: self._read(name, until) for name in self.scalars}
            steps = sorted({step for history in read.values() for step in history.steps.tolist()})
            values = {
                name: dict(zip(history.steps.tolist(), history.values.tolist(), strict=True))
                for name, history in read.items()
            }
            for step in steps:
                self._step(step, {name: values[name][step] for name in self.scalars if step in values[name]})
            self.next_step = until + 1

    def _read(self, name: str, until: int) -> RunHistory:
        return self.run.history(name, first=self.next_step, last=until, points=POINTS)

    def _step(self, step: int, values: dict[str, float]) -> None:
        if self.as_json:
            write_json({"type": "step", "step": step, "values": values})
            return
        shown = "  ".join(f"{printable(name)} {number(value)}" for name, value in values.items())
        is_broken = any(not math.isfinite(value) for value in values.values())
        self.terminal.line(f"{step:>9,}  {shown}", "danger" if is_broken else "")

    def _alerts(self) -> None:
        """Print the alerts that are new or changed their state, the oldest first."""
        for alert in reversed(self.run.alerts()):
            if self.alerts.get(alert.id) != alert.state:
                self._alert(alert)
            self.alerts[alert.id] = alert.state

    def _alert(self, alert: RunAlert) -> None:
        if self.as_json:
            write_json({"type": "alert", "alert": alert})
            return
        text = f"Alert {alert.state}: {alert.title}, step {alert.onset_step:,}: {alert.message}"
        colour = "danger" if alert.state == "open" else "muted"
        self.terminal.line(printable(text), colour)
