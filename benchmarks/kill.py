"""kill -9 a training process at random moments, then `fp8scope sync`. Prints one JSON line.

    python benchmarks/kill.py [--kills 50] [--seed 0]

Starts an installation. Each trial trains a small FP8 model in another process with every tensor watched at
every step, kills the process at a random moment, and sends the rest of its data with `fp8scope sync`. In half
of the trials the process cannot reach the server, so all data comes from its spool.

    lost_most, lost_mean      completed steps that are not stored, per kill
    lost_total, of_total      their sum, and the number of completed steps
    doubled, gaps             steps stored twice, and steps missing before the last stored one; should be 0
    marked                    runs that are marked as failed; should be all
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


def train(url: str, token: str, spool: Path, pause: float, reports: Connection) -> None:
    """Train until killed; send the run's id, then the number of each completed step."""
    import torch
    from torch import nn

    import fp8scope

    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    fp8scope.convert(model, fp8scope.DelayedScaling())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = fp8scope.init(name="victim", url=url, token=token, directory=spool)
    run.watch(model)
    reports.send(run.id)
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
        # A write(2) of eight bytes is atomic.
        os.write(reports.fileno(), number.to_bytes(8, "little"))


def kill_one(url: str, token: str, spool: Path, chance: random.Random) -> tuple[str, int]:
    """Train and kill; returns the run's id and the number of its completed steps."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    # Nothing listens on port 9.
    address = url if chance.random() < 0.5 else "http://127.0.0.1:9"
    context = multiprocessing.get_context("fork")
    pause = chance.choice(STEP_SECONDS)
    process = context.Process(target=train, args=(address, token, spool, pause, sender))
    process.start()
    sender.close()
    run = receiver.recv()
    first = os.read(receiver.fileno(), 8)
    assert len(first) == 8
    until = time.monotonic() + chance.uniform(0.0, 1.5)
    completed = 1
    os.set_blocking(receiver.fileno(), False)
    while time.monotonic() < until:
        with contextlib.suppress(BlockingIOError):
            completed += len(os.read(receiver.fileno(), 1 << 20)) // 8
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    os.set_blocking(receiver.fileno(), True)
    while rest := os.read(receiver.fileno(), 1 << 20):
        completed += len(rest) // 8
    receiver.close()
    return run, completed


def stored(url: str, token: str, run: str) -> dict[str, Any]:
    """The server's document of the run; an empty one if the run was killed before it was registered."""
    reply = urllib3.request("GET", f"{url}/api/v1/runs/{run}", headers={"Authorization": f"Bearer {token}"})
    document: dict[str, Any] = reply.json()
    return document if reply.status == 200 else {"rows_stored": 0, "last_step": 0, "state": "unknown"}


def measure(kills: int, seed: int, data: Path) -> dict[str, object]:
    """The figures of all kills."""
    import torch  # noqa: F401  (once, for all forked processes)

    from fp8scope.cli import main as cli
    from fp8scope_dashboard.servers.supervisor import Supervisor

    chance = random.Random(seed)
    lost, doubled, gaps, total, marked = [], 0, 0, 0, 0
    with Supervisor(data / "up", port=0) as supervisor:
        token = make_token(supervisor)
        os.environ |= {"FP8SCOPE_URL": supervisor.url, "FP8SCOPE_TOKEN": token}
        for _ in range(kills):
            run, completed = kill_one(supervisor.url, token, data / "spool", chance)
            with contextlib.redirect_stdout(io.StringIO()):
                if cli.main(["sync", str(data / "spool")]) != 0:
                    raise SystemExit("fp8scope sync did not send everything")
            reply = stored(supervisor.url, token, run)
            rows, last = reply["rows_stored"], reply["last_step"] or 0
            # The last step may have completed without being reported.
            lost.append(max(0, completed - last))
            doubled += max(0, rows - last)
            gaps += max(0, last - rows)
            total += completed
            marked += reply["state"] == "failed"
    return {
        "kills": kills,
        "lost_most": max(lost),
        "lost_mean": round(statistics.mean(lost), 3),
        "lost_total": sum(lost),
        "of_total": total,
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
