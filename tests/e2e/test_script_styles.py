"""Training scripts in common styles, run with `fp8scope run` against a real server.

The stored losses equal the printed ones, the configuration is stored, and the address of the run is printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.live_servers import Server

import fp8scope
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]

SCRIPTS = Path(__file__).parents[1] / "agent" / "programs"
# Transformers prints four digits.
PRINTED = re.compile(r"(?m)(?:\bloss |^\{'loss': '?)([\d.]+(?:e[+-]?\d+)?)")


@pytest.mark.parametrize(
    ("script", "arguments", "accuracy", "config"),
    [
        ("nano", ("--max_iters=5",), 1e-6, {"max_iters": 5, "n_embd": 32, "model": {"n_layer": 2}}),
        ("mini", ("--trainer.max_iters=5",), 1e-6, {"trainer": {"max_iters": 5, "batch_size": 4}}),
        ("word_lm", ("--lr", "4"), 1e-6, {"lr": 4.0, "emsize": 24, "epochs": 2}),
        ("lightning_fit", ("--steps", "5"), 1e-6, {"steps": 5, "hyperparameters": {"width": 48, "lr": 0.01}}),
        (
            "hf_trainer",
            ("--steps", "4"),
            1e-3,
            {"steps": 4, "trainer": {"max_steps": 4}, "model": {"hidden_size": 64}},
        ),
    ],
)
def test_it_works(
    script: str,
    arguments: tuple[str, ...],
    accuracy: float,
    config: dict[str, Any],
    server: Server,
    tmp_path: Path,
) -> None:
    environment = {**os.environ, "FP8SCOPE_URL": server.url, "FP8SCOPE_TOKEN": server.token}
    done = subprocess.run(
        [sys.executable, "-m", "fp8scope", "run", str(SCRIPTS / f"{script}.py"), *arguments],
        env={**environment, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    run = Run.objects.get()
    assert run.state == "finished" and run.agent_errors == run.rows_dropped == 0
    printed = [float(text) for text in PRINTED.findall(done.stdout)]
    losses = list(queries.scalar(run.pk, "loss").values)
    assert len(printed) >= 4 and losses == pytest.approx(printed, rel=accuracy)
    for name, value in config.items():
        stored = run.config[name]
        assert value.items() <= stored.items() if isinstance(value, dict) else stored == value, name
    assert script in run.environment["command"] and arguments[0] in run.environment["command"]
    page = f"{server.url}/p/{server.project.slug}/runs/{run.pk}/"
    assert [line for line in done.stderr.splitlines() if page in line] == [
        f"fp8scope: run {run.name}: {page}",
        f"fp8scope: run {run.name} has finished: {page}",
    ]


def test_changes_during_the_run_are_stored(server: Server, tmp_path: Path) -> None:
    run = fp8scope.init(
        url=server.url, token=server.token, name="changing", tags=["a"], config={"lr": 1}, directory=tmp_path
    )
    for number in range(3):
        run.log({"train": {"loss": 1.0}}, step=number)
        run.summary["best"] = number
    run.tags += ("b",)
    run.config["lr"] = 2
    report = run.finish()
    stored = Run.objects.get()
    assert report.complete and report.errors == 0 and stored.last_step == 2
    assert stored.summary == {"best": 2} and stored.tags == ["a", "b"] and stored.config == {"lr": 2}
    assert run.url == f"{server.url}/p/{server.project.slug}/runs/{stored.pk}/"
    assert list(queries.scalar(stored.pk, "train/loss").values) == [1.0, 1.0, 1.0]
