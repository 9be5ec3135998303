"""How many runs, tensors and ranks one server takes, and what to add next; see docs/scale.md.

    python benchmarks/scale.py [--seconds 8] [--cores 8] [--bytes-per-point 1.7]
    python benchmarks/scale.py --fleet RUNS RANKS TENSORS [--step-seconds 1] [--interval 1] [--every 1]

First measures the processor time of messages of several sizes on an installation (`fp8scope up`), and fits
what a message and each of its values take (`fixed_ms`, `point_us`, by part). Then checks the simulation: the
same installation gets random messages at shares of the rate that the fit says it can take, and a queue of the
fitted times predicts how long they wait. At last prints a line for each fleet, or for the one that is named.

    rate, busy              messages per second, and the share of all cores that they should keep busy
    measured_p50, p99_ms    from sending to acknowledgement; simulated_... what the queue predicts
    busy_measured           the share of all cores that the installation did keep busy
    <part>_cores            cores that a fleet keeps busy; cores_planned with a third in reserve
    connections, gib_a_day  of PostgreSQL; stored values a day
    add                     what one machine with --cores cores needs first

Sender and server share the cores, so the sender's own time counts as a part.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from message_cost import SCALARS, STATISTICS, Run, measure
from processor_time import cpu_seconds
from scale_model import PARTS, Constants, Fleet, demand, fitted, percentile, simulate

LOADS = ((1, 30), (1, 300), (4, 1000), (10, 1000))
"""Steps and tensors of a message."""
SHARES = (0.3, 0.6)
SENDERS = 12
FLEETS = (
    Fleet("one GPU: 4 runs x 250 tensors", 4, 1, 250),
    Fleet("a node: 8 runs x 8 ranks x 500 tensors", 8, 8, 500),
    Fleet("a team: 40 runs x 16 ranks x 1,000 tensors", 40, 16, 1000, step_seconds=2.0, interval=5.0),
    Fleet(
        "1,000 ranks x 2,000 tensors, every 10th step",
        1,
        1000,
        2000,
        step_seconds=5.0,
        interval=30.0,
        every=10,
    ),
    Fleet(
        "10,000 ranks x 2,000 tensors, every 10th step",
        1,
        10_000,
        2000,
        step_seconds=5.0,
        interval=50.0,
        every=10,
    ),
    Fleet("10,000 ranks x 2,000 tensors, every step", 1, 10_000, 2000, step_seconds=5.0, interval=10.0),
)


def constants_of(supervisor: Any, token: str, options: argparse.Namespace) -> Constants:
    """Measure messages of several sizes and fit what each part takes."""
    loads = []
    for steps, tensors in LOADS:
        load = measure(supervisor, token, steps, tensors, options)
        loads.append({**load, "points": steps * (tensors * len(STATISTICS) + SCALARS)})
    return fitted(loads, options.bytes_per_point)


def check(supervisor: Any, token: str, constants: Constants, share: float, seconds: float) -> dict[str, Any]:
    """Send random messages that should keep `share` of the cores busy; returns figures and predictions."""
    steps, tensors = 1, 300
    points = steps * (tensors * len(STATISTICS) + SCALARS)
    runs = [Run(supervisor.port, token, tensors) for _ in range(SENDERS)]
    for run in runs:
        run.register()
    services = {part: constants.service_ms(part, points) for part in PARTS}
    cores = os.cpu_count() or 1
    rate = share * cores * 1000 / sum(services.values())
    bodies = [run.bodies(int(1.6 * rate * seconds / SENDERS) + 2, steps) for run in runs]
    waits, own, busy = send_at_random(supervisor, runs, bodies, rate, seconds)
    chain = [services["web"] + own, services["postgres"], services["redis"]]
    # What comes after the answer takes cores from what comes before it.
    shared = 1 / max(0.05, 1 - share * services["jobs"] / sum(services.values()))
    predicted = simulate([ms * shared for ms in chain], [1, cores, 1], rate, 60.0)
    return {
        "check": f"{share:.0%} of {cores} cores",
        "rate": round(rate, 1),
        "busy": share,
        "busy_measured": round(busy / seconds / cores, 2),
        "measured_p50_ms": round(percentile(waits, 0.5), 1),
        "simulated_p50_ms": round(percentile(predicted, 0.5), 1),
        "measured_p99_ms": round(percentile(waits, 0.99), 1),
        "simulated_p99_ms": round(percentile(predicted, 0.99), 1),
    }


def send_at_random(
    supervisor: Any, runs: list[Run], bodies: list[list[bytes]], rate: float, seconds: float
) -> tuple[list[float], float, float]:
    """Send for some seconds; returns the waits, the sender's ms of a message, and the server's seconds."""
    due: Queue[float] = Queue()
    waits: list[float] = []
    drawn = random.Random(0)
    end = time.monotonic() + seconds

    def sender(run: Run, mine: list[bytes]) -> None:
        while mine:
            try:
                at = due.get(timeout=1.0)
            except Empty:
                return
            run.send(mine.pop(0))
            waits.append(1000 * (time.monotonic() - at))

    threads = [threading.Thread(target=sender, args=pair) for pair in zip(runs, bodies, strict=True)]
    before, own = cpu_seconds(supervisor), time.process_time()
    for thread in threads:
        thread.start()
    at = time.monotonic()
    while at < end:
        time.sleep(max(0.0, at - time.monotonic()))
        due.put(at)
        at += drawn.expovariate(rate)
    for thread in threads:
        thread.join()
    own = 1000 * (time.process_time() - own) / max(1, len(waits))
    return waits, own, sum(cpu_seconds(supervisor).values()) - sum(before.values())


def main() -> None:
    options = arguments()
    sys.path.insert(0, str(Path(__file__).parent))
    from chaos import make_token

    from fp8scope_dashboard.servers.supervisor import Supervisor

    with tempfile.TemporaryDirectory() as directory, Supervisor(Path(directory) / "up", port=0) as supervisor:
        token = make_token(supervisor)
        constants = constants_of(supervisor, token, options)
        fits = {"fixed_ms": rounded(constants.fixed_ms), "point_us": rounded(constants.point_us)}
        print(json.dumps({"benchmark": "scale", "cpus": os.cpu_count(), **fits}), flush=True)
        for share in SHARES:
            print(json.dumps(check(supervisor, token, constants, share, options.seconds)), flush=True)
    fleets: tuple[Fleet, ...] = FLEETS
    if options.fleet:
        runs, ranks, tensors = options.fleet
        rest = {"step_seconds": options.step_seconds, "interval": options.interval, "every": options.every}
        fleets = (Fleet(f"{runs} runs x {ranks} ranks x {tensors} tensors", runs, ranks, tensors, **rest),)
    for fleet in fleets:
        print(json.dumps(demand(fleet, constants, options.cores).line()), flush=True)


def rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in figures.items()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument(
        "--rate", type=float, default=30.0, help="messages per second while constants are measured"
    )
    parser.add_argument("--runs", type=int, default=10, help="runs that send while constants are measured")
    parser.add_argument(
        "--cores", type=int, default=8, help="cores of the machine that fleets are planned for"
    )
    parser.add_argument("--bytes-per-point", type=float, default=1.7, help="see benchmarks/storage.py")
    parser.add_argument("--fleet", type=int, nargs=3, metavar=("RUNS", "RANKS", "TENSORS"))
    parser.add_argument("--step-seconds", type=float, default=1.0)
    parser.add_argument("--interval", type=float, default=1.0, help="FP8SCOPE_INTERVAL")
    parser.add_argument("--every", type=int, default=1, help="statistics in every n-th step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
