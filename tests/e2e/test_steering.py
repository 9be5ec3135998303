"""Steering a run from a real browser, which controls a real training run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dashboard.helpers.recording import Recorder
from dashboard.helpers.reporting import send_report
from dashboard.helpers.seeding import TENSORS, seed_project
from e2e.helpers.tabs import OpenTab
from helpers.live_servers import Server
from torch import nn

import fp8scope

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


def run_with_reports(server: Server) -> str:
    """Create a running run with reference windows, a bisection and commands; returns the path of its page."""
    import numpy as np

    from fp8scope_dashboard.accounts.models import User
    from fp8scope_dashboard.control import commands

    run = seed_project(server.project, 120, live=True).healthy
    writer = Recorder(run=run, tensors=[])
    send_report(writer, kind="accepts", accepts=["checkpoint", "fallback", "pause", "resume"])
    generator = np.random.default_rng(0)
    for step, shift in ((20, 0.0), (50, 0.001), (80, 0.03)):
        level = 3.0 - 0.008 * (step + np.arange(20)) + generator.normal(0, 0.03, 20)
        fp8 = level * (1 + shift) + generator.normal(0, 0.003, 20)
        delta = float((fp8.mean() - level.mean()) / level.mean())
        send_report(
            writer, kind="reference", step=step, bf16=level.tolist(), fp8=fp8.tolist(), delta=delta,
            noise=0.0004, tolerance=0.0025, verdict="over" if abs(delta) > 0.0025 else "within",
            policy="fallback", action="fallback" if delta > 0.0025 else "", layers=24, kept_bytes=3 << 30,
            seconds=12.5,
        )  # fmt: skip
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in TENSORS))
    products = [
        {
            "layer": module,
            "product": product,
            "relative_error": float(error),
            "cosine": float(1 - error**2 / 2),
        }
        for (module, product), error in zip(
            ((module, product) for module in modules for product in ("fprop", "dgrad", "wgrad")),
            np.exp(generator.normal(-5.0, 1.0, 3 * len(modules))),
            strict=True,
        )
    ]
    products[40] |= {"relative_error": 0.82, "cosine": 0.61}
    products.sort(key=lambda product: -float(str(product["relative_error"])))
    send_report(
        writer, kind="bisect", step=90, products=products, measured=len(products), total_error=0.84,
        total_cosine=0.6, loss_bf16=2.3, loss_fp8=2.31, seconds=41.0,
    )  # fmt: skip
    send_report(
        writer, kind="annotation", step=70, name="fallback", text="4 layers to BF16", why="ada: it clips"
    )
    user = User.objects.create_user("mia")
    first = commands.give(run, "fallback", {"patterns": ["blocks.*.mlp.down"]}, user=user, reason="it clips")
    send_report(
        writer,
        kind="command",
        command=first.pk,
        state="done",
        message="6 of 6 layers changed to BF16.",
        step=70,
    )
    second = commands.give(run, "checkpoint", user=user)
    send_report(
        writer, kind="command", command=second.pk, state="failed", message="DiskFull: no space left", step=71
    )
    commands.give(run, "pause", {"seconds": 600}, user=user)
    return f"/p/{server.project.slug}/runs/{run.id}/"


@pytest.mark.parametrize(("width", "theme"), [(1440, "dark"), (390, "light")])
def test_it_works(open_tab: OpenTab, server: Server, width: int, theme: str) -> None:
    path = run_with_reports(server)
    tab = open_tab(width, theme)
    tab.open(path)
    tab.draw_everything()
    assert not tab.is_too_wide()
    assert tab.points("reference") == 20
    tab.screenshot(f"steering-{theme}-{width}")
    # Charts outside the viewport are not redrawn.
    tab.draw(tab.page.locator("#reference"))
    tab.page.locator("form[data-controls=reference] select").select_option(index=1)
    label = tab.page.locator("#reference .figure__plot")
    tab.wait(lambda: "from step 50" in (label.get_attribute("aria-label") or ""), "Drawing another window")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(x).relu())
        return y


def test_a_click_reaches_the_training_process(open_tab: OpenTab, server: Server, tmp_path: Path) -> None:
    """The form changes the layer, and the open page shows the answer without a reload."""
    torch.manual_seed(0)
    model = Model()
    fp8scope.convert(model, fp8scope.DelayedScaling())
    run = fp8scope.init(name="steered", url=server.url, token=server.token, directory=tmp_path)
    run.watch(model)

    def train() -> bool:
        with run.step() as step:
            x = torch.randn(16, 32)
            loss = (model(x) - x).square().mean()
            loss.backward()
            step.log(loss=loss)
        return False

    tab = open_tab()
    tab.wait(lambda: train() or run.url, "Registering the run")
    tab.open(f"/p/{server.project.slug}/runs/{run.id}/")
    layers = tab.page.locator("#layer-field")
    # The form appears once the process has reported the commands that it accepts.
    tab.wait(lambda: train() or layers.is_visible(), "The form")
    layers.fill("*.none, d*")
    tab.page.get_by_role("button", name="Change precision").click()
    tab.page.locator(".notice--success", has_text="Command created").wait_for()
    down, up = model.down, model.up
    tab.wait(lambda: train() or down.precision == "bf16", "Falling back")
    assert up.precision == "fp8"
    commands_table = tab.page.locator("table.asked")
    answer = "1 of 1 layers changed to BF16."
    tab.wait(lambda: train() or answer in commands_table.inner_text(), "The answer on the page")
    # Charts outside the viewport are not redrawn.
    tab.page.locator("#panels").scroll_into_view_if_needed()
    names = "(document.querySelector('#panels .figure__plot').data ?? []).map((trace) => trace.name)"
    tab.wait(lambda: train() or "change" in tab.page.evaluate(names), "Marking the change in the loss chart")
    run.finish()
