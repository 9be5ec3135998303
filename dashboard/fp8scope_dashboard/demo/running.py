"""Run a demo: start the installation, train the models, wait for the verdicts."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

from rich.console import Console

from fp8scope_dashboard.demo import plan as plans
from fp8scope_dashboard.demo import project as projects
from fp8scope_dashboard.demo.outcome import RunOutcome, is_judged, outcome_of
from fp8scope_dashboard.demo.project import DemoProject
from fp8scope_dashboard.demo.screen import Bars
from fp8scope_dashboard.demo.stored import Dashboard
from fp8scope_dashboard.demo.trainer import TrainingProcess
from fp8scope_dashboard.servers.supervisor import Supervisor

AT_ONCE = 2
"""Training processes at a time. The demo must also run on two cores, which it shares with the servers."""
POLL_SECONDS = 0.2
JUDGE_SECONDS = 60.0


class DemoError(Exception):
    """The demo cannot continue; the message says why."""


@dataclass(kw_only=True)
class Demo:
    """A demo in a separate installation. Times are in seconds since the start of the command."""

    supervisor: Supervisor
    console: Console
    steps: int
    began: float = field(default_factory=time.monotonic)
    ready: float | None = None
    first_rows: float | None = None

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def run(self, stack: ExitStack) -> list[RunOutcome]:
        """Start everything, train, and return the results. Closing `stack` stops all processes."""
        stack.callback(self.supervisor.stop)
        self.supervisor.start()
        with self.console.status("Starting PostgreSQL, Redis, the web server and a worker ..."):
            self.supervisor.wait_ready()
            project = projects.create_in_process(self.supervisor.url, self.supervisor.environment)
        self.ready = self.elapsed()
        self._print_address(project)
        dashboard = Dashboard(self.supervisor.url, project.token)
        trainers = [self._trainer(plan, project) for plan in plans.five_runs(self.steps)]
        for trainer in trainers:
            stack.callback(trainer.stop)
        self._train(trainers, dashboard)
        with self.console.status("Waiting for the last verdicts ..."):
            return [_wait_for_verdicts(trainer, dashboard) for trainer in trainers]

    def _print_address(self, project: DemoProject) -> None:
        self.console.print(
            f"\nReady after {self.elapsed():.0f} s. Open this one-time sign-in link in a browser:"
        )
        self.console.print(f"    {project.link}", soft_wrap=True, highlight=False, style="bold")
        self.console.print(f"Later visits: {project.page}\n", soft_wrap=True, highlight=False)

    def _trainer(self, plan: plans.RunPlan, project: DemoProject) -> TrainingProcess:
        environment = {
            **os.environ,
            "FP8SCOPE_URL": self.supervisor.url,
            "FP8SCOPE_TOKEN": project.token,
            "FP8SCOPE_DIR": str(self.supervisor.data.root / "spool"),
            "FP8SCOPE_MODE": "online",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        return TrainingProcess(plan, environment, self.supervisor.data.logs)

    def _train(self, trainers: list[TrainingProcess], dashboard: Dashboard) -> None:
        """Run the trainers in order, AT_ONCE at a time."""
        bars = Bars(trainers, self.console)
        waiting, running = list(trainers), list[TrainingProcess]()
        with bars.progress:
            while waiting or running:
                for trainer in running:
                    _check(trainer)
                running = [trainer for trainer in running if trainer.exit_status() is None]
                while waiting and len(running) < AT_ONCE:
                    trainer = waiting.pop(0)
                    trainer.start()
                    running.append(trainer)
                bars.refresh()
                self._note_first_rows(trainers[0], dashboard)
                time.sleep(POLL_SECONDS)

    def _note_first_rows(self, trainer: TrainingProcess, dashboard: Dashboard) -> None:
        if self.first_rows is None and (run := trainer.report.run):
            stored = dashboard.run(run)
            if stored is not None and stored["rows_stored"] > 0:
                self.first_rows = self.elapsed()


def _check(trainer: TrainingProcess) -> None:
    """Raise DemoError if the process has failed."""
    status = trainer.exit_status()
    if status is None or (status == 0 and trainer.report.finished is not None):
        return
    tail = trainer.tail()
    reason = f"ended with status {status}" if status >= 0 else f"was killed by signal {-status}"
    raise DemoError(
        f"the training process of {trainer.plan.name!r} {reason}; its log is {trainer.log}\n{tail}"
    )


def _wait_for_verdicts(trainer: TrainingProcess, dashboard: Dashboard) -> RunOutcome:
    report = trainer.report
    stored = dashboard.wait(report.run, lambda run: is_judged(trainer.plan, run), JUDGE_SECONDS)
    return outcome_of(trainer.plan, report, stored)
