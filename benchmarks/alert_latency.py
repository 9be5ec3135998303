"""Measure how soon an alert arrives. Prints one JSON line for each number of runs.

    python benchmarks/alert_latency.py [--runs 1 10 50] [--alerts 60] [--rate 10] [--processes 2]

Starts an installation (`fp8scope up` with its defaults: web, worker, beat, PostgreSQL with fsync, Redis) with
a webhook on this machine. Runs of the real agent stream `--rate` steps a second, each with four scalars;
`--runs` runs stream at once, spread over `--processes` processes that share the cores of this machine with
the installation. At random steps a loss is NaN. Figures:

    runs                runs that stream at once
    alerts, lost        alerts that arrived, and that did not within 60 s; each faulty step raises one
    p50_s, p95_s, max_s from the end of the faulty step in the training process to the webhook's arrival
    opened_p50_s, opened_p95_s
                        of this, until the detectors opened the alert
    steps_per_s         steps that all runs made in a second
    batches_per_s       messages that the server stored in a second
    installation_cpu    cores that the installation used on average, while the runs streamed; and by process
    runs_cpu            cores that the runs used
    machine_cpu         cores of the machine that were busy, with the runs and whatever else it does
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
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

# So many finite losses end the alert; the next one needs some more.
CALM_STEPS = 25
# Of a calm run, in each step.
FAULT_PROBABILITY = 0.1
# With one run the faults come one after the other, so there are fewer.
MOST_FAULTS = 20
WARM_UP = 5.0
PATIENCE = 60.0
FAULT, STEPS = "fault", "steps"
# Unix seconds, by run.
Times = defaultdict[str, list[float]]

# Run with the servers' settings: waits for the workers, and makes a project with a webhook; prints its token.
PREPARE = """
import sys
import django; django.setup()
from fp8scope_dashboard.celery import app
while len(app.control.ping(timeout=2.0)) < 2:
    pass
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.accounts.services import create_project, create_token
from fp8scope_dashboard.alerts.models import Channel
from fp8scope_dashboard.db.encryption import encrypt_json
project = Project.objects.filter(slug='default').first() or create_project('default', 'Default')
Channel.objects.create(
    project=project, name='benchmark', sealed=encrypt_json({'url': sys.argv[1]}), per_minute=600
)
print(create_token(project, 'benchmark', scopes=('write', 'read'))[1])
"""
# Prints the number of stored messages, and when the alerts of each run opened, in Unix seconds.
STORED = """
import json
from collections import defaultdict
import django; django.setup()
from fp8scope_dashboard.alerts.models import HistoryEntry
from fp8scope_dashboard.receipts.models import Receipt
opened = defaultdict(list)
entries = HistoryEntry.objects.filter(event__kind='loss_not_finite', kind__in=('opened', 'reopened'))
for run, at in entries.order_by('id').values_list('event__run', 'at'):
    opened[str(run)].append(at.timestamp())
