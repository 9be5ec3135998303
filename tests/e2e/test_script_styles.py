"""Training scripts in common styles, run with `fp8scope run` against a real server.

The stored losses equal the printed ones, the configuration is stored, and the address of the run is printed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e.helpers.scripts import check_stored, launch
from helpers.live_servers import Server

import fp8scope
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]


@pytest.mark.parametrize(
    ("script", "arguments", "config"),
    [
        ("nano", ("--max_iters=5",), {"max_iters": 5, "n_embd": 32, "model": {"n_layer": 2}}),
        ("mini", ("--trainer.max_iters=5",), {"trainer": {"max_iters": 5, "batch_size": 4}}),
        ("word_lm", ("--lr", "4"), {"lr": 4.0, "emsize": 24, "epochs": 2}),
    ],
)
def test_it_works(
    script: str, arguments: tuple[str, ...], config: dict[str, Any], server: Server, tmp_path: Path
) -> None:
    launched = launch(server, tmp_path, script, *arguments)
    check_stored(server, launched, config, accuracy=1e-6)
    command = launched[0].environment["command"]
    assert script in command and arguments[0] in command


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
