"""Times a call of a tracker alone and while it is captured: `python benchmarks/capture_cost.py TRACKER`.

    python benchmarks/capture_cost.py wandb --media image

A loop trains a small model, and calls the tracker once a step, with `VALUES` values, or with an image, a text
or a table (`--media`), between its optimizer's step and the next forward pass. Blocks of steps with and
without capture take turns; what is captured of one is written out before the next. The ratio is that of the
lower quartiles, which other work on the machine moves less than the medians.
Prints one line of JSON. `capture.py` runs it in a folder of its own.
"""

import argparse
import json
import logging
import os
import statistics
import sys
from collections.abc import Callable
from time import perf_counter

import numpy as np
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
PIXELS = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
TEXT = "Once upon a time there was a model. " * 20
COLUMNS: list[str | int] = ["prompt", "answer", "score"]
ROWS: list[list[object]] = [[f"prompt {row}", TEXT[:100], row / 7] for row in range(20)]
MediaLog = Callable[[str, int], object]
"""Logs an image of 64 x 64, a text of 720 characters, or a table of 20 rows at a step."""


def wandb_media() -> MediaLog:
    import wandb

    wandb.init(project="cost")
    make: dict[str, Callable[[], object]] = {
        "image": lambda: wandb.Image(PIXELS),
        "table": lambda: wandb.Table(columns=COLUMNS, data=ROWS),
    }
    return lambda kind, step: wandb.log({kind: make[kind]()}, step=step)


def tensorboard_media() -> MediaLog:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter("runs")
    log = {
        "image": lambda step: writer.add_image("image", PIXELS, step, dataformats="HWC"),
        "text": lambda step: writer.add_text("text", TEXT, step),
    }
    return lambda kind, step: log[kind](step)


def mlflow_media() -> MediaLog:
    import mlflow

    # The small package has no database.
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    mlflow.set_tracking_uri("file:./mlruns")
    mlflow.start_run()
    log = {
        "image": lambda step: mlflow.log_image(PIXELS, key="image", step=step),
        "text": lambda step: mlflow.log_text(TEXT, f"text/{step}.txt"),
        "table": lambda step: mlflow.log_dict({"columns": COLUMNS, "data": ROWS}, f"table/{step}.json"),
    }
    return lambda kind, step: log[kind](step)


def trackio_media() -> MediaLog:
    import trackio

    trackio.init(project="cost")
    make: dict[str, Callable[[], object]] = {
        "image": lambda: trackio.Image(PIXELS),
        "text": lambda: trackio.Markdown(TEXT),
        "table": lambda: trackio.Table(columns=COLUMNS, data=ROWS),
    }
    return lambda kind, step: trackio.log({kind: make[kind]()}, step=step)


MEDIA_LOGS: dict[str, Callable[[], MediaLog]] = {
    "wandb": wandb_media,
    "tensorboard": tensorboard_media,
    "mlflow": mlflow_media,
    "trackio": trackio_media,
}


def log_of(tracker: str, media: str) -> Log:
    """The call that is timed: with values, or with a media of this kind."""
    if not media:
        return LOGS[tracker]()
    log = MEDIA_LOGS[tracker]()
    return lambda _, step: log(media, step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tracker", choices=LOGS)
    parser.add_argument("--media", default="", choices=("image", "text", "table"))
    options = parser.parse_args()
    tracker = options.tracker
    logging.getLogger("fp8scope").setLevel(logging.ERROR)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    run = fp8scope.attach(model, optimizer, mode="offline", directory="spool", capture="none")
    log = log_of(tracker, options.media)
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
            run.session.write_out()
    captured, alone = (statistics.quantiles(seconds[side], n=4)[0] for side in (True, False))
    print(
        json.dumps(
            {
                "tracker": tracker,
                **({"media": options.media} if options.media else {}),
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
