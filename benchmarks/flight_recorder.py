"""What the flight recorder costs a step. Prints one JSON line.

    python benchmarks/flight_recorder.py [--pairs 400] [--seed 0]

Three equal FP8 GPTs of 10.9M parameters are watched at every step (75 tensors, 7 statistics) and train in
turns, a step of each in random order. Their runs send to a sink in another process.

    ratio            step time with the recorder (the default) over that without (FP8SCOPE_FLIGHT_STEPS=0):
                     the median of the ratios of pairs of neighbouring steps
    ratio_error      its standard error, by bootstrap over the pairs
    calls_share      CPU time within the recorder's own calls, on all threads, over the training thread's
                     in a step without the recorder, medians: unlike `ratio`, it is exact on a busy machine
    calls_us         CPU microseconds of these calls per step
    snapshots_ratio  as `ratio`, for run.batches and run.allow_snapshots(every=100) besides, in the steps
                     without a snapshot
    snapshot_ms      a snapshot of model and optimizer, the median
    ring_bytes       memory of the kept rows, full
    step_ms          median step time without the recorder
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

import fp8scope

WARM_UP = 5
RESAMPLES = 1000
KINDS = ("without", "with", "snapshots")
FULL = 260
"""Steps after which the ring is full."""


class Trained:
    """A model, its run, and one step of training at a time."""

    def __init__(self, kind: str, url: str, directory: str) -> None:
        os.environ["FP8SCOPE_FLIGHT_STEPS"] = "0" if kind == "without" else "256"
        self.gpt = Gpt()
        self.run = fp8scope.init(name=kind, url=url, token="x", directory=f"{directory}/{kind}")
        self.run.watch(self.gpt.model, self.gpt.optimizer, every=EVERY)
        self.calls = 0.0
        self.cpu: list[float] = []
        """CPU seconds of the training thread, per step."""
        flight = self.run.flight
        if kind != "without":
            for name in ("step_ends", "keep_row"):
                setattr(flight, name, self._timed(getattr(flight, name)))
        self._batches: Iterator[torch.Tensor] | None = None
        if kind == "snapshots":
            self.run.allow_snapshots(self.gpt.model, self.gpt.optimizer, every=EVERY)
            self._batches = iter(self.run.batches(self._endless()))

    def _endless(self) -> Iterator[torch.Tensor]:
        while True:
            yield self.gpt.text

    def _timed(self, call: Callable[[Any], None]) -> Callable[[Any], None]:
        def timed(argument: Any) -> None:
            began = time.thread_time()
            call(argument)
            self.calls += time.thread_time() - began

        return timed

    def step(self) -> float:
        """Train one step; returns its seconds."""
        began, cpu = time.perf_counter(), time.thread_time()
        if self._batches is not None:
            self.gpt.text = next(self._batches)
        with self.run.step(tokens=BATCH * SHAPE.context) as step:
            step.log(loss=self.gpt.train())
        self.cpu.append(time.thread_time() - cpu)
        return time.perf_counter() - began


def measure(pairs: int, url: str, directory: str) -> dict[str, Any]:
    trained = {kind: Trained(kind, url, directory) for kind in KINDS}
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(-WARM_UP, pairs):
        if turn == 0:
            for each in trained.values():
                each.calls = 0.0
        order = list(KINDS)
        random.shuffle(order)
        for kind in order:
            seconds = trained[kind].step()
            if turn >= 0:
                times[kind].append(seconds)
    without = np.array(times["without"])
    calls = trained["with"].calls / pairs
    # Sampled steps and those with a snapshot are others than their neighbours; they are left out.
    usual = (np.arange(pairs) + WARM_UP) % EVERY != 0
    ratios = {kind: np.array(times[kind])[usual] / without[usual] for kind in KINDS[1:]}
    chance = np.random.default_rng(0)
    resampled = [
        float(np.median(chance.choice(ratios["with"], len(ratios["with"])))) for _ in range(RESAMPLES)
    ]
    captured = []
    snapshotted = trained["snapshots"].run.flight.trained
    assert snapshotted is not None
    for _ in range(5):
        began = time.perf_counter()
        snapshotted.capture()
        captured.append(time.perf_counter() - began)
    ring = trained["with"].run.flight.ring
    median = float(np.median(without))
    figures = {
        "benchmark": "flight_recorder",
        "ratio": round(float(np.median(ratios["with"])), 4),
        "ratio_error": round(float(np.std(resampled)), 4),
        "calls_share": round(calls / statistics.median(trained["without"].cpu), 6),
        "calls_us": round(1e6 * calls, 1),
        "snapshots_ratio": round(float(np.median(ratios["snapshots"])), 4),
        "snapshot_ms": round(1000 * statistics.median(captured), 1),
        "ring_bytes": ring.nbytes if ring.added >= FULL else None,
        "step_ms": round(1000 * median, 2),
        "pairs": pairs,
    }
    for each in trained.values():
        each.run.finish()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    torch.set_num_threads(1)
    with sink() as url, tempfile.TemporaryDirectory() as directory:
        print(json.dumps(measure(arguments.pairs, url, directory)))


if __name__ == "__main__":
    main()
