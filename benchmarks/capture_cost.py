"""Times a call of a tracker alone and while it is captured: `python benchmarks/capture_cost.py TRACKER`.

A loop trains a small model, and calls the tracker once a step, with `VALUES` values, between its optimizer's
step and the next forward pass. Blocks of steps with and without capture take turns. The ratio is that of the
lower quartiles, which other work on the machine moves less than the medians.
Prints one line of JSON. `capture.py` runs it in a folder of its own.
"""

import argparse
import json
import logging
import statistics
import sys
from collections.abc import Callable
from time import perf_counter

import torch
from torch import nn

import fp8scope
from fp8scope.capture import active

BLOCKS, STEPS = 12, 100
VALUES = 4
Log = Callable[[dict[str, float], int], object]


def wandb_log() -> Log:
    import wandb

    wandb.init(project="cost")
    return lambda values, step: wandb.log(values, step=step)


def tensorboard_log() -> Log:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter("runs")

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log


def mlflow_log() -> Log:
    import mlflow

    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    mlflow.start_run()
    return lambda values, step: mlflow.log_metrics(values, step=step)


def trackio_log() -> Log:
    import trackio

    trackio.init(project="cost")
    return lambda values, step: trackio.log(values, step=step)


def lightning_log() -> Log:
    from lightning.fabric import Fabric
    from lightning.fabric.loggers import CSVLogger

    fabric = Fabric(accelerator="cpu", loggers=[CSVLogger(".")])
    return lambda values, step: fabric.log_dict(values, step=step)


def accelerate_log() -> Log:
    from accelerate import Accelerator

    accelerator = Accelerator(log_with="tensorboard", project_dir=".", cpu=True)
    accelerator.init_trackers("cost")
    return lambda values, step: accelerator.log(values, step=step)


LOGS: dict[str, Callable[[], Log]] = {
    "wandb": wandb_log,
    "tensorboard": tensorboard_log,
    "mlflow": mlflow_log,
    "trackio": trackio_log,
    "lightning": lightning_log,
    "accelerate": accelerate_log,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tracker", choices=LOGS)
    tracker = parser.parse_args().tracker
    logging.getLogger("fp8scope").setLevel(logging.ERROR)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    run = fp8scope.attach(model, optimizer, mode="offline", directory="spool", capture="none")
    log = LOGS[tracker]()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    step = 0
    for block in range(BLOCKS):
        capture = active.start([tracker, "tensorboard"]) if block % 2 else None
        if capture is not None:
            capture.bind(run)
        for _ in range(STEPS):
            loss = model(torch.randn(8, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values = {f"value/{index}": loss.item() + index for index in range(VALUES)}
            began = perf_counter()
            log(values, step)
            seconds[capture is not None].append(perf_counter() - began)
            step += 1
        if capture is not None:
            active.stop(capture)
    captured, alone = (statistics.quantiles(seconds[side], n=4)[0] for side in (True, False))
    print(
        json.dumps(
            {
                "tracker": tracker,
                "alone_us": round(alone * 1e6, 1),
                "captured_us": round(captured * 1e6, 1),
                "ratio": round(captured / alone, 3),
            }
        )
    )
    run.finish()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
