"""Take the server away during a training run: count lost points, time the steps. Prints one JSON line.

    python benchmarks/outage.py [--steps 900]

Starts an installation and trains a small FP8 model three times, with every tensor watched at every step:

    killed   the web server is killed for the middle third: connections are refused
    hangs    the web server gets SIGSTOP for the middle third: connections are accepted and never answered
    gone     the web server gets SIGSTOP for the last two thirds; `finish(5)` is called before it resumes

Figures of each:

    points_sent, points_stored   equal if nothing was lost or duplicated; for `gone` after `fp8scope sync`
    step_ratio                   median step time in the middle third over that of the other steps (`gone`:
                                 over the first third)
    finish_s, complete           seconds that `finish` took, and whether it reported that everything was sent
    directory_reported           `gone`: whether `finish` reported the directory of the unsent data
"""

import argparse
import contextlib
import io
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import urllib3
from chaos import make_token

FINISH_SECONDS = 5.0
START_SECONDS = 60.0


class Web:
    """A second web server of the installation, on another port, that can be killed, stopped and resumed."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self._environment = environment
        self._log = log
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", self._port))
        listening.listen(64)
        with listening, self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fp8scope_dashboard.servers.web", "--fd", str(listening.fileno())],
                pass_fds=[listening.fileno()],
                env={**os.environ, **self._environment, "FP8SCOPE_BASE_URL": self.url},
                stdout=output,
                stderr=output,
            )

    def send(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(urllib3.exceptions.HTTPError):
                if urllib3.request("GET", f"{self.url}/api/v1/openapi.json", retries=False, timeout=5.0).data:
                    return
            time.sleep(0.1)
        raise SystemExit(f"the web server did not start: {self._log.read_text()[-2000:]}")


def train(steps: int, timeout: float) -> None:
    """Train; print each step's seconds, then a JSON line about the end of the run."""
    import torch
    from torch import nn

    import fp8scope

    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
    fp8scope.convert(model, fp8scope.DelayedScaling())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = fp8scope.init(name="outage", precision="fp8", total_steps=steps)
    run.watch(model)
    print(run.id, flush=True)
    for _ in range(steps):
        begin = time.perf_counter()
        with run.step(tokens=256) as step:
            x = torch.randn(256, 256)
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step.log(loss=loss)
        print(time.perf_counter() - begin, flush=True)
    begin = time.perf_counter()
    report = run.finish(timeout)
    end = {"finish_s": round(time.perf_counter() - begin, 2), "complete": report.complete}
    print(json.dumps({**end, "points_sent": report.points_sent, "directory": str(report.directory or "")}))


def experiment(name: str, web: Web, token: str, data: Path, steps: int) -> dict[str, Any]:
    """One training run with one kind of outage; returns its figures."""
    spool = data / f"spool-{name}"
    environment = {**os.environ, "FP8SCOPE_URL": web.url, "FP8SCOPE_TOKEN": token, "FP8SCOPE_DIR": str(spool)}
    timeout = FINISH_SECONDS if name == "gone" else 120.0
    command = [sys.executable, __file__, "--steps", str(steps), "--train", str(timeout)]
    web.start()
    web.wait_until_ready()
    trainer = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    run = trainer.stdout.readline().strip()
    thirds: list[list[float]] = []
    for _ in range(3):
        thirds.append([float(trainer.stdout.readline()) for _ in range(steps // 3)])
        if len(thirds) == 1:
            web.kill() if name == "killed" else web.send(signal.SIGSTOP)
        elif len(thirds) == 2 and name != "gone":
            web.start() if name == "killed" else web.send(signal.SIGCONT)
    end = json.loads(trainer.stdout.readline())
    trainer.wait()
    if name == "gone":
        web.send(signal.SIGCONT)
        os.environ |= {"FP8SCOPE_URL": web.url, "FP8SCOPE_TOKEN": token}
        with contextlib.redirect_stdout(io.StringIO()):
            from fp8scope.cli import main as cli

            end["directory_reported"] = Path(end["directory"]).is_dir() and not end["complete"]
            if cli.main(["sync", str(spool)]) != 0:
                raise SystemExit("fp8scope sync did not send everything")
    headers = {"Authorization": f"Bearer {token}"}
    reply = urllib3.request("GET", f"{web.url}/api/v1/runs/{run}", headers=headers, timeout=30.0).json()
    web.kill()
    quiet = thirds[0][20:] + (thirds[2] if name != "gone" else [])
    del end["directory"]
    return {
        **end,
        "points_sent": reply["points_sent"],
        "points_stored": reply["points_stored"],
        "step_ratio": round(statistics.median(thirds[1]) / statistics.median(quiet), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--train", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    steps = arguments.steps // 3 * 3
    if arguments.train:
        train(steps, arguments.train)
        return
    from fp8scope_dashboard.servers.supervisor import Supervisor

    with tempfile.TemporaryDirectory() as directory, Supervisor(Path(directory) / "up", port=0) as supervisor:
        data = Path(directory)
        token = make_token(supervisor)
        web = Web(supervisor.environment, data / "web.log")
        results = {name: experiment(name, web, token, data, steps) for name in ("killed", "hangs", "gone")}
    print(json.dumps({"benchmark": "outage", **results}))


if __name__ == "__main__":
    main()
