"""What the flight recorder costs a step. Prints one JSON line.

    python benchmarks/flight_recorder.py [--pairs 400] [--seed 0]

An FP8 GPT of 10.9M parameters is watched at every step (75 tensors, 7 statistics) and sends to a sink in
another process. The recorder is switched off in one step of every pair of neighbouring steps, at random in
the first or in the second: same process, same model, same memory. A step's cost is the CPU time of the
training thread and of the recorder's calls on other threads, so that steps that wait for a processor cost no
more. 400 pairs take less than four minutes on a quiet machine.

    ratio            1 + the median over the pairs of (cost with - cost without), over the median cost without
    ratio_low, ratio_high
                     its 95 % interval, by bootstrap over the pairs
    decided          'at most 1.005' or 'above 1.005' if the interval is on one side of it, else null
    wall_ratio       as `ratio`, of the wall clock
    calls_share      CPU time within the recorder's own calls, on all threads, over a step without it
    calls_us         CPU microseconds of these calls per step
    batches_us       microseconds to draw a batch by run.batches with run.allow_snapshots, without a snapshot
    snapshot_ms      a snapshot of model and optimizer, the median
    ring_bytes       memory of the kept rows, full
    step_ms          median cost of a step without the recorder
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from agent_overhead import BATCH, EVERY, SHAPE, Gpt, sink
from numpy.typing import NDArray

import fp8scope

WARM_UP = 5
RESAMPLES = 2000
LIMIT = 1.005
FULL = 256
"""Steps after which the ring is full."""
DRAWS = 200


class Trained:
    """A model and its run; `step` takes a step with the recorder or without it."""

    def __init__(self, url: str, directory: str) -> None:
        os.environ["FP8SCOPE_FLIGHT_STEPS"] = str(FULL)
        self.gpt = Gpt()
        self.run = fp8scope.init(name="flight recorder", url=url, token="x", directory=directory)
        self.run.watch(self.gpt.model, self.gpt.optimizer, every=EVERY)
        self.calls = 0.0
        """CPU seconds within the recorder's calls."""
        self.elsewhere = 0.0
        """Those of them that were not on the training thread."""
        flight: Any = self.run.flight
        flight.step_ends = self._timed(flight.step_ends, elsewhere=False)
        flight.keep_row = self._timed(flight.keep_row, elsewhere=True)

    def _timed(self, call: Callable[[Any], None], *, elsewhere: bool) -> Callable[[Any], None]:
        def timed(argument: Any) -> None:
            began = time.thread_time()
            call(argument)
            took = time.thread_time() - began
            self.calls += took
            if elsewhere:
                self.elsewhere += took

        return timed

    def step(self, recorded: bool) -> tuple[float, float]:
        """Train one step; returns the seconds of CPU and of the wall clock."""
        steps = self.run.session.steps
        steps.flight = self.run.flight if recorded else None
        elsewhere = self.elsewhere
        began, cpu = time.perf_counter(), time.thread_time()
        with self.run.step(tokens=BATCH * SHAPE.context) as step:
            step.log(loss=self.gpt.train())
        cpu = time.thread_time() - cpu
        wall = time.perf_counter() - began
        # The row is kept on another thread: let it come before the next step.
        steps.pipeline.settle()
        return cpu + self.elsewhere - elsewhere, wall


def paired(trained: Trained, pairs: int) -> NDArray[np.float64]:
    """Float64 [pairs, 2, 2]: without the recorder and with it; seconds of CPU and of the wall clock."""
    for turn in range(WARM_UP):
        trained.step(turn % 2 == 0)
    measured = np.zeros((pairs, 2, 2))
    number = WARM_UP
    for pair in range(pairs):
        # A sampled step is another than its neighbour.
        while {number % EVERY, (number + 1) % EVERY} & {0}:
            trained.step(False)
            number += 1
        order = [0, 1]
        random.shuffle(order)
        for recorded in order:
            measured[pair, recorded] = trained.step(bool(recorded))
        number += 2
    return measured


def ratio_of(without: NDArray[np.float64], with_it: NDArray[np.float64]) -> tuple[float, float, float]:
    """The ratio, and its 95 % interval."""
    chance = np.random.default_rng(0)
    rows = chance.integers(0, len(without), (RESAMPLES, len(without)))
    more = with_it - without
    resampled = 1.0 + np.median(more[rows], axis=1) / np.median(without[rows], axis=1)
    low, high = np.quantile(resampled, (0.025, 0.975))
    return float(1.0 + np.median(more) / np.median(without)), float(low), float(high)


def decided(low: float, high: float) -> str | None:
    """On which side of LIMIT the interval is."""
    if high <= LIMIT:
        return f"at most {LIMIT}"
    return f"above {LIMIT}" if low > LIMIT else None


def draws(trained: Trained) -> float:
    """Median seconds to draw a batch through `run.batches`, in steps without a snapshot."""
    gpt, run = trained.gpt, trained.run
    run.allow_snapshots(gpt.model, gpt.optimizer, every=10 * DRAWS)

    def endless() -> Iterator[torch.Tensor]:
        while True:
            yield gpt.text

    batches = iter(run.batches(endless()))
    next(batches)
    seconds = []
    for _ in range(DRAWS):
        with run.step():
            pass
        began = time.thread_time()
        next(batches)
        seconds.append(time.thread_time() - began)
    return statistics.median(seconds)


def measure(pairs: int, url: str, directory: str) -> dict[str, Any]:
    trained = Trained(url, directory)
    measured = paired(trained, pairs)
    calls = trained.calls
    cpu, wall = measured[:, :, 0], measured[:, :, 1]
    ratio, low, high = ratio_of(cpu[:, 0], cpu[:, 1])
    ring = trained.run.flight.ring
    figures = {
        "benchmark": "flight_recorder",
        "ratio": round(ratio, 5),
        "ratio_low": round(low, 5),
        "ratio_high": round(high, 5),
        "decided": decided(low, high),
        "wall_ratio": round(ratio_of(wall[:, 0], wall[:, 1])[0], 4),
        "calls_share": round(calls / (pairs + (WARM_UP + 1) // 2) / float(np.median(cpu[:, 0])), 6),
        "calls_us": round(1e6 * calls / (pairs + (WARM_UP + 1) // 2), 1),
        "ring_bytes": ring.nbytes if ring.added >= FULL else None,
        "step_ms": round(1000 * float(np.median(cpu[:, 0])), 2),
        "pairs": pairs,
    }
    figures["batches_us"] = round(1e6 * draws(trained), 1)
    snapshotted = trained.run.flight.trained
    assert snapshotted is not None
    captured = []
    for _ in range(5):
        began = time.perf_counter()
        snapshotted.capture()
        captured.append(time.perf_counter() - began)
    figures["snapshot_ms"] = round(1000 * statistics.median(captured), 1)
    trained.run.finish()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    torch.set_num_threads(1)
    with sink() as url, tempfile.TemporaryDirectory() as directory:
        print(json.dumps(measure(arguments.pairs, url, directory)))


if __name__ == "__main__":
    main()
