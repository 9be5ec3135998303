"""Panels of a run: arranged with the mouse and the keyboard, and edited in a dialog."""

from __future__ import annotations

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from e2e.helpers.tabs import OpenTab
from helpers.live_servers import Server
from playwright.sync_api import expect

from fp8scope_dashboard.runs.models import SavedView

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

STEPS = np.arange(60.0)


def order() -> list[str]:
    return [panel["metrics"][0] for panel in SavedView.objects.get().panels]


def test_it_works(open_tab: OpenTab, server: Server) -> None:
    run = make_run(server.project, "own names")
    recorder = Recorder(run=run)
    names = ("train/nll", "eval/nll", "reward")
    recorder.rows(STEPS, dict.fromkeys(names, STEPS + 1))
    tab = open_tab()
    page = tab.page
    pinned = page.locator("#charts-pinned + .charts__grid")
    tab.open(f"/p/{server.project.slug}/runs/{run.pk}/?tab=charts")
    for name in names:
        page.get_by_role("button", name=f"Pin {name}", exact=True).click()
        expect(
            page.locator("#charts-pinned + .charts__grid").get_by_role("article", name=name)
        ).to_be_visible()
    assert order() == list(names)
    # The keyboard moves a panel and keeps its focus.
    pinned.get_by_role("button", name="Move train/nll").focus()
    page.keyboard.press("ArrowRight")
    expect(pinned.get_by_role("article").nth(1)).to_have_attribute("aria-label", "train/nll")
    expect(pinned.get_by_role("button", name="Move train/nll")).to_be_focused()
    assert order() == ["eval/nll", "train/nll", "reward"]

    # So does the mouse.
    pinned.get_by_role("button", name="Move reward").drag_to(pinned.get_by_role("article", name="eval/nll"))
    expect(pinned.get_by_role("article").first).to_have_attribute("aria-label", "reward")
    assert order() == ["reward", "eval/nll", "train/nll"]
    corner = pinned.get_by_role("button", name="Size of reward").bounding_box()
    assert corner is not None
    page.mouse.move(corner["x"] + 8, corner["y"] + 8)
    page.mouse.down()
    page.mouse.move(corner["x"] + 8 + 450, corner["y"] + 8, steps=5)
    page.mouse.up()
    expect(pinned.locator(".panel--2")).to_have_attribute("aria-label", "reward")
    pinned.get_by_role("button", name="Size of reward").press("ArrowDown")
    expect(pinned.locator("[data-height=large]")).to_be_visible()

    # A mistake in the form stays in the dialog; what is right redraws the panel, and new rows are drawn.
    pinned.get_by_role("link", name="Edit reward").click()
    dialog = page.get_by_role("dialog", name="Panel")
    dialog.get_by_label("Formula").fill("reward * (2")
    dialog.get_by_role("button", name="Save the panel").click()
    expect(dialog.get_by_role("alert")).to_have_text("A closing bracket is missing.")
    dialog.get_by_label("Formula").fill("reward * 2")
    dialog.get_by_label("Horizontal axis").select_option("wall")
    dialog.get_by_role("button", name="Save the panel").click()
    expect(dialog).to_be_hidden()
    figure = pinned.get_by_role("article").first.locator(".figure")
    expect(figure).to_have_attribute("data-state", "ready")
    longest = (
        "(f) => Math.max(...f.querySelector('.figure__plot')._fullData.map((trace) => trace.x?.length ?? 0))"
    )
    assert figure.evaluate(longest) == len(STEPS)
    # A click tells the step also over the time of day.
    box = figure.locator(".nsewdrag").first.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] * 20 / 59, box["y"] + box["height"] / 3)
    callout = page.get_by_role("group", name="Step 20")
    expect(callout).to_be_visible()
    tab.screenshot("panel over time with a callout")
    callout.get_by_role("link", name="Add a note here").click()
    expect(page.get_by_role("dialog", name="Note at a step").get_by_label("Step")).to_have_value("20")
    page.keyboard.type("Over time.")
    page.get_by_role("button", name="Save the note").click()
    marked = "(f) => f.querySelector('.figure__plot').data?.some((trace) => trace.name === 'note')"
    page.wait_for_function(marked, arg=figure.element_handle())
    recorder.rows(STEPS + 60, dict.fromkeys(names, STEPS + 61))
    page.wait_for_function(f"(f) => ({longest})(f) === {2 * len(STEPS)}", arg=figure.element_handle())

    # The same view tomorrow.
    tab.open(f"/p/{server.project.slug}/runs/{run.pk}/?tab=charts")
    expect(pinned.get_by_role("article").first).to_have_attribute("data-width", "2")
