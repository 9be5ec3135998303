"""The cost of logging 1,000 values a step with other trackers, on the training thread.

    python benchmarks/agent_peers.py {wandb,trackio,mlflow,tensorboard} DIRECTORY STEPS

agent_overhead.py runs it where that tracker and torch are installed. Each tracker is used as its
documentation shows, and writes locally. Prints one JSON line, median microseconds of the training thread per
step:

    tight   step after step
    paced   after 10 ms of small matrix products
    cold    after a training step, which fills the caches with other data
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VALUES = 1000
COLD_STEPS = 60

Log = Callable[[int], None]


class TrainingStep:
    """A training step of about 30 ms; it fills the caches with other data."""

    def __init__(self) -> None:
        import torch
        from torch import nn

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._torch = torch
        self._model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._x = torch.randn(128, 512)

    def __call__(self) -> None:
        loss = self._model(self._x).square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def measure(log: Log, steps: int, before: Log = lambda step: None) -> dict[str, float]:
    """Median microseconds of `log(step)`: of `steps` in a row, of COLD_STEPS that each follow 10 ms of small
    products, and of COLD_STEPS that each follow a training step.

    `before(step)` is called before each of them and is not timed.
    """
    work: dict[str, Callable[[], object]] = {"tight": lambda: None, "paced": products, "cold": TrainingStep()}
    medians, step = {}, 0
    for kind, count in (("tight", steps), ("paced", COLD_STEPS), ("cold", COLD_STEPS)):
        times = []
        for _ in range(count):
            before(step)
            work[kind]()
            times.append(_timed(log, step))
            step += 1
        medians[kind] = statistics.median(times) * 1e6
        time.sleep(1.0)
    return medians


def products() -> None:
    """10 ms of small matrix products; the logger's data may stay in the caches."""
    import torch

    matrix = torch.ones(256, 256)
    end = time.perf_counter() + 0.01
    while time.perf_counter() < end:
        torch.mm(matrix, matrix)


def _timed(log: Log, step: int) -> float:
    began = time.perf_counter()
    log(step)
    return time.perf_counter() - began


def values_of(step: int) -> dict[str, float]:
    """The values of one step."""
    return {f"layer{index}/amax": (step * 31 + index) % 97 / 7 for index in range(VALUES)}


def use_wandb(directory: Path) -> tuple[Log, Callable[[], Any]]:
    import wandb

    run = wandb.init(project="overhead", mode="offline", dir=str(directory))
    return _prepared(lambda step, values: run.log(values, step=step)), run.finish


def use_trackio(directory: Path) -> tuple[Log, Callable[[], Any]]:
    os.environ["TRACKIO_DIR"] = str(directory)
    import trackio

    trackio.init(project="overhead", name="run", embed=False)
    return _prepared(lambda step, values: trackio.log(values, step=step)), trackio.finish


def use_mlflow(directory: Path) -> tuple[Log, Callable[[], Any]]:
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{directory}/mlflow.db")
    mlflow.set_experiment("overhead")
    mlflow.start_run()
    # Writing its queue at the end would take minutes: the process exits without that.
    return _prepared(lambda step, values: mlflow.log_metrics(values, step=step, synchronous=False)), _end


def use_tensorboard(directory: Path) -> tuple[Log, Callable[[], Any]]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(directory))

    def log(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return _prepared(log), writer.close


def _prepared(log: Callable[[int, dict[str, float]], Any]) -> Log:
    """`log` of a step, with values that were made beforehand, so that making them is not timed."""
    ready = [values_of(step) for step in range(16)]
    return lambda step: log(step, ready[step % 16])


def _end() -> None:
    sys.stdout.flush()
    os._exit(0)


PEERS = {"wandb": use_wandb, "trackio": use_trackio, "mlflow": use_mlflow, "tensorboard": use_tensorboard}


def main() -> None:
    name, directory, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    log, end = PEERS[name](directory)
    print(json.dumps(measure(log, steps)), flush=True)
    end()


if __name__ == "__main__":
    main()
