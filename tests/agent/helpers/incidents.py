"""A small training script with options, run in this process until it fails, and its incident."""

import runpy
import sys
from pathlib import Path

SCRIPT = """
import argparse
import torch
from torch import nn
from torch.nn import functional
import fp8scope

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="")
parser.add_argument("--fault-by", default="count", help="what tells the step of the fault: count or state")
parser.add_argument("--stop", type=int, default=10**6)
parser.add_argument("--fail", type=int, default=0)
parser.add_argument("--way", default="attach")
parser.add_argument("--precision", default="fp8")
parser.add_argument("--micro", type=int, default=1)
parser.add_argument("--every", type=int, default=10)
parser.add_argument("--counted-rate", action="store_true")
parser.add_argument("--plain-loader", action="store_true")
parser.add_argument("--once", type=int, default=0)
parser.add_argument("--bad-batch", type=int, default=0)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--checkpoint", default="")
options = parser.parse_args()

torch.manual_seed(options.seed)
model = nn.Sequential(
    nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16)
)
if options.precision == "fp8":
    fp8scope.convert(model, fp8scope.DelayedScaling(history_length=1024))
# A part of the state, which a snapshot restores.
model.register_buffer("turns", torch.zeros((), dtype=torch.int64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 50))
# The first scale overflows float16, so that steps are skipped.
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20) if options.precision == "fp16" else None
inputs, labels = torch.randn(640, 32), torch.randint(16, (640,))
if options.bad_batch:
    inputs[torch.arange(len(inputs)) // 16 == options.bad_batch] *= 1e5
data = torch.utils.data.TensorDataset(inputs, labels)
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=not options.bad_batch)
resume = None
if options.checkpoint:
    saved = torch.load(options.checkpoint, weights_only=True)
    model.load_state_dict(saved["model"]); optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"]); torch.set_rng_state(saved["random"])
    resume = saved["run"]
if options.way == "attach":
    run = fp8scope.attach(model, optimizer, name="small", resume=resume)
else:
    run = fp8scope.init(name="small", resume=resume)
    run.watch(model, optimizer)
also = [] if options.counted_rate else [scheduler]
if options.every >= 0:
    run.allow_snapshots(model, optimizer, every=options.every, also=[*also, *filter(None, [scaler])])
batches = loader if options.plain_loader else run.batches(loader)


def inject():
    if options.fault == "grad":
        model[3].state_of("grad_output").amax_history.fill_(1e9)
    elif options.fault == "input":
        state = model[3].state_of("input")
        state.scale.mul_(2.0**12)
        state.amax_history[0] = float("inf")
    elif options.fault == "weight":
        model[0].state_of("weight").amax_history.fill_(1e8)


def endless():
    while True:
        yield from batches


def loss_of(stream):
    total = 0.0
    model.turns += 1
    if options.fault_by == "state" and model.turns == 25:
        inject()
    for _ in range(options.micro):
        x, y = next(stream)
        if options.precision == "fp16":
            with torch.autocast("cpu", dtype=torch.float16):
                loss = functional.cross_entropy(model(x).float(), y) / options.micro
            scaler.scale(loss).backward()
        else:
            loss = functional.cross_entropy(model(x), y) / options.micro
            if current == options.once:
                loss = loss * 3
            loss.backward()
        total += loss.detach()
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad()
    if not options.counted_rate:
        scheduler.step()
    return total


current = 0


def train():
    global current
    stream = endless()
    for number in range(1, options.stop + 1):
        current = number
        if number == options.fail:
            raise RuntimeError("the script failed")
        if options.fault_by == "count" and number == 25:
            inject()
        if options.counted_rate:
            optimizer.param_groups[0]["lr"] = 1e-3 / (1 + number / 5)
        if options.way == "attach":
            loss_of(stream)
        else:
            with run.step() as step:
                step.log(loss=loss_of(stream))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(), "random": torch.get_rng_state(),
                "run": run.state_dict()}, "checkpoint.pt")


with run:
    train()
"""


def script(folder: Path) -> str:
    """Write the script, and return its path."""
    path = folder / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def train(path: str, *options: str) -> None:
    """Run the script in this process. It may fail as `--fail` asks for."""
    before = sys.argv
    sys.argv = [path, *options]
    try:
        runpy.run_path(path, run_name="__main__")
    except RuntimeError as error:
        assert str(error) == "the script failed"
    finally:
        sys.argv = before


def incident_of(path: str, *options: str, fail: int = 38) -> Path:
    """Run the script until step `fail`, and return the folder of the incident."""
    train(path, "--fail", str(fail), *options)
    (folder,) = Path(path).parent.glob(".fp8scope/spool/*/incident-*")
    return folder
