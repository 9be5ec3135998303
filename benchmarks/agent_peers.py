"""What logging 1,000 values a step costs the training thread with other trackers; part of agent_overhead.py.

    python benchmarks/agent_peers.py {wandb,trackio,mlflow,tensorboard} DIRECTORY STEPS

Runs with that tracker installed, and torch. Each is used the way its users would, writing locally. Prints one
JSON line: microseconds a step on the training thread, the median, `tight` (step after step), `paced` (10 ms
of small matrix products before each) and `cold` (after a training step that has filled the caches with other
things).
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
    """A step of training, about 30 ms: the caches hold other things after it."""

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
    """Microseconds that `log(step)` takes: medians of `steps` in a row, and of COLD_STEPS after
    10 ms of small products and after a step of training.

    `before(step)` is called before each, and not timed.
    """
    work: dict[str, Callable[[], object]] = {"tight": lambda: None, "paced": products, "cold": TrainingStep()}
    found, step = {}, 0
    for kind, count in (("tight", steps), ("paced", COLD_STEPS), ("cold", COLD_STEPS)):
        times = []
        for _ in range(count):
            before(step)
            work[kind]()
            times.append(_timed(log, step))
            step += 1
        found[kind] = statistics.median(times) * 1e6
        time.sleep(1.0)
    return found


def products() -> None:
    """10 ms of small matrix products: what logging needs may stay in the caches."""
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
    """What is logged at a step."""
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
    # What it still has to write at the end takes minutes: the process is ended without.
    return _prepared(lambda step, values: mlflow.log_metrics(values, step=step, synchronous=False)), _end


def use_tensorboard(directory: Path) -> tuple[Log, Callable[[], Any]]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(directory))

    def log(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return _prepared(log), writer.close


def _prepared(log: Callable[[int, dict[str, float]], Any]) -> Log:
    """The values come from a small set of dictionaries made beforehand: making them is not logging."""
    ready = [values_of(step) for step in range(16)]
    return lambda step: log(step, ready[step % 16])


def _end() -> None:
    sys.stdout.flush()
    os._exit(0)


PEERS = {"wandb": use_wandb, "trackio": use_trackio, "mlflow": use_mlflow, "tensorboard": use_tensorboard}


def main() -> None:
    name, directory, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    log, end = PEERS[name](directory)
    found = measure(log, steps)
    print(json.dumps(found), flush=True)
    end()


if __name__ == "__main__":
    main()
