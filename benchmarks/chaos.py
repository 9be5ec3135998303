"""Kill every server in turn while a model trains: count lost points, time the steps. Prints one JSON line.

    python benchmarks/chaos.py [--steps 3000] [--kills 1]

Starts an installation, trains a small FP8 model in another process, and sends SIGKILL to the web server, the
worker, PostgreSQL and Redis in turn, `--kills` times each.

    rows_sent, rows_stored, ...     equal if nothing was lost or duplicated
    step_ms_quiet, step_ms_killed   median step time with all servers up, and within 3 s after a kill
    step_ratio, step_p99_ratio      the second over the first, of medians and of 99th percentiles
    ..._without_agent               the same with the agent disabled: the CPU time that restarting servers
                                    take from the training on the same cores
    agent_step_ratio                step time with the agent over step time without it, all servers up
    restarts                        seconds until a new process has taken over, by name
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

VICTIMS = ("web", "worker", "postgres", "redis")
AFTER_KILL = 3.0
SETTLE = 6.0
COUNTERS = ("rows_sent", "rows_stored", "points_sent", "points_stored", "rows_dropped", "agent_errors")


def train(steps: int, times: Path) -> None:
    """Train with every tensor watched at every step; write the end and length of each step to `times`."""
    import torch
    from torch import nn

    import fp8scope
    import fp8scope_kernels as kernels

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)), nn.Linear(256, 16)
    )
    fp8scope.convert(model, kernels.DelayedScaling())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = fp8scope.init(name="chaos", precision="fp8", total_steps=steps)
    run.watch(model)
    print(run.id, flush=True)
    with times.open("w") as file:
        for _ in range(steps):
            begin = time.perf_counter()
            with run.step(tokens=512) as step:
                x = torch.randn(512, 256)
                loss = (model(x) - x[:, :16]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step.log(loss=loss)
            file.write(f"{time.time()} {time.perf_counter() - begin}\n")
            file.flush()
    run.finish(timeout=120)


def percentile(values: list[float], share: float) -> float:
    """The value below which a share of the values lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def kill(supervisor: Any, name: str) -> tuple[float, float]:
    """SIGKILL one child; returns the time, and the seconds until the supervisor has replaced it."""
    pid = supervisor.pids()[name]
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    while supervisor.pids().get(name, pid) == pid:
        time.sleep(0.02)
        if time.time() - at > 60:
            raise SystemExit(f"{name} was not started again within 60 s")
    return at, time.time() - at


def experiment(supervisor: Any, token: str, data: Path, steps: int, kills: int, mode: str) -> dict[str, Any]:
    """One training run with `kills` kills of each server; `mode` is the agent's, `disabled` as control."""
    times = data / f"times-{mode}"
    environment = {
        **os.environ,
        "FP8SCOPE_URL": supervisor.url,
        "FP8SCOPE_TOKEN": token,
        "FP8SCOPE_DIR": str(data / "spool"),
        "FP8SCOPE_MODE": mode,
    }
    command = [sys.executable, __file__, "--train", str(times), "--steps", str(steps)]
    trainer = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    run = uuid.UUID(trainer.stdout.readline().strip())
    time.sleep(SETTLE)
    moments, restarts = [], {}
    for name in VICTIMS * kills:
        at, seconds = kill(supervisor, name)
        moments.append(at)
        restarts[name] = round(seconds, 2)
        time.sleep(SETTLE)
    alive = trainer.poll() is None
    if trainer.wait(600) != 0:
        raise SystemExit("the training process failed")
    rows = [tuple(map(float, line.split())) for line in times.read_text().splitlines()]
    near = [seconds for end, seconds in rows if any(at <= end <= at + AFTER_KILL for at in moments)]
    quiet = [seconds for end, seconds in rows[20:] if not any(at <= end <= at + AFTER_KILL for at in moments)]
    return {"run": run, "alive": alive, "restarts": restarts, "near": near, "quiet": quiet}


def measure(steps: int, kills: int, data: Path) -> dict[str, object]:
    """The figures: one run with the agent, and the same run and kills with the agent disabled."""
    import urllib3

    from fp8scope_dashboard.servers.supervisor import Supervisor

    with Supervisor(data / "up", port=0) as supervisor:
        token = make_token(supervisor)
        attached = experiment(supervisor, token, data, steps, kills, "online")
        address = f"{supervisor.url}/api/v1/runs/{attached['run']}"
        reply = urllib3.request("GET", address, headers={"Authorization": f"Bearer {token}"}).json()
        if "rows_sent" not in reply:
            raise SystemExit(f"the server does not know the run: {reply}")
        control = experiment(supervisor, token, data, steps, kills, "disabled")
    return {
        "kills": kills * len(VICTIMS),
        "trained_through_all_kills": attached["alive"],
        **{key: reply[key] for key in COUNTERS},
        "step_ms_quiet": round(1e3 * statistics.median(attached["quiet"]), 2),
        "step_ms_killed": round(1e3 * statistics.median(attached["near"]), 2),
        "step_ratio": ratio(attached, 0.5),
        "step_ratio_without_agent": ratio(control, 0.5),
        "step_p99_ratio": ratio(attached, 0.99),
        "step_p99_ratio_without_agent": ratio(control, 0.99),
        "agent_step_ratio": round(
            statistics.median(attached["quiet"]) / statistics.median(control["quiet"]), 3
        ),
        "restarts": attached["restarts"],
    }


def ratio(result: dict[str, Any], share: float) -> float:
    """A percentile of the step times after a kill over the same percentile of the others."""
    return round(percentile(result["near"], share) / percentile(result["quiet"], share), 3)


def make_token(supervisor: Any, slug: str = "default") -> str:
    """Make a token of a project, in a process with the servers' settings. Makes the project if needed."""
    script = (
        "import django; django.setup()\n"
        "from fp8scope_dashboard.accounts.models import Project\n"
        "from fp8scope_dashboard.accounts.services import create_project\n"
        "from fp8scope_dashboard.accounts.tokens import create_token\n"
        f"project = Project.objects.filter(slug={slug!r}).first() or create_project({slug!r}, {slug!r})\n"
        "print(create_token(project, 'chaos', scopes=('write', 'read'))[1])\n"
    )
    environment = {**os.environ, **supervisor.environment}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--kills", type=int, default=1, help="how often each server is killed")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.steps, arguments.train)
        return
    with tempfile.TemporaryDirectory() as directory:
        print(
            json.dumps({"benchmark": "chaos", **measure(arguments.steps, arguments.kills, Path(directory))})
        )


if __name__ == "__main__":
    main()
