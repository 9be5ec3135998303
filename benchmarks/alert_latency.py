"""Measure how soon the alert of each rule arrives. Prints one JSON line for each rule and number of runs.

    python benchmarks/alert_latency.py [--runs 1 50] [--passes 2] [--rate 20] [--rate-of-many 10] [--rules ..]

Starts an installation (`fp8scope up` with its defaults: web, worker, beat, PostgreSQL with fsync, Redis) with
a webhook on this machine. Runs of the real agent stream `--rate` steps a second (many at once:
`--rate-of-many`), each with ten scalars and the statistics of four tensors, from `alert_scenarios.py`: 90 to
190 calm steps, then a fault for one rule, which alone is enabled in the run's project. `--runs` of them
stream at once, spread over `--processes` processes that share the cores of this machine with the
installation. Figures:

    rule, runs          the rule, and the runs that stream at once
    alerts, missing     runs in which it opened an alert, and in which not
    p50_s, p95_s, max_s from the end of the deciding step in the training process to the webhook's arrival
    opened_p50_s, opened_p95_s
                        of this, until the detectors opened the alert
    stored_p95_s        of this, until the server had received the step

The deciding step is the one at which the alert says that it was found. The last line of each number of runs
has all rules together, and:

    steps_per_s, batches_per_s
                        steps that all runs made, and messages that the server stored, in a second
    installation_cpu, runs_cpu, machine_cpu
                        cores that the installation, the runs and the whole machine used
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import alert_scenarios as scenarios
from processor_time import cpu_seconds

# The faults of runs begin within so many steps of each other.
FAULTS_OVER = 100
# Alerts that have not arrived so long after the last step are missing.
PATIENCE = 10.0
ENDED, STEPS = "ended", "steps"

# Run with the servers' settings: waits for the workers, and makes a project for each rule, with a webhook.
# Prints the tokens by rule.
PREPARE = """
import json, sys
import django; django.setup()
from fp8scope_dashboard.celery import app
while len(app.control.ping(timeout=2.0)) < 2:
    pass
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.models import Channel, Rule
from fp8scope_dashboard.db.encryption import encrypt_json
hook, kinds, short, of_kind = json.loads(sys.argv[1])
tokens = {}
for kind in kinds:
    project = create_project(kind.replace("_", "-"), kind)
    Rule.objects.filter(project=project).exclude(kind=kind).update(enabled=False)
    if kind == "threshold":
        Rule.objects.create(
            project=project, kind=kind, name="loss above 2.5", statistic="loss", condition="above",
            parameters=rules.validate(kind, {"value": 2.5}),
        )
    for rule in Rule.objects.filter(project=project, kind=kind):
        known = rules.kind_of(kind).parameters
        changed = {name: max(known[name].low, value) for name, value in short.items() if name in known}
        rule.parameters = rules.validate(kind, {**rule.parameters, **changed, **of_kind.get(kind, {})})
        rule.enabled = True
        rule.save()
    Channel.objects.create(
        project=project, name="benchmark", sealed=encrypt_json({"url": hook}), per_minute=600
    )
    tokens[kind] = create_token(project, "benchmark", scopes=("write", "read"))[1]
print(json.dumps(tokens))
"""
# Prints the number of stored messages, and of each run its first alert: the deciding step, when it opened,
# and when that step was received.
STORED = """
import json
import django; django.setup()
from fp8scope_dashboard.alerts.models import Alert
from fp8scope_dashboard.receipts.models import Receipt
from fp8scope_dashboard.telemetry.models import Chunk
alerts = {}
for alert in Alert.objects.order_by("-id"):
    holding = Chunk.objects.filter(run=alert.run_id, first_step__lte=alert.step, last_step__gte=alert.step)
    received = [chunk.received_at.timestamp() for chunk in holding if chunk.rows < 100]
    alerts[str(alert.run_id)] = [alert.step, alert.opened_at.timestamp(), min(received, default=None)]
