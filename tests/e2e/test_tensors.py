"""The map, the ranking and the picture of tensors in a real browser, with mouse and keyboard."""

from __future__ import annotations

import numpy as np
import pytest
from dashboard.helpers.exponents import histogram_of, store_histograms
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.reporting import send_report
from e2e.helpers.accessibility import violations
from e2e.helpers.tabs import OpenTab, Tab
from helpers.live_servers import Server

from fp8scope_dashboard.control.models import Command
from fp8scope_dashboard.runs.models import Run, RunState, Tensor

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

LAYERS = 40
NAMES = [
    f"blocks.{i}.attention.query_key_value.{role}"
    for i in range(LAYERS)
    for role in ("input", "weight", "grad_output")
]
FIRST = "blocks.7.attention.query_key_value.input"


@pytest.fixture
def run(server: Server) -> Run:
    """A run whose input of layer 7 saturates first, at step 60, with exponents of that tensor."""
    run = make_run(server.project, "deep", precision="fp8", state=RunState.RUNNING)
    saturated = np.zeros((100, len(NAMES)))
    saturated[60:, NAMES.index(FIRST)] = 200.0
    saturated[80:, NAMES.index("blocks.3.attention.query_key_value.weight")] = 900.0
    shape = saturated.shape
    recorder = Recorder(run=run, tensors=NAMES)
    Tensor.objects.filter(run=run).update(shape=[-1, 64])
    x = np.random.default_rng(0).normal(size=8_192).astype(np.float32).astype(np.float64)
    columns = {
        "amax": np.full(shape, np.abs(x).max()),
        "scale": np.full(shape, 1024.0),
        "saturated": saturated,
        "nonfinite": np.zeros(shape),
        "numel": np.full(shape, 8_192.0),
    }
    recorder.rows(np.arange(100), {"loss": np.linspace(5, 2, 100)}, columns, rows_per_batch=50)
    for step in (1, 51):
        store_histograms(run, step, {NAMES.index(FIRST): histogram_of(x)})
    send_report(recorder, kind="accepts", accepts=["fallback"])
    return run


def address(server: Server, run: Run, rest: str = "") -> str:
    return f"/p/{server.project.slug}/runs/{run.id}/{rest}"


def open_map(tab: Tab, path: str) -> None:
    tab.open(path)
    tab.draw(tab.page.locator("#tensors"))
    tab.page.locator("#tensor-ranking tbody tr").first.wait_for()


def labels(tab: Tab) -> list[str]:
    script = (
        "[...document.querySelectorAll('#tensors .tmap__button')].map(tag => tag.getAttribute('aria-label'))"
    )
    return [str(label) for label in tab.page.evaluate(script)]


def in_drawer(tab: Tab) -> str:
    drawer = tab.page.locator("#tensor-drawer")
    drawer.locator("#tensor-name").wait_for()
    return drawer.locator("#tensor-name").inner_text()


def test_it_works(open_tab: OpenTab, server: Server, run: Run) -> None:
    tab = open_tab()
    open_map(tab, address(server, run))
    assert labels(tab)[:3] == [f"blocks.{i} (3 tensors)" for i in range(3)] and len(labels(tab)) == LAYERS
    group = tab.page.locator("#tensors [role=row]").nth(7)
    assert group.get_attribute("aria-expanded") == "false"
    group.get_by_role("button").click()
    tab.wait(lambda: len(labels(tab)) == LAYERS + 3, "Opening the layer")
    assert labels(tab)[8] == FIRST
    # The open groups are in the address.
    again = open_tab()
    open_map(again, tab.page.url.removeprefix(server.url))
    assert labels(again) == labels(tab)


def test_the_first_to_saturate_is_one_click_away(open_tab: OpenTab, server: Server, run: Run) -> None:
    tab = open_tab()
    open_map(tab, address(server, run))
    row = tab.page.locator("#tensor-ranking tbody tr").first
    assert FIRST in row.inner_text() and "step 60" in row.inner_text()
    row.locator("a").click()
    assert in_drawer(tab) == FIRST


