"""kill -9 a training process at random moments, then `fp8scope sync`: what is lost, what is doubled?

    python benchmarks/kill.py [--kills 50] [--seed 0]

Starts a whole installation. Each time a process trains a small FP8 model, every tensor observed at every
step, and says when a step has ended; it is killed at a random moment, in the middle of whatever it does, and
what it left is sent with `fp8scope sync`. Half of the times the process cannot reach the server, so that
everything has to come from its spool. Prints one JSON line:

    lost_most, lost_mean      completed steps that are not stored, per kill
    lost_total, of_total      the same in sum, and of how many completed steps
    doubled, gaps             steps stored twice, and steps missing before the last one stored: both to be 0
    marked                    runs that ended as failed, as they should: all of them
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import urllib3
from chaos import make_token

STEP_SECONDS = (0.0, 0.0005, 0.002, 0.01)
FIRST_STEP_SECONDS = 120.0


def train(url: str, token: str, spool: Path, pause: float, tell: Connection) -> None:
    """Train for ever; tell the run's id, then the number of each step that has ended."""
    import torch
    from torch import nn

    import fp8scope

    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    fp8scope.convert(model, fp8scope.DelayedScaling())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = fp8scope.init(name="victim", url=url, token=token, directory=spool)
    run.watch(model)
    tell.send(run.id)
    number = 0
    while True:
        with run.step(tokens=64) as step:
            x = torch.randn(64, 64)
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step.log(loss=loss)
            time.sleep(pause)
        number += 1
        # One write(2) of a few bytes: whole, or not at all.
        os.write(tell.fileno(), number.to_bytes(8, "little"))


def kill_one(url: str, token: str, spool: Path, chance: random.Random) -> tuple[str, int]:
    """Train, kill; returns the run and how many of its steps had ended."""
    hears, tells = multiprocessing.Pipe(duplex=False)
    # Every second one talks to nobody.
    reached = url if chance.random() < 0.5 else "http://127.0.0.1:9"
    context = multiprocessing.get_context("fork")
    pause = chance.choice(STEP_SECONDS)
    process = context.Process(target=train, args=(reached, token, spool, pause, tells))
    process.start()
    tells.close()
    run = hears.recv()
    first = os.read(hears.fileno(), 8)
    assert len(first) == 8
    until = time.monotonic() + chance.uniform(0.0, 1.5)
    told = 1
    os.set_blocking(hears.fileno(), False)
    while time.monotonic() < until:
        with contextlib.suppress(BlockingIOError):
            told += len(os.read(hears.fileno(), 1 << 20)) // 8
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    os.set_blocking(hears.fileno(), True)
    while rest := os.read(hears.fileno(), 1 << 20):
        told += len(rest) // 8
    hears.close()
    return run, told


def stored(url: str, token: str, run: str) -> dict[str, Any]:
    """What the server has of the run; nothing when it was killed before the server could be told of it."""
    reply = urllib3.request("GET", f"{url}/api/v1/runs/{run}", headers={"Authorization": f"Bearer {token}"})
    found: dict[str, Any] = reply.json()
    return found if reply.status == 200 else {"rows_stored": 0, "last_step": 0, "state": "unknown"}


def measure(kills: int, seed: int, data: Path) -> dict[str, object]:
    """All kills; returns the JSON line."""
    import torch  # noqa: F401  (once, for all the processes forked from here)

    from fp8scope.cli import main as cli
    from fp8scope_dashboard.servers.supervisor import Supervisor

    chance = random.Random(seed)
    lost, doubled, gaps, completed, marked = [], 0, 0, 0, 0
    with Supervisor(data / "up", port=0) as supervisor:
        token = make_token(supervisor)
        os.environ |= {"FP8SCOPE_URL": supervisor.url, "FP8SCOPE_TOKEN": token}
        for _ in range(kills):
            run, told = kill_one(supervisor.url, token, data / "spool", chance)
            with contextlib.redirect_stdout(io.StringIO()):
                if cli.main(["sync", str(data / "spool")]) != 0:
                    raise SystemExit("fp8scope sync did not send everything")
            reply = stored(supervisor.url, token, run)
            rows, last = reply["rows_stored"], reply["last_step"] or 0
            # The step that was under way may have ended without having been told.
            lost.append(max(0, told - last))
            doubled += max(0, rows - last)
            gaps += max(0, last - rows)
            completed += told
            marked += reply["state"] == "failed"
    return {
        "kills": kills,
        "lost_most": max(lost),
        "lost_mean": round(statistics.mean(lost), 3),
        "lost_total": sum(lost),
        "of_total": completed,
        "doubled": doubled,
        "gaps": gaps,
        "marked": marked,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = measure(arguments.kills, arguments.seed, Path(directory))
    print(json.dumps({"benchmark": "kill", **result}))


if __name__ == "__main__":
    main()
