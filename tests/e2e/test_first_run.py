"""From an empty project to a live chart, as a new user sees it."""

from __future__ import annotations

import re

import numpy as np
import pytest
from contract.helpers.wire_client import WireClient
from e2e.helpers.tabs import OpenTab, Tab
from helpers.live_servers import Server, Worker

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


def send(client: WireClient, seq: int, first: int, count: int = 20) -> None:
    steps = list(range(first, first + count))
    loss = [5.0 * (1 + step) ** -0.2 for step in steps]
    amax = [[1.0 + 0.1 * step, 2.0] for step in steps]
    counts = {name: [[0.0, 0.0]] * count for name in ("saturated", "nonfinite", "underflow", "subnormal")}
    tensors = {"amax": amax, "scale": [[100.0, 100.0]] * count, "numel": [[64.0, 64.0]] * count, **counts}
    assert client.send(client.batch(seq, steps, scalars={"loss": loss}, tensors=tensors)).status == 201


def mark_document(tab: Tab) -> None:
    """Set a variable that is lost if the page is reloaded."""
    tab.page.evaluate("window.sameDocument = true")


def is_marked(tab: Tab) -> bool:
    return bool(tab.page.evaluate("window.sameDocument === true"))


def test_it_works(open_tab: OpenTab, server: Server, worker: Worker) -> None:
    tab = open_tab()
    tab.open("/")
    page = tab.page
    assert page.get_by_text("Send your first run").is_visible()
    assert page.get_by_text(f"fp8scope login {server.url}").is_visible()
    tab.wait(lambda: page.locator("[data-live]").get_attribute("data-state") == "live", "The live stream")
    page.get_by_role("button", name="Create a token").click()
    shown = page.locator("code[id^=secret-]")
    shown.wait_for()
    token = shown.inner_text().strip()
    assert re.fullmatch(r"fp8s_[A-Za-z0-9]{8}_[\w-]{43}", token)

    # A new run appears without a reload, which would hide the token: it is shown only once.
    mark_document(tab)
    client = WireClient(server.url, token)
    client.register(name="gpt fp8", precision="fp8", total_steps=200)
    client.catalogue(["blocks.0.mlp.up.input", "blocks.0.mlp.down.input"])
    link = page.get_by_role("link", name="gpt fp8")
    link.wait_for()
    assert is_marked(tab) and shown.is_visible()

    link.click()
    page.get_by_role("heading", name="gpt fp8").wait_for()
    tab.wait(
        lambda: page.locator("#panels").get_attribute("data-state") == "empty", "Showing what is missing"
    )
    assert "step.log(loss" in page.locator("#panels .figure__state").inner_text()

    # Its chart appears and grows without a reload.
    tab.wait(lambda: page.locator("[data-live]").get_attribute("data-state") == "live", "The live stream")
    mark_document(tab)
    send(client, 0, 0)
    tab.wait(lambda: tab.points("panels") == 20, "Twenty points")
    send(client, 1, 20)
    tab.wait(lambda: tab.points("panels") == 40, "Forty points")
    tab.wait(lambda: "39" in page.locator("#run-head").inner_text(), "The head's step")
    assert is_marked(tab)
    tab.screenshot("first-run")


def test_an_alert_appears_on_the_open_alerts_page(open_tab: OpenTab, server: Server, worker: Worker) -> None:
    client = WireClient(server.url, server.token)
    client.register(name="gpt fp8", precision="fp8")
    tab = open_tab()
    tab.open(f"/p/{server.project.slug}/alerts/")
    tab.page.get_by_text("No alerts").wait_for()
    tab.wait(lambda: tab.page.locator("[data-live]").get_attribute("data-state") == "live", "The live stream")
    mark_document(tab)
    loss = [*np.linspace(5, 3, 30).tolist(), float("nan")]
    assert client.send(client.batch(0, list(range(31)), scalars={"loss": loss})).status == 201
    tab.page.get_by_role("heading", name="Loss not finite").wait_for()
    assert is_marked(tab)
    tab.draw_everything()
    tab.page.get_by_role("button", name="Acknowledge").click()
    tab.page.get_by_text("Acknowledged: Loss not finite in gpt fp8.").wait_for()