def test_moves_with_the_keyboard_alone(open_tab: OpenTab, server: Server, run: Run) -> None:
    tab = open_tab()
    open_map(tab, address(server, run))
    keyboard, said = tab.page.keyboard, tab.page.locator("#tensors [data-live-text]")
    tab.page.locator("#tensors [role=row][tabindex='0']").focus()
    for _ in range(7):
        keyboard.press("ArrowDown")
    assert said.inner_text().startswith("blocks.7, extreme of 3 tensors: largest 2.44")
    keyboard.press("Shift+ArrowRight")
    keyboard.press("ArrowRight")
    assert "step 10: 0" in said.inner_text()
    keyboard.press("Enter")
    tab.wait(lambda: len(labels(tab)) == LAYERS + 3, "Opening the layer")
    keyboard.press("ArrowDown")
    assert said.inner_text().startswith(f"{FIRST}, step 10")
    keyboard.press("Enter")
    assert in_drawer(tab) == FIRST
    # The focus stays in the dialog, and returns to the row.
    for _ in range(40):
        keyboard.press("Tab")
        # Between the last and the first element, the browser itself has the focus.
        inside = "(tag => tag === document.body || !!tag.closest('dialog'))(document.activeElement)"
        assert tab.page.evaluate(inside)
    keyboard.press("Escape")
    tab.wait(lambda: not tab.page.locator("#tensor-drawer").is_visible(), "Closing the drawer")
    assert tab.page.evaluate("document.activeElement.dataset.row") == "8"


def test_the_drawer_is_in_the_address_and_back_closes_it(open_tab: OpenTab, server: Server, run: Run) -> None:
    tab = open_tab()
    open_map(tab, address(server, run))
    tab.page.locator("#tensor-ranking tbody a").first.click()
    in_drawer(tab)
    assert f"tensor={NAMES.index(FIRST)}" in tab.page.url
    shared = tab.page.url.removeprefix(server.url)
    tab.page.go_back()
    tab.wait(lambda: not tab.page.locator("#tensor-drawer").is_visible(), "Closing the drawer")
    second = open_tab()
    second.open(shared)
    assert in_drawer(second) == FIRST
    named = open_tab()
    named.open(address(server, run, f"?tensor={FIRST}"))
    assert in_drawer(named) == FIRST


def test_the_close_button_closes_the_drawer_and_returns_the_focus(
    open_tab: OpenTab, server: Server, run: Run
) -> None:
    tab = open_tab()
    open_map(tab, address(server, run))
    link = tab.page.locator("#tensor-ranking tbody a").first
    link.focus()
    tab.page.keyboard.press("Enter")
    in_drawer(tab)
    assert violations(tab.page) == []
    # A click inside of the drawer stays inside of it.
    with_answers: list[str] = []
    tab.page.on("request", lambda request: with_answers.append(request.url))
    tab.page.locator("#tensor-name").click()
    tab.page.wait_for_timeout(300)
    assert not [url for url in with_answers if "drawer=1" in url]
    tab.page.get_by_role("button", name="Close").click()
    tab.wait(lambda: not tab.page.locator("#tensor-drawer").is_visible(), "Closing the drawer")
    tab.wait(lambda: "tensor=" not in tab.page.url, "The address without the tensor")
    assert link.evaluate("tag => tag === document.activeElement")


def test_what_does_not_load_says_so_and_can_be_tried_again(
    open_tab: OpenTab, server: Server, run: Run
) -> None:
    tab = open_tab()
    patterns = ("**/tensors/find*", "**/tensors/map.json*", "**/tensors/ranking*")
    for pattern in patterns:
        tab.page.route(pattern, lambda route: route.fulfill(status=500, body=""))
    tab.open(address(server, run, "?tab=tensors"))
    texts = {"#tensors": "Cannot load the map", "#tensor-ranking": "Cannot load the ranking"}
    for place, text in texts.items():
        tab.page.locator(place).get_by_text(text).wait_for()
    assert violations(tab.page) == []
    for pattern in patterns[1:]:
        tab.page.unroute(pattern)
    for place in texts:
        tab.page.locator(place).get_by_role("button", name="Try again").click()
    tab.wait(lambda: tab.page.locator("#tensors").get_attribute("data-state") == "ready", "Drawing the map")
    tab.page.locator("#tensor-ranking tbody a").first.click()
    drawer = tab.page.locator("#tensor-drawer")
    drawer.get_by_text("Cannot load the tensor: the server answered 500").wait_for()
    assert violations(tab.page) == []
    tab.page.unroute(patterns[0])
    drawer.get_by_role("button", name="Try again").click()
    assert in_drawer(tab) == FIRST
    # The browser reports the failed requests.
    assert all("500" in error for error in tab.console_errors)
    tab.console_errors.clear()


def test_rows_of_a_run_with_one_step_are_no_higher_than_others(open_tab: OpenTab, server: Server) -> None:
    run = make_run(server.project, "young", precision="fp8", state=RunState.RUNNING)
    columns = {name: np.ones((1, 3)) for name in ("numel", "saturated", "underflow", "nonfinite", "amax")}
    Recorder(run=run, tensors=NAMES[:3]).rows([1], {"loss": [5.0]}, columns)
    tab = open_tab()
    open_map(tab, address(server, run))
    heights = [row.bounding_box() for row in tab.page.locator("#tensors [role=row]").all()]
    assert heights and all(box is not None and box["height"] < 40 for box in heights)


