"""Media in a browser: the steps of a BF16 run and an FP8 run beside each other, and what comes meanwhile."""

from __future__ import annotations

import pytest
from dashboard.helpers.logged_media import log, picture, table
from dashboard.helpers.recording import Recorder, make_run
from e2e.helpers.tabs import OpenTab
from helpers.live_servers import Server
from playwright.sync_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


def test_it_works(open_tab: OpenTab, server: Server) -> None:
    bf16 = Recorder(run=make_run(server.project, "bf16", precision="bf16", group="bf16", seed=1))
    fp8 = Recorder(run=make_run(server.project, "fp8", precision="fp8", baseline="bf16", seed=1))
    for recorder in (bf16, fp8):
        name = recorder.run.name
        for step in (10, 20, 30):
            text = f"At step {step} the model in {name} says hello to the world."
            log(recorder, "samples/prompt", text.encode(), step=step, caption="Say hello")
            log(recorder, "attention", picture(32, 16, step + len(name)), kind="image", step=step)
        log(recorder, "scores", table(["task", "score"], [["arc", 0.5]]), kind="table", step=30)
    tab = open_tab()
    tab.open(f"/p/{server.project.slug}/runs/{fp8.run.id}/?tab=media&name=samples/prompt")
    columns = tab.page.locator("#media-columns")
    expect(columns).to_contain_text("At step 30 the model in fp8 says")
    expect(columns.locator("mark")).to_have_text("fp8")
    slider = tab.page.get_by_role("slider")
    slider.focus()
    slider.press("ArrowLeft")
    expect(columns).to_contain_text("step 20, 2 of 3")
    slider.press("Home")
    expect(columns).to_contain_text("At step 10 the model in bf16 says")
    expect(slider).to_be_focused()
    tab.screenshot("media-text")
    tab.page.get_by_role("link", name="attention").click()
    shown = tab.page.locator(".media__image")
    expect(shown).to_have_count(2)
    tab.wait(lambda: shown.first.evaluate("image => image.naturalWidth") == 32, "Showing the image")
    tab.page.get_by_text("Difference from the first run").click()
    tab.screenshot("media-images")
    tab.page.get_by_text("Difference from the first run").click()
    # What comes while the page is open is shown, unless an earlier step is chosen or the difference is open.
    log(fp8, "attention", picture(32, 16, 99), kind="image", step=40)
    expect(columns).to_contain_text("step 40, 4 of 4")
    tab.page.get_by_role("link", name="scores").click()
    expect(tab.page.get_by_role("cell", name="arc")).to_have_count(2)
    tab.open(f"/p/{server.project.slug}/compare/?runs={bf16.run.id}&runs={fp8.run.id}")
    tab.page.evaluate("document.getElementById('media').scrollIntoView()")
    expect(tab.page.locator("#media-columns")).to_contain_text("step 40")
