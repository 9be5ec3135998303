"""Count how many of 50 one-step spikes the first response of a chart shows. Prints one JSON line.

In a run of 100,000 steps, the amax of one tensor is at least ten times as high at 50 steps as at any other.
The benchmark requests the chart of the run page once over HTTP, signed in and without zoom, as the browser
does. It counts the spikes that are points at the right step with the right height. `shown_longer` is the same
for a run ten times longer, which is drawn from roll-ups.

    python benchmarks/spikes.py [--recording DIR] [--steps 100000] [--spikes 50]
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import urllib3


def fill(environment: dict[str, str], recording: Path, steps: int, spikes: int) -> dict[str, Any]:
    """A run of two tensors, the first of which has the spikes."""
    command = [sys.executable, str(Path(__file__).with_name("store_fill.py")), "--recording", str(recording),
               "--tensors", "2", "--steps", str(steps), "--spikes", str(spikes), "--name", "s"]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, **environment}, check=True, stdout=subprocess.PIPE, text=True
    )
    filled: dict[str, Any] = json.loads(done.stdout)
    return filled


def session(supervisor: Any) -> str:
    """The session cookie of an administrator."""
    script = (
        "import django; django.setup()\n"
        "from django.contrib.auth import SESSION_KEY, BACKEND_SESSION_KEY, HASH_SESSION_KEY, get_user_model\n"
        "from django.contrib.sessions.backends.db import SessionStore\n"
        "from django.conf import settings\n"
        "person = get_user_model().objects.filter(is_superuser=True).first()\n"
        "store = SessionStore()\n"
        "store[SESSION_KEY] = str(person.pk)\n"
        "store[BACKEND_SESSION_KEY] = settings.AUTHENTICATION_BACKENDS[0]\n"
        "store[HASH_SESSION_KEY] = person.get_session_auth_hash()\n"
        "store.create()\n"
        "print(f'{settings.SESSION_COOKIE_NAME}={store.session_key}')\n"
    )
    environment = {**os.environ, **supervisor.environment}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def chart(url: str, cookie: str, run: dict[str, Any]) -> dict[str, Any]:
    """The first figure of a tensor that the page requests."""
    tensor = run["tensor"].replace("#", "%23")
    address = f"{url}/p/{run['project']}/runs/{run['run']}/figures/tensor.json?tensor={tensor}"
    answer = urllib3.request("GET", address, headers={"cookie": cookie}, redirect=False)
    if answer.status != 200:
        raise SystemExit(f"{address}: {answer.status}")
    figure: dict[str, Any] = answer.json()["figure"]
    return figure


def shown(figure: dict[str, Any], spikes: list[int]) -> int:
    """Count the spikes among the points of a line; all must be higher than all other points."""
    best = 0
    for line in figure["data"]:
        x, y = numbers(line.get("x")), numbers(line.get("y"))
        if len(x) != len(y) or not len(x):
            continue
        spiky = np.isin(x, spikes)
        usual = np.nanmax(y[~spiky]) if (~spiky).any() else np.inf
        best = max(best, len(np.unique(x[spiky & (y >= 5 * usual)])))
    return best


def numbers(values: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A plotly array, plain or as typed base64."""
    if isinstance(values, dict):
        kind = np.dtype(
            {
                "f8": "<f8",
                "f4": "<f4",
                "i4": "<i4",
                "i2": "<i2",
                "i1": "i1",
                "u4": "<u4",
                "u2": "<u2",
                "u1": "u1",
            }[values["dtype"]]
        )
        return np.frombuffer(base64.b64decode(values["bdata"]), kind).astype(np.float64)
    return np.array([np.nan if v is None else v for v in values or []], dtype=np.float64)


def main() -> None:
    """Measure, and print one JSON line."""
    # PYTHONSAFEPATH, which the server processes set, leaves this folder out.
    sys.path.insert(0, str(Path(__file__).parent))
    import store_data

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--recording", type=Path, default=store_data.RECORDING, help="made when there is none"
    )
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--spikes", type=int, default=50)
    options = parser.parse_args()

    from fp8scope_dashboard.servers.supervisor import Supervisor

    options.recording.mkdir(parents=True, exist_ok=True)
    store_data.record(options.recording, 2400)
    figures = {}
    with tempfile.TemporaryDirectory() as scratch, Supervisor(Path(scratch) / "up", port=0) as supervisor:
        cookie = session(supervisor)
        for key, steps in (("shown", options.steps), ("shown_longer", 10 * options.steps)):
            run = fill(supervisor.environment, options.recording, steps, options.spikes)
            figures[key] = shown(chart(supervisor.url, cookie, run), run["spikes"])
    print(json.dumps({"benchmark": "spikes", **figures, "of": options.spikes, "steps": options.steps}))


if __name__ == "__main__":
    main()