def test_a_range_is_shared_with_the_other_charts(open_tab: OpenTab, server: Server, run: Run) -> None:
    tab = open_tab()
    open_map(tab, address(server, run))
    strip = tab.page.locator("#tensors .tmap__strip").first
    strip.scroll_into_view_if_needed()
    box = strip.bounding_box()
    assert box is not None
    tab.page.mouse.move(box["x"] + 0.505 * box["width"], box["y"] + 5)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + 0.705 * box["width"], box["y"] + 5, steps=4)
    with tab.page.expect_request("**/tensors/map.json*first=50*") as request:
        tab.page.mouse.up()
    assert "last=70" in request.value.url
    tab.wait(lambda: "steps=50..70" in tab.page.url, "The range in the address")
    tab.wait(lambda: tab.page.locator("#tensors [data-reset]").is_visible(), "The way back")
    tab.page.locator("#tensors [data-reset]").click()
    tab.wait(lambda: "steps=" not in tab.page.url, "All steps")


def test_modes_and_filters_are_in_the_address(open_tab: OpenTab, server: Server, run: Run) -> None:
    tab = open_tab()
    open_map(tab, address(server, run))
    tab.page.get_by_label("What the map shows").select_option("change")
    tab.wait(lambda: "× " in tab.page.locator("#tensors [data-legend]").inner_text(), "Showing changes")
    tab.page.get_by_label("Filter tensors by name").fill("blocks.7.")
    tab.wait(lambda: len(labels(tab)) < 8, "Filtering the map")
    tab.wait(lambda: tab.page.locator("#tensor-ranking tbody tr").count() == 3, "Filtering the ranking")
    second = open_tab()
    open_map(second, tab.page.url.removeprefix(server.url))
    assert labels(second) == labels(tab)
    assert second.page.get_by_label("What the map shows").input_value() == "change"


def test_the_ranking_is_sorted_by_its_heads(open_tab: OpenTab, server: Server, run: Run) -> None:
    tab = open_tab()
    open_map(tab, address(server, run))
    tab.page.get_by_role("button", name="Worst ever").click()
    first = tab.page.locator("#tensor-ranking tbody tr").first
    tab.wait(lambda: "blocks.3." in first.inner_text(), "Sorting the table")
    tab.wait(lambda: "tensors.sort=ever" in tab.page.url, "The order in the address")
    tab.page.get_by_role("button", name="List them").click()
    tab.wait(lambda: "tensors.everything=1" in tab.page.url, "The choice in the address")
    assert "tensors.sort=ever" in tab.page.url
    tab.page.get_by_role("button", name="Next").click()
    tab.wait(lambda: "26–50 of 120" in tab.page.locator(".ranking__pages").inner_text(), "The second page")
    assert "tensors.sort=ever" in tab.page.url and "tensors.everything=1" in tab.page.url


def test_the_slider_changes_the_shares_at_once(open_tab: OpenTab, server: Server, run: Run) -> None:
    tab = open_tab()
    tab.open(address(server, run, f"tensors/{NAMES.index(FIRST)}/"))
    slider = tab.page.locator("[data-margin]")
    share = tab.page.locator("[data-share=proposed-saturated]")
    tab.wait(lambda: "%" in share.inner_text(), "The shares")
    assert tab.page.locator("[data-advice]").inner_text().startswith("Margin ")
    best = slider.input_value()
    assert share.inner_text().startswith("0")
    requests: list[str] = []
    tab.page.on("request", lambda request: requests.append(request.url))
    slider.focus()
    bars = tab.page.locator("[data-chart=proposed] .bin--saturates")
    for _ in range(6):
        tab.page.keyboard.press("ArrowLeft")
    assert bars.count() > 0 and not share.inner_text().startswith("0\u202f")
    assert "saturate" in (slider.get_attribute("aria-valuetext") or "")
    assert not [url for url in requests if "picture.json" in url]
    assert f"margin={int(best) - 6}" in tab.page.url
    tab.page.get_by_role("button", name="Show this margin").click()
    assert slider.input_value() == best
    with tab.page.expect_request("**/picture.json?*format=mxfp8*"):
        tab.page.get_by_label("Format").select_option("mxfp8")
    tab.wait(slider.is_disabled, "Blocks have no margin")
    assert "MXFP8()" in (tab.page.locator("[data-code]").text_content() or "")


