"""TensorBoard, MLflow and Trackio showing one loss, for page_load.py.

Each runs in the environment of another Python, so that their dependencies do not mix with ours: this file is
also the script that writes the series there (`page_load_peers.py NAME FOLDER STEPS`).
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_SECONDS, STOP_SECONDS = 90, 20
PATIENCE_MS = 90_000
# When the chart is there: after the next frame it is painted. %s is a selector of the drawn line.
WATCH = """
window.bench = {};
const look = () => {
  if (bench.seen || !document.querySelector(%s)) return;
  bench.seen = true;
  requestAnimationFrame(() => setTimeout(() => { bench.chart = performance.now(); }));
};
new MutationObserver(look).observe(document, {subtree: true, childList: true, attributes: true});
"""


@dataclass(frozen=True)
class Peer:
    """How to serve a tool and where its chart of the loss is.

    Attributes:
        module: what must be installed.
        serve: the arguments of its Python; {folder} and {port} are replaced.
        address: after the port; {run} is what the writer printed.
        line: a selector of the drawn line.
    """

    module: str
    serve: tuple[str, ...]
    address: str
    line: str


PEERS = {
    "TensorBoard": Peer(
        "tensorboard",
        ("-m", "tensorboard.main", "--logdir", "{folder}", "--port", "{port}", "--bind_all"),
        "/?pinnedCards=&darkMode=false#timeseries",
        "line-chart :is(svg path[d], canvas)",
    ),
    "MLflow": Peer(
        "mlflow",
        (
            "-m",
            "mlflow",
            "server",
            "--backend-store-uri",
            "sqlite:///{folder}/m.db",
            "--port",
            "{port}",
            "--workers",
            "1",
        ),
        "/#/experiments/0/runs/{run}/model-metrics",
        ".js-plotly-plot .scatterlayer path[d]",
    ),
    "Trackio": Peer(
        "trackio",
        ("-c", "import trackio; trackio.show(project='bench', open_browser=False)"),
        "/?project=bench",
        ":is(.vega-embed, .gradio-container, main) :is(svg path.line, canvas.marks, svg g.mark-line path)",
    ),
}


def series(steps: int) -> Iterator[tuple[int, float]]:
    """A loss over steps."""
    noise = random.Random(1)
    for step in range(steps):
        yield step, 2.0 + 8.0 * math.exp(-step / 400.0) + noise.gauss(0.0, 0.02)


def measure(playwright: Any, python: str, steps: int, rounds: int) -> Iterator[dict[str, Any]]:
    """One line for each peer."""
    for name, peer in PEERS.items():
        if subprocess.run(
            [python, "-c", f"import {peer.module}"], capture_output=True, check=False
        ).returncode:
            yield {"peer": name, "left_out": f"{peer.module} is not installed for {python}"}
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                yield {
                    "peer": name,
                    "page": f"loss of {steps} steps",
                    **_measured(playwright, python, name, folder, steps, rounds),
                }
            except (TimeoutError, RuntimeError) as error:
                yield {"peer": name, "left_out": str(error)}


def _measured(
    playwright: Any, python: str, name: str, folder: str, steps: int, rounds: int
) -> dict[str, float]:
    peer, port = PEERS[name], _free_port()
    environment = {
        **os.environ,
        "TRACKIO_DIR": folder,
        "GRADIO_SERVER_PORT": str(port),
        "HF_HUB_OFFLINE": "1",
    }
    for variable in ("PYTHONPATH", "PYTHONSAFEPATH"):
        environment.pop(variable, None)
    written = subprocess.run(
        [python, __file__, name, folder, str(steps)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if written.returncode:
        raise RuntimeError(f"the series could not be written: {written.stderr[-300:]}")
    run = written.stdout.strip().rpartition("\n")[2]
    arguments = [part.format(folder=folder, port=port) for part in peer.serve]
    with Path(folder, "log").open("wb") as log:
        server = subprocess.Popen(
            [python, *arguments], env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait_for(port, server)
        address = f"http://127.0.0.1:{port}{peer.address.format(run=run)}"
        _load(playwright, address, peer.line)
        loads = [_load(playwright, address, peer.line) for _ in range(rounds)]
    finally:
        _stop(server)
    return {key: round(statistics.median(load[key] for load in loads), 3) for key in loads[0]}


def _stop(server: subprocess.Popen[bytes]) -> None:
    """End the server and what it has started, by force if it takes long."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal_number)
        with suppress(subprocess.TimeoutExpired):
            server.wait(STOP_SECONDS)
            return


def _load(playwright: Any, address: str, line: str) -> dict[str, float]:
    """One load in a new profile. The chart reacts to the mouse as soon as it is there.

    TensorBoard draws in a worker, so that its line comes a little later than its time says.
    """
    from page_load import FLAGS, PROGRAMS, WINDOW, which

    chromium = playwright.chromium.launch(executable_path=which(PROGRAMS), args=FLAGS)
    try:
        context = chromium.new_context(viewport=WINDOW, reduced_motion="reduce")
        context.add_init_script(WATCH % json.dumps(line))
        page = context.new_page()
        session = context.new_cdp_session(page)
        session.send("Network.enable")
        sizes: list[float] = []
        session.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
        page.goto(address, wait_until="commit")
        deadline = time.monotonic() + PATIENCE_MS / 1e3
        while (chart := page.evaluate("bench.chart ?? 0")) == 0:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{address} shows no chart after {PATIENCE_MS / 1e3:g} s")
            page.wait_for_timeout(50)
        return {"first_chart_s": chart / 1e3, "interactive_s": chart / 1e3, "bytes": sum(sizes)}
    finally:
        chromium.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.3)
    raise TimeoutError(f"the server did not start within {START_SECONDS} s")


# The rest runs in the environment of the peers.


def write_tensorboard(folder: str, steps: int) -> None:
    """An event file."""
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(folder, max_queue_size=steps)
    begin = time.time()
    for step, loss in series(steps):
        value = summary_pb2.Summary.Value(tag="loss", simple_value=loss)
        writer.add_event(
            event_pb2.Event(wall_time=begin + step, step=step, summary=summary_pb2.Summary(value=[value]))
        )
    writer.close()


def write_mlflow(folder: str, steps: int) -> None:
    """A run in SQLite; prints its id."""
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/m.db")
    run = client.create_run("0").info.run_id
    metrics = [Metric("loss", loss, 1_700_000_000_000 + step, step) for step, loss in series(steps)]
    for first in range(0, len(metrics), 1_000):
        client.log_batch(run, metrics=metrics[first : first + 1_000])
    client.set_terminated(run)
    print(run)


def write_trackio(folder: str, steps: int) -> None:
    """A run in TRACKIO_DIR."""
    import trackio

    trackio.init(project="bench", name="run")
    for step, loss in series(steps):
        trackio.log({"loss": loss}, step=step)
    trackio.finish()


if __name__ == "__main__":
    writers = {"TensorBoard": write_tensorboard, "MLflow": write_mlflow, "Trackio": write_trackio}
    writers[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
