"""The peers of ingest.py: the same numbers, sent to trackio's and MLflow's own servers as their clients do.

This file is started again with the peers' interpreter (`--send PEER URL SECONDS PROCESSES`): nothing of
ours is imported here.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

TENSORS = 1000
STATISTICS = ("numel", "amax", "scale", "underflow")
PEERS = ("trackio", "mlflow")
START_SECONDS = 120
WARM_UP = 3.0


def measure(venv: Path | None, seconds: float, processes: int) -> dict[str, float]:
    """Points per second of each peer. Installs them from PyPI into `venv` (a temporary one when None)."""
    with tempfile.TemporaryDirectory() as scratch:
        python = install(venv or Path(scratch) / "venv")
        return {peer: measure_peer(peer, python, Path(scratch) / peer, seconds, processes) for peer in PEERS}


def install(venv: Path) -> Path:
    """The interpreter of a virtual environment that has the peers."""
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    has = subprocess.run([str(python), "-c", "import trackio, mlflow"], capture_output=True)
    if has.returncode:
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PEERS], check=True)
    return python


def measure_peer(peer: str, python: Path, directory: Path, seconds: float, processes: int) -> float:
    """Start a peer's server on an empty directory, send to it, stop it."""
    import psutil

    directory.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "TRACKIO_DIR": str(directory),
        "TRACKIO_WRITE_TOKEN": "benchmark",
        "PYTHONPATH": "",
        "TRACKIO_SHOW_HOST": "127.0.0.1",
        "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}",
        "GRADIO_ANALYTICS_ENABLED": "False",
        "HF_HUB_OFFLINE": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    commands = {
        "trackio": [
            "-c",
            f"import trackio; trackio.show(open_browser=False, server_port={port}, block_thread=True)",
        ],
        "mlflow": [
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--workers",
            "2",
            "--backend-store-uri",
            f"sqlite:///{directory}/mlflow.db",
            "--artifacts-destination",
            str(directory),
        ],
    }
    with (directory / "log").open("wb") as log:
        server = subprocess.Popen(
            [str(python), *commands[peer]],
            env=environment,
            cwd=directory,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/", server, directory / "log")
            command = [
                str(python),
                __file__,
                "--send",
                peer,
                f"http://127.0.0.1:{port}",
                str(seconds),
                str(processes),
            ]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=seconds * 10 + 300
            )
            if done.returncode:
                raise SystemExit(f"{peer}: {done.stderr[-3000:]}\n{(directory / 'log').read_text()[-2000:]}")
            return float(json.loads(done.stdout.splitlines()[-1]))
        finally:
            # MLflow's helpers have sessions of their own.
            main = psutil.Process(server.pid)
            for process in (*main.children(recursive=True), main):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            server.wait()


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start: {log.read_text()[-3000:]}") from None
            time.sleep(0.2)


# What follows runs in the peers' interpreter.


def trackio_sender(url: str, run: int) -> Callable[[int], int]:
    """Post rows as trackio's client does: `bulk_log`, a dictionary of metrics a step; 4 steps a request."""
    remote = importlib.import_module("trackio.remote_client")
    options = {"timeout": 300.0}
    client = remote.RemoteClient(url, write_token="benchmark", verbose=False, httpx_kwargs=options)

    def send(step: int) -> int:
        logs = [
            {
                "project": "ingest",
                "run": f"run{run}",
                "run_id": f"run{run}",
                "metrics": row(step + i),
                "step": step + i,
                "config": None,
                "log_id": None,
            }
            for i in range(4)
        ]
        client.predict(api_name="/bulk_log", logs=logs, hf_token=None)
        return 4 * TENSORS * len(STATISTICS)

    return send


def mlflow_sender(url: str, run: int) -> Callable[[int], int]:
    """MLflow's `log_batch`, which takes at most 1,000 metrics."""
    mlflow = importlib.import_module("mlflow")
    metric = importlib.import_module("mlflow.entities").Metric
    client = mlflow.MlflowClient(url)
    run_id = client.create_run("0", run_name=f"run{run}").info.run_id

    def send(step: int) -> int:
        metrics = [
            metric(name, value, 1_767_225_600_000 + step, step) for name, value in row(step // 4).items()
        ]
        part = metrics[step % 4 :: 4]
        client.log_batch(run_id, metrics=part, synchronous=True)
        return len(part)

    return send


def row(step: int) -> dict[str, float]:
    """One step's metrics by name."""
    return {
        f"layers.{i}.weight/{name}": (1.0 + i) / (1.0 + step) for i in range(TENSORS) for name in STATISTICS
    }


def work(peer: str, url: str, number: int, seconds: float, ready: Any, results: Any) -> None:
    send = {"trackio": trackio_sender, "mlflow": mlflow_sender}[peer](url, number)
    send(0)
    ready.wait()
    begin, step, points = time.monotonic(), 4, 0
    while (now := time.monotonic()) < begin + WARM_UP + seconds:
        stored = send(step)
        step += 4 if peer == "trackio" else 1
        if now >= begin + WARM_UP:
            points += stored
    # Slow answers at the end count with the time that they took.
    results.put((points, time.monotonic() - begin - WARM_UP))


def send_all(peer: str, url: str, seconds: float, processes: int) -> float:
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(processes), context.Queue()
    workers = [
        context.Process(target=work, args=(peer, url, i, seconds, ready, results)) for i in range(processes)
    ]
    for worker in workers:
        worker.start()
    rates = [points / taken for points, taken in (results.get(timeout=seconds * 5 + 200) for _ in workers)]
    for worker in workers:
        worker.join()
    return float(sum(rates))


if __name__ == "__main__":
    _, _, peer_name, address, length, count = sys.argv
    print(json.dumps(send_all(peer_name, address, float(length), int(count))))
