"""Measures what the anatomy of a step costs, and how much of a step's time it does not account for.

    python benchmarks/anatomy.py [--pairs 2000]

Trains a GPT of about 0.4M parameters on the CPU with one thread, from a `DataLoader`, with a collective in
every step and a checkpoint in every 50th. Steps with the anatomy and steps without it follow each other in
random order within one run: without it, the functions of torch are those of torch, the phases are not
interrupted, and nothing is divided. Everything else of the agent measures in both.

Prints one JSON line. `ratio`: the thread's CPU time of a step with the anatomy over that of a step without
it, the median over pairs of neighbours; `ratio_error`: its standard error, by bootstrap. `unaccounted`: the
relative difference between the sum of all parts of 200 steps and their time by another clock; `worst_step`:
the largest one of a single step, which other load of the machine between two readings makes large. `rest`:
the share of the part that is nothing else. `step_ms`: the median CPU time of a step without the anatomy.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from fp8scope.demo.model import ByteGpt, Shape
from fp8scope.guard import Guard
from fp8scope.observe.timing import Measures, StepMeasurements, clock, interruptions
from fp8scope.observe.timing.anatomy import PARTS, PartTimes, scalar_of

SHAPE = Shape(layers=2, width=128, heads=4, context=64)
BATCH = 8
SAVED_EVERY = 50
RESAMPLES = 2000


class Undivided(PartTimes):
    """Divides nothing: the steps without the anatomy."""

    def interval(self, part: int, seconds: float) -> None:
        """Add nothing."""


class Training:
    """A model, its optimizer, its data and its measures."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = ByteGpt(SHAPE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.path = folder / "weights.pt"
        self.text = TensorDataset(torch.randint(0, 256, (64 * BATCH, SHAPE.context + 1)))
        self.batches = self._batches()
        self.measures = Measures(Guard())
        self.measures.watch(self.model, self.optimizer)
        self.steps = 0

    def _batches(self) -> Iterator[Tensor]:
        while True:
            for (batch,) in DataLoader(self.text, batch_size=BATCH):
                yield batch

    def step(self) -> StepMeasurements:
        """Make one step; returns its measurements."""
        self.steps += 1
        self.measures.begin()
        text = next(self.batches)
        logits = self.model(text[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        dist.all_reduce(torch.ones(1))
        self.optimizer.step()
        if self.steps % SAVED_EVERY == 0:
            torch.save(self.model.state_dict(), self.path)
        reading = self.measures.end({})
        assert reading is not None
        return reading


def set_anatomy(training: Training, on: bool) -> None:
    """Switch the anatomy on or off, between two steps."""
    watch = training.measures._watch
    assert watch is not None
    if on:
        interruptions.listen(watch)
        interruptions.listen_to_collectives()
    else:
        interruptions.stop(watch)
    clock.PartTimes = PartTimes if on else Undivided  # type: ignore[attr-defined]
    # The parts of the step that begins.
    training.measures.restart()


def paired(training: Training, pairs: int) -> tuple[list[float], float]:
    """Return the ratios of CPU time, with over without, of steps in pairs, and the median without."""
    ratios, without = [], []
    for _ in range(pairs):
        seconds = {}
        for on in random.sample((True, False), 2):
            set_anatomy(training, on)
            # The checkpoint, which is long and varies, would hide what is measured.
            training.steps = 0
            began = time.thread_time()
            training.step().read()
            seconds[on] = time.thread_time() - began
        ratios.append(seconds[True] / seconds[False])
        without.append(seconds[False])
    return ratios, statistics.median(without)


def unaccounted(training: Training, steps: int) -> dict[str, float]:
    """Compare the parts of the anatomy with the time of the steps by another clock."""
    set_anatomy(training, True)
    worst, summed, rest = 0.0, 0.0, 0.0
    first = began = time.perf_counter()
    training.steps = 0
    for _ in range(steps):
        reading = training.step()
        ended = time.perf_counter()
        scalars = reading.read()
        parts = {name: scalars.get(scalar_of(name), 0.0) for name in PARTS}
        worst = max(worst, abs(sum(parts.values()) / (ended - began) - 1))
        summed, rest, began = summed + sum(parts.values()), rest + parts["rest"], ended
    whole = began - first
    return {
        "unaccounted": round(abs(summed / whole - 1), 5),
        "worst_step": round(worst, 5),
        "rest": round(rest / whole, 5),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2000)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
        training = Training(Path(folder))
        paired(training, 5)
        ratios, seconds = paired(training, pairs)
        sums = unaccounted(training, 4 * SAVED_EVERY)
        dist.destroy_process_group()
    medians = [statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)]
    print(
        json.dumps(
            {
                "benchmark": "anatomy",
                "ratio": round(statistics.median(ratios), 5),
                "ratio_error": round(statistics.stdev(medians), 5),
                **sums,
                "step_ms": round(1000 * seconds, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
