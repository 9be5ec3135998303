"""Unmodified scripts with third-party trainers, run with `fp8scope run`, and the pages of their runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e.helpers.scripts import check_stored, launch
from e2e.helpers.tabs import OpenTab
from helpers.live_servers import Server, Worker
from playwright.sync_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.django_db(transaction=True)]

STEPS = 30


@pytest.mark.parametrize(
    ("script", "options", "recipe", "tensor", "accuracy", "config"),
    [
        (
            "hf_trainer",
            ("--convert", "delayed"),
            "DelayedScaling",
            "model.layers.0.mlp.down_proj.weight",
            1e-3,
            {"trainer": {"max_steps": STEPS}, "model": {"hidden_size": 64}},
        ),
        (
            "lightning_fit",
            ("--convert", "current"),
            "CurrentScaling",
            "body.0.weight",
            1e-6,
            {"hyperparameters": {"width": 48, "lr": 0.01}},
        ),
        ("torchao_float8", (), "torchao", "1.weight", 1e-6, {}),
    ],
)
def test_it_works(
    script: str,
    options: tuple[str, ...],
    recipe: str,
    tensor: str,
    accuracy: float,
    config: dict[str, Any],
    open_tab: OpenTab,
    server: Server,
    worker: Worker,
    tmp_path: Path,
) -> None:
    launched = launch(server, tmp_path, script, "--steps", str(STEPS), options=(*options, "--name", script))
    check_stored(server, launched, {"steps": STEPS, **config}, accuracy)
    run = launched[0]
    assert run.rows_stored == STEPS
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