def test_the_bars_say_what_the_shares_say(open_tab: OpenTab, server: Server, run: Run) -> None:
    """A limit inside of a bin divides it: nothing is red if nothing saturates."""
    tab = open_tab()
    tab.open(address(server, run, f"tensors/{NAMES.index(FIRST)}/"))
    tab.page.locator("[data-chart=proposed] .bin").first.wait_for()
    script = """() => {
        const slider = document.querySelector("[data-margin]");
        const states = [];
        for (let margin = Number(slider.min); margin <= Number(slider.max); margin += 1) {
            slider.value = margin;
            slider.dispatchEvent(new Event("input"));
            const lost = (share, zone) => [
                document.querySelector(`[data-share=proposed-${share}]`).textContent.split("\\n")[0],
                document.querySelectorAll(`[data-chart=proposed] .bin--${zone}`).length,
            ];
            states.push([lost("saturated", "saturates"), lost("flushed", "flushes")]);
        }
        return states;
    }"""
    states = tab.page.evaluate(script)
    assert len(states) == 25
    for state in states:
        for share, bars in state:
            # Less than half an element is an estimate without a bar.
            assert (
                bars == 0 if share.startswith("0") and float(share.split()[0]) == 0 else bars or "<" in share
            )
    assert {bars > 0 for state in states for _, bars in state} == {True, False}


def test_without_javascript_a_tensor_has_its_picture_and_shares(
    open_tab: OpenTab, server: Server, run: Run
) -> None:
    tab = open_tab()
    path = address(server, run, f"tensors/{NAMES.index(FIRST)}/")
    tab.open(path)
    tab.page.locator("[data-chart=proposed] .bin").first.wait_for()
    shown = tab.page.locator("table.shares").inner_text()
    browser = tab.page.context.browser
    assert browser is not None
    plain = browser.new_context(java_script_enabled=False, storage_state=tab.page.context.storage_state())
    try:
        page = plain.new_page()
        page.goto(tab.url + path)
        picture = page.locator("[data-picture] noscript img")
        answer = plain.request.get(tab.url + str(picture.get_attribute("src")))
        assert answer.headers["content-type"] == "image/svg+xml" and "saturates" in answer.text()
        # The script puts the bounds of a share on a line of their own.
        assert page.locator("table.shares").inner_text().split() == shown.split()
        assert page.locator(".advice").is_visible() and not page.locator("[data-margin]").is_visible()
    finally:
        plain.close()


def test_a_member_orders_the_layer_to_bf16(open_tab: OpenTab, server: Server, run: Run) -> None:
    tab = open_tab()
    tab.open(address(server, run, f"tensors/{NAMES.index(FIRST)}/"))
    tab.page.locator("summary", has_text="Fall back to BF16").click()
    tab.page.get_by_role("button", name="Change the layer to BF16").click()
    tab.page.locator(".notice--success", has_text="Command created").wait_for()
    assert Command.objects.get(run=run).arguments["patterns"] == ["blocks.7.attention.query_key_value"]


def test_a_map_that_fails_can_be_tried_again(open_tab: OpenTab, server: Server, run: Run) -> None:
    tab = open_tab()
    tab.page.route("**/tensors/map.json*", lambda route: route.fulfill(status=500, body="oh"))
    tab.open(address(server, run))
    tab.page.locator("#tensors").scroll_into_view_if_needed()
    retry = tab.page.locator("#tensors").get_by_role("button", name="Try again")
    retry.wait_for()
    tab.page.unroute("**/tensors/map.json*")
    retry.click()
    tab.wait(lambda: len(labels(tab)) == LAYERS, "Drawing the map")
    assert all("500" in error for error in tab.console_errors)
    tab.console_errors.clear()


@pytest.mark.parametrize(("width", "theme"), [(1440, "dark"), (390, "light")])
def test_fits_the_screen(open_tab: OpenTab, server: Server, run: Run, width: int, theme: str) -> None:
    tab = open_tab(width, theme)
    open_map(tab, address(server, run))
    assert not tab.is_too_wide()
    tab.screenshot(f"tensors-{theme}-{width}")
    tab.open(address(server, run, f"tensors/{NAMES.index(FIRST)}/"))
    tab.draw_everything()
    assert not tab.is_too_wide()
    tab.screenshot(f"tensor-{theme}-{width}")
    tab.open(address(server, run, f"?tensor={NAMES.index(FIRST)}"))
    in_drawer(tab)
    assert not tab.page.evaluate(
        "(d => d.scrollWidth > d.clientWidth)(document.getElementById('tensor-drawer'))"
    )