print(json.dumps([Receipt.objects.count(), opened]))
"""


def train(
    url: str, token: str, directory: str, runs: int, rate: float, faults: int, stop: Any, results: Any
) -> None:
    """Stream `runs` runs until `stop` is set; puts the run, the step and the end of each faulty step."""
    import fp8scope

    streaming = [
        fp8scope.init(name=f"run {i}", url=url, token=token, directory=directory) for i in range(runs)
    ]
    calm = [0] * runs
    left = [faults] * runs
    begin, steps = time.monotonic(), 0
    parent = os.getppid()
    while not stop.is_set() and os.getppid() == parent:
        for i, run in enumerate(streaming):
            ready = time.monotonic() - begin > WARM_UP and calm[i] > CALM_STEPS and left[i]
            is_faulty = ready and random.random() < FAULT_PROBABILITY
            with run.step(128):
                loss = float("nan") if is_faulty else 2.0 + random.gauss(0.0, 0.01)
                run.log(loss=loss, lr=1e-4, grad_norm=1.0, throughput=1e5)
            ended = time.time()
            calm[i] = 0 if is_faulty else calm[i] + 1
            if is_faulty:
                left[i] -= 1
                results.put((FAULT, run.id, ended))
        steps += 1
        time.sleep(max(0.0, begin + steps / rate - time.monotonic()))
    results.put((STEPS, steps * runs, time.monotonic() - begin))
    for run in streaming:
        run.finish(10.0)


@contextmanager
def receiver(arrivals: Times) -> Iterator[str]:
    """A webhook that notes when the notices of each run arrive, for the first time."""
    seen: set[str] = set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            now = time.time()
            notice = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            for each in notice.get("alerts", [notice]):
                if each["kind"] == "loss_not_finite" and each["key"] not in seen:
                    seen.add(each["key"])
                    arrivals[each["run"]].append(now)
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


def measure(runs: int, options: argparse.Namespace) -> dict[str, Any]:
    """Start an installation and stream `runs` runs to it."""
    import psutil

    from fp8scope_dashboard.servers.supervisor import Supervisor

    arrivals: Times = defaultdict(list)
    faults: Times = defaultdict(list)
    with (
        tempfile.TemporaryDirectory() as directory,
        receiver(arrivals) as hook,
        Supervisor(Path(directory) / "up", port=0) as supervisor,
    ):
        token = _in_installation(supervisor, PREPARE, hook)
        psutil.cpu_percent()
        before = _cpu_seconds(supervisor)
        times = os.times()
        steps, seconds = _stream(supervisor.url, token, Path(directory), runs, options, faults, arrivals)
        machine = psutil.cpu_percent() / 100.0 * (os.cpu_count() or 1)
        after = _cpu_seconds(supervisor)
        installation = {name: round((after[name] - before[name]) / seconds, 2) for name in after}
        ended = os.times()
        streaming = ended.children_user + ended.children_system - times.children_user - times.children_system
        stored, opened = json.loads(_in_installation(supervisor, STORED))
    delays, until_opened = _delays(faults, arrivals), _delays(faults, opened)
    return {
        "runs": runs,
        "alerts": len(delays),
        "lost": _count(faults) - len(delays),
        "p50_s": _quantile(delays, 0.50),
        "p95_s": _quantile(delays, 0.95),
        "max_s": _quantile(delays, 1.0),
        "opened_p50_s": _quantile(until_opened, 0.50),
        "opened_p95_s": _quantile(until_opened, 0.95),
        "steps_per_s": round(steps / seconds, 1),
        "batches_per_s": round(stored / seconds, 1),
        "installation_cpu": round(sum(installation.values()), 2),
        **{f"{name}_cpu": cores for name, cores in installation.items()},
        "runs_cpu": round(streaming / seconds, 2),
        "machine_cpu": round(machine, 2),
    }


def _stream(
    url: str,
    token: str,
    directory: Path,
    runs: int,
    options: argparse.Namespace,
    faults: Times,
    arrivals: Times,
) -> tuple[int, float]:
    """Stream until all alerts have arrived. Returns the steps of all runs and the seconds."""
    context = multiprocessing.get_context("spawn")
    stop, results = context.Event(), context.Queue()
    count = min(options.processes, runs)
    shares = [runs // count + (i < runs % count) for i in range(count)]
    each = min(MOST_FAULTS, -(-options.alerts // runs))
    trainers = [
        context.Process(
            target=train,
            args=(url, token, str(directory / f"spool {i}"), share, options.rate, each, stop, results),
            daemon=True,
        )
        for i, share in enumerate(shares)
    ]
    for trainer in trainers:
        trainer.start()
    steps, seconds, ended = 0, 0.0, 0
    progress, changed_at = (0, 0), time.monotonic()
    while ended < count:
        with suppress(queue.Empty):
            while message := results.get(timeout=0.2):
                if message[0] == FAULT:
                    faults[message[1]].append(message[2])
                else:
                    steps, seconds, ended = steps + message[1], max(seconds, message[2]), ended + 1
        if progress != (progress := (_count(faults), _count(arrivals))):
            changed_at = time.monotonic()
        if progress[1] == runs * each or time.monotonic() > changed_at + WARM_UP + PATIENCE:
            stop.set()
    for trainer in trainers:
        trainer.join()
    return steps, seconds


def _delays(faults: Times, events: Mapping[str, list[float]]) -> list[float]:
    """The seconds from each fault to its event, ascending."""
    # The next fault of a run is later than the alert of the one before.
    pairs = [pair for run, ends in faults.items() for pair in zip(ends, events.get(run, ()), strict=False)]
    return sorted(event - end for end, event in pairs)


def _count(times: Times) -> int:
    return sum(map(len, times.values()))


def _cpu_seconds(supervisor: Any) -> dict[str, float]:
    """CPU seconds of the installation's living processes, by name."""
    import psutil

    totals: dict[str, float] = {}
    for name, pid in supervisor.pids().items():
        server = psutil.Process(pid)
        totals[name] = 0.0
        for process in (server, *server.children(recursive=True)):
            with suppress(psutil.Error):
                times = process.cpu_times()
                totals[name] += times.user + times.system
    return totals


def _in_installation(supervisor: Any, script: str, *arguments: str) -> str:
    environment = {**os.environ, **supervisor.environment}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def _quantile(ascending: list[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return round(ascending[max(0, math.ceil(share * len(ascending)) - 1)], 3) if ascending else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 10, 50])
    parser.add_argument("--alerts", type=int, default=60, help="faulty steps, 1 to 20 in each run")
    parser.add_argument("--rate", type=float, default=10.0, help="steps of each run in a second")
    parser.add_argument("--processes", type=int, default=2, help="that the runs are spread over")
    options = parser.parse_args()
    for runs in options.runs:
        figures = measure(runs, options)
        print(json.dumps({"benchmark": "alert_latency", "cpus": os.cpu_count(), **figures}), flush=True)


if __name__ == "__main__":
    main()
