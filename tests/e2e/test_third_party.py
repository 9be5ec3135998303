"""Unmodified scripts with third-party trainers, run with `fp8scope run`, and the pages of their runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.helpers.tabs import OpenTab
from helpers.live_servers import Server, Worker
from playwright.sync_api import expect

from fp8scope_dashboard.runs.models import Run

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.django_db(transaction=True)]

SCRIPTS = Path(__file__).parents[1] / "agent" / "programs"
STEPS = 30


def launch(server: Server, folder: Path, *arguments: str | Path) -> Run:
    """Run `fp8scope run ARGUMENTS` with a valid login; returns the stored run."""
    environment = {**os.environ, "FP8SCOPE_URL": server.url, "FP8SCOPE_TOKEN": server.token}
    done = subprocess.run(
        [sys.executable, "-m", "fp8scope", "run", *map(str, arguments)],
        env={**environment, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = Run.objects.latest("created_at")
    assert run.rows_stored == run.rows_sent == STEPS and run.points_stored == run.points_sent
    assert run.agent_errors == run.rows_dropped == 0 and run.state == "finished"
    return run


@pytest.mark.parametrize(
    ("script", "arguments", "recipe", "tensor"),
    [
        ("hf_trainer", ("--convert", "delayed"), "DelayedScaling", "model.layers.0.mlp.down_proj.weight"),
        ("lightning_fit", ("--convert", "current"), "CurrentScaling", "body.0.weight"),
        ("torchao_float8", (), "torchao", "1.weight"),
    ],
)
def test_it_works(
    script: str,
    arguments: tuple[str, ...],
    recipe: str,
    tensor: str,
    open_tab: OpenTab,
    server: Server,
    worker: Worker,
    tmp_path: Path,
) -> None:
    run = launch(
        server, tmp_path, *arguments, "--name", script, SCRIPTS / f"{script}.py", "--steps", str(STEPS)
    )
    tab = open_tab()
    tab.open(f"/p/{server.project.slug}/runs/{run.id}/")
    tab.page.get_by_role("heading", name=script).wait_for()
    tab.draw_everything()
    tab.screenshot(f"third-party-{script}")
    # The page shows the loss of every step, the tensors under the model's names, and the recipe.
    assert tab.points("panels") == STEPS
    figure = tab.page.request.get(f"{server.url}/p/{server.project.slug}/runs/{run.id}/figures/heatmap.json")
    assert tensor in figure.json()["figure"]["layout"]["meta"]["names"]
    shown = tab.page.locator("main").inner_text().lower()
    assert "fp8" in shown and "finished" in shown
    tab.page.locator("[data-tab-link=configuration]").click()
    tab.page.get_by_text("As JSON").click()
    expect(tab.page.locator("#recipe-json")).to_contain_text(recipe, ignore_case=True)