print(json.dumps([Receipt.objects.count(), alerts]))
"""


def play(
    url: str,
    tokens: Mapping[str, str],
    directory: str,
    parts: Sequence[Sequence[str]],
    rate: float,
    results: Any,
) -> None:
    """Stream `parts`, at once: each is a sequence of rules, of which each gets a run of its own.

    Puts the rule, the run and the ends of its steps for each run; then the number of steps and the seconds.
    """
    import fp8scope

    begin, steps, seed = time.monotonic(), 0, os.getpid()
    # Not all begin at once: their messages would come together.
    slots = [Slot(list(part), waits=-index % 10) for index, part in enumerate(parts)]
    while any(slot.rest or slot.episode is not None for slot in slots):
        for slot in slots:
            if slot.waits > 0:
                slot.waits -= 1
                continue
            if slot.episode is None and slot.rest:
                kind, seed = slot.rest.pop(0), seed + 1
                slot.episode = Episode(
                    fp8scope=fp8scope, kind=kind, seed=seed, url=url, token=tokens[kind], directory=directory
                )
            if slot.episode is None:
                continue
            slot.episode.step()
            steps += 1
            if slot.episode.is_over:
                results.put((ENDED, slot.episode.kind, slot.episode.run.id, slot.episode.ends))
                threading.Thread(target=slot.episode.run.finish, args=(5.0,)).start()
                slot.episode = None
        time.sleep(max(0.0, begin + steps / max(len(slots), 1) / rate - time.monotonic()))
    results.put((STEPS, steps, time.monotonic() - begin))


@dataclass
class Slot:
    """One of the runs at once: the rules that are left, and its present run; it waits some turns first."""

    rest: list[str]
    episode: Episode | None = None
    waits: int = 0


class Episode:
    """A run in which one rule finds something."""

    def __init__(self, fp8scope: Any, kind: str, seed: int, url: str, token: str, directory: str) -> None:
        self.kind = kind
        # Runs that stream at once do not fail at once.
        self._calm_steps = scenarios.CALM_STEPS + random.Random(seed).randrange(FAULTS_OVER)
        self.stream = scenarios.Stream(kind, seed)
        baseline = scenarios.BASELINE if kind == "above_baseline" else None
        self.run = fp8scope.init(
            name=f"{kind} {seed}",
            url=url,
            token=token,
            directory=directory,
            baseline=baseline,
            precision="fp8",
            console="off",
        )
        self._collector = scenarios.collect(self.run, self.stream)
        self.ends: list[float] = []

    @property
    def is_over(self) -> bool:
        return len(self.ends) >= self._calm_steps + scenarios.FAULTY_STEPS

    def step(self) -> None:
        """Make one step, and note its end."""
        self._collector.at = len(self.ends) - self._calm_steps
        with self.run.step() as step:
            step.log(self.stream.scalars(self._collector.at))
        self.ends.append(time.time())


def make_baseline(url: str, token: str, directory: str) -> None:
    """Record a run that `above_baseline` compares with."""
    import fp8scope

    stream = scenarios.Stream("", 0)
    with fp8scope.init(
        name="baseline", group=scenarios.BASELINE, url=url, token=token, directory=directory, console="off"
    ) as run:
        for _ in range(scenarios.CALM_STEPS + FAULTS_OVER + scenarios.FAULTY_STEPS):
            with run.step() as step:
                step.log(stream.scalars(-1))


@contextmanager
def receiver(arrivals: dict[str, float]) -> Iterator[str]:
    """A webhook that notes when the first notice of each run arrives."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            now = time.time()
            notice = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            for alert in notice.get("alerts", [notice]):
                arrivals.setdefault(alert["run"], now)
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def measure(runs: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start an installation and stream `runs` runs at once to it. Returns the lines of its figures."""
    import psutil

    from fp8scope_dashboard.servers.supervisor import Supervisor

    arrivals: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory() as directory,
        receiver(arrivals) as hook,
        Supervisor(Path(directory) / "up", port=0) as supervisor,
    ):
        settings = [hook, options.rules, scenarios.SHORT_PAST, scenarios.OF_KIND]
        tokens = json.loads(_in_installation(supervisor, PREPARE, json.dumps(settings)))
        if "above_baseline" in tokens:
            make_baseline(supervisor.url, tokens["above_baseline"], str(Path(directory) / "spool"))
        psutil.cpu_percent()
        before, times = cpu_seconds(supervisor), os.times()
        ends, steps, seconds = _stream(supervisor.url, tokens, Path(directory), runs, options)
        machine = psutil.cpu_percent() / 100.0 * (os.cpu_count() or 1)
        after, ended = cpu_seconds(supervisor), os.times()
        _wait_for([run for _, run, _ in ends], arrivals)
        stored, alerts = json.loads(_in_installation(supervisor, STORED))
    delays = [_delays(kind, run, at, alerts.get(run), arrivals.get(run)) for kind, run, at in ends]
    streaming = ended.children_user + ended.children_system - times.children_user - times.children_system
    load = {
        "steps_per_s": round(steps / seconds, 1),
        "batches_per_s": round(stored / seconds, 1),
        "installation_cpu": round((sum(after.values()) - sum(before.values())) / seconds, 2),
        "runs_cpu": round(streaming / seconds, 2),
        "machine_cpu": round(machine, 2),
    }
    lines = [_figures(rule, [each for each in delays if each["rule"] == rule]) for rule in options.rules]
    return [{**line, "runs": runs} for line in (*lines, {**_figures("all", delays), **load})]


def _stream(
    url: str, tokens: Mapping[str, str], directory: Path, runs: int, options: argparse.Namespace
) -> tuple[list[tuple[str, str, list[float]]], int, float]:
    """Stream all runs. Returns rule, run and ends of the steps of each; all steps; and the seconds."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    # With many runs at once each is one rule's; with few, each has all rules, one after the other.
    order = [rule for _ in range(options.passes) for rule in options.rules]
    order += (
        options.rules * (max(0, runs - len(order)) // len(options.rules) + 1) if runs > len(order) else []
    )
    parts = [order[first::runs] for first in range(runs)]
    count = min(options.processes, runs)
    rate = options.rate if runs == 1 else options.rate_of_many
    trainers = [
        context.Process(
            target=play,
            args=(url, tokens, str(directory / f"spool {i}"), parts[i::count], rate, results),
            daemon=True,
        )
        for i in range(count)
    ]
    for trainer in trainers:
        trainer.start()
    ends: list[tuple[str, str, list[float]]] = []
    steps, seconds, ended = 0, 0.0, 0
    while ended < count:
        with suppress(queue.Empty):
            message = results.get(timeout=1.0)
            if message[0] == ENDED:
                ends.append(message[1:])
            else:
                steps, seconds, ended = steps + message[1], max(seconds, message[2]), ended + 1
        if not ended and not any(trainer.is_alive() for trainer in trainers):
            raise RuntimeError("The processes that stream the runs have failed.")
    for trainer in trainers:
        trainer.join()
    return ends, steps, seconds


def _wait_for(runs: Sequence[str], arrivals: Mapping[str, float]) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and not all(run in arrivals for run in runs):
        time.sleep(0.2)


def _delays(
    kind: str, run: str, ends: Sequence[float], alert: Sequence[Any] | None, arrived: float | None
) -> dict[str, Any]:
    """The seconds from the end of the deciding step until the stages of an alert; None if it is missing."""
    if alert is None or arrived is None or not 1 <= alert[0] <= len(ends):
        return {"rule": kind, "arrived": None, "opened": None, "stored": None}
    step, opened, received = alert
    end = ends[step - 1]
    stored = None if received is None else received - end
    return {"rule": kind, "arrived": arrived - end, "opened": opened - end, "stored": stored}


def _figures(rule: str, delays: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    arrived, opened, stored = (
        sorted(each[stage] for each in delays if each[stage] is not None)
        for stage in ("arrived", "opened", "stored")
    )
    return {
        "rule": rule,
        "runs": 0,
        "alerts": len(arrived),
        "missing": len(delays) - len(arrived),
        "p50_s": _quantile(arrived, 0.50),
        "p95_s": _quantile(arrived, 0.95),
        "max_s": _quantile(arrived, 1.0),
        "opened_p50_s": _quantile(opened, 0.50),
        "opened_p95_s": _quantile(opened, 0.95),
        "stored_p95_s": _quantile(stored, 0.95),
    }


def _in_installation(supervisor: Any, script: str, *arguments: str) -> str:
    environment = {**os.environ, **supervisor.environment}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def _quantile(ascending: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of the values does not exceed; None without values."""
    return round(ascending[max(0, math.ceil(share * len(ascending)) - 1)], 3) if ascending else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 50])
    parser.add_argument("--passes", type=int, default=2, help="runs of each rule, at least")
    parser.add_argument("--rate", type=float, default=20.0, help="steps of each run in a second")
    parser.add_argument("--rate-of-many", type=float, default=10.0, help="the same with several runs at once")
    parser.add_argument("--processes", type=int, default=2, help="that the runs are spread over")
    parser.add_argument("--rules", nargs="+", default=list(scenarios.KINDS), choices=scenarios.KINDS)
    options = parser.parse_args()
    for runs in options.runs:
        for line in measure(runs, options):
            print(json.dumps({"benchmark": "alert_latency", "cpus": os.cpu_count(), **line}), flush=True)


if __name__ == "__main__":
    main()
