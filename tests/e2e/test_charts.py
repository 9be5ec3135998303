"""Charts in a real browser: the first paint, their state in the address, menu, keyboard and live updates."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from dashboard.helpers.recording import Recorder
from dashboard.helpers.seeding import Seeded, seed_project
from e2e.helpers.accessibility import violations
from e2e.helpers.tabs import OpenTab, Tab
from helpers.live_servers import Server
from playwright.sync_api import Route

from fp8scope_dashboard import notifications
from fp8scope_dashboard.pages.charts.theme import THEMES, ThemeName
from fp8scope_dashboard.runs.models import Run

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

PLOTLY = "**/plotly*.js"
FIRST = "**/figures/panels.json*"


@pytest.fixture
def seeded(server: Server) -> Seeded:
    return seed_project(server.project, 150)


@pytest.fixture
def path(server: Server, seeded: Seeded) -> str:
    return f"/p/{server.project.slug}/runs/{seeded.faulty.id}/"


@pytest.fixture
def compare(server: Server, seeded: Seeded) -> str:
    return f"/p/{server.project.slug}/compare/?runs={seeded.faulty.id}&runs={seeded.baselines[0].id}"


def state(tab: Tab, name: str = "panels") -> str | None:
    return tab.page.locator(f"#{name}").get_attribute("data-state")


def wait_ready(tab: Tab, name: str = "panels") -> None:
    tab.draw(tab.page.locator(f"#{name}"))


def query(tab: Tab) -> dict[str, list[str]]:
    return parse_qs(urlsplit(tab.page.url).query, keep_blank_values=True)


def shown_range(tab: Tab, name: str = "panels") -> list[int]:
    script = (
        "name => document.querySelector(`#${name} .figure__plot`)._fullLayout.xaxis.range.map(Math.round)"
    )
    return list(tab.page.evaluate(script, name))


def relayout(tab: Tab, first: float, last: float, name: str = "panels") -> None:
    script = """([name, first, last]) => Plotly.relayout(
        document.querySelector(`#${name} .figure__plot`),
        {'xaxis.range[0]': first, 'xaxis.range[1]': last})"""
    tab.page.evaluate(script, [name, first, last])


def last_step(tab: Tab) -> float:
    script = """Math.max(...document.querySelector('#panels .figure__plot')._fullData
        .flatMap((trace) => Array.from(trace.x ?? [])).filter(Number.isFinite))"""
    return float(tab.page.evaluate(script))


def test_it_works(open_tab: OpenTab, path: str) -> None:
    """The chart is there before any chart library, and nothing moves when it is replaced."""
    tab = open_tab()
    held: list[Route] = []
    tab.page.route(PLOTLY, lambda route: held.append(route))
    tab.page.goto(tab.url + path, wait_until="domcontentloaded")
    drawn = tab.page.locator("#panels .figure__drawn > svg")
    drawn.scroll_into_view_if_needed()
    assert state(tab) == "drawn" and drawn.is_visible()
    line = drawn.locator("path[stroke]").first
    assert line.evaluate("tag => getComputedStyle(tag).stroke") != "none"
    before = tab.page.locator("#panels").bounding_box()
    tab.wait(lambda: held, "Requesting plotly")
    for route in held:
        route.continue_()
    wait_ready(tab)
    after = tab.page.locator("#panels").bounding_box()
    assert before is not None and after is not None
    assert before["width"] == after["width"]
    assert before["height"] == pytest.approx(after["height"], abs=2)
    assert drawn.count() == 0


def test_the_first_chart_catches_up_with_a_live_run(open_tab: OpenTab, seeded: Seeded, path: str) -> None:
    """Rows that come while the page is loading are drawn when it is connected."""
    Run.objects.filter(pk=seeded.faulty.pk).update(state="running")
    tab = open_tab()
    held: list[Route] = []
    tab.page.route(PLOTLY, lambda route: held.append(route))
    tab.page.goto(tab.url + path, wait_until="domcontentloaded")
    tab.wait(lambda: held, "Requesting plotly")
    Recorder(run=seeded.faulty, rank=1).rows([170], {"loss": [2.5]})
    notifications.run_changed(seeded.faulty.id, seeded.faulty.project_id, "rows", 170)
    for route in held:
        route.continue_()
    wait_ready(tab)
    tab.wait(lambda: last_step(tab) == 170, "Drawing the new row")


def test_a_chart_keeps_its_height_when_the_window_changes_its_width(
    open_tab: OpenTab, seeded: Seeded, path: str
) -> None:
    """Plotly forgets the height it was given when it fits a chart that it has drawn twice to a new width."""
    tab = open_tab()
    tab.open(path)
    wait_ready(tab)
    plot = tab.page.locator("#panels .figure__plot")
    height = plot.evaluate("plot => plot.clientHeight")
    text = plot.evaluate("plot => plot.layout.font.color")
    tab.page.emulate_media(color_scheme="dark")
    tab.wait(lambda: plot.evaluate("plot => plot.layout.font.color") != text, "Drawing it in dark")
    for width in (1300, 1000):
        tab.page.set_viewport_size({"width": width, "height": 900})
        tab.wait(lambda: plot.evaluate("plot => plot._fullLayout.width === plot.clientWidth"), "Fitting")
        assert plot.evaluate("plot => plot.querySelector('.svg-container').clientHeight") == height > 100


def test_an_empty_chart_takes_no_focus(open_tab: OpenTab, path: str) -> None:
    tab = open_tab()
    tab.open(path)
    wait_ready(tab)
    plot = tab.page.locator("#panels .figure__plot")
    assert plot.get_attribute("tabindex") == "0"
    tab.page.route(FIRST, lambda route: route.fulfill(json={"empty": "No values yet."}))
    tab.page.emulate_media(color_scheme="dark")
    tab.wait(lambda: state(tab) == "empty", "Emptying the chart")
    assert [plot.get_attribute(name) for name in ("tabindex", "role", "aria-label")] == [None] * 3


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_first_chart_needs_no_request(
    open_tab: OpenTab, seeded: Seeded, path: str, theme: ThemeName
) -> None:
    Run.objects.filter(pk=seeded.faulty.pk).update(state="finished")
    tab = open_tab(theme=theme)
    asked: list[str] = []
    # The first page of a browser tells the server its theme.
    tab.open("/")
    tab.page.on("request", lambda request: asked.append(request.url))
    tab.open(path)
    wait_ready(tab)
    text = "document.querySelector('#panels .figure__plot').layout.font.color"
    assert tab.page.evaluate(text) == THEMES[theme].text
    assert not [url for url in asked if "panels.json" in url]
    # A window that is too narrow for this chart asks for one that fits.
    tab.page.set_viewport_size({"width": 390, "height": 844})
    with tab.page.expect_request("**/figures/panels.json*compact=1*"):
        tab.page.reload()


def test_without_javascript_every_chart_is_a_picture(open_tab: OpenTab, path: str, compare: str) -> None:
    tab = open_tab()
    browser = tab.page.context.browser
    assert browser is not None
    context = browser.new_context(java_script_enabled=False, storage_state=tab.page.context.storage_state())
    page = context.new_page()
    page.goto(tab.url + path)
    assert page.locator("#panels .figure__drawn > svg").is_visible()
    page.goto(tab.url + compare)
    picture = page.locator("#compare-delta noscript img")
    answer = context.request.get(tab.url + str(picture.get_attribute("src")))
    assert answer.ok and answer.headers["content-type"] == "image/svg+xml"
    assert not page.locator("#compare-delta .figure__state").is_visible()
    context.close()


def test_says_that_it_is_still_loading_and_gives_up(open_tab: OpenTab, compare: str) -> None:
    tab = open_tab()
    tab.page.clock.install()
    asked: list[Route] = []
    tab.page.route("**/figures/delta.json*", lambda route: asked.append(route))
    tab.open(compare)
    delta = tab.page.locator("#compare-delta")
    delta.scroll_into_view_if_needed()
    tab.wait(lambda: asked, "Requesting the difference")
    assert state(tab, "compare-delta") == "loading"
    tab.page.clock.run_for(5_000)
    assert "Still loading" in delta.locator(".figure__state").inner_text()
    tab.page.clock.run_for(60_000)
    delta.get_by_role("button", name="Try again").wait_for()
    assert "did not answer within 45 s" in delta.locator(".figure__state").inner_text()
    # Other charts do not wait for this one.
    wait_ready(tab, "compare-loss")
    tab.page.clock.resume()
    # What the header of a scrolled page covers in part counts as too small to be touched.
    tab.page.evaluate("window.scrollTo(0, 0)")
    assert violations(tab.page) == []
    tab.page.unroute("**/figures/delta.json*")
    delta.get_by_role("button", name="Try again").click()
    wait_ready(tab, "compare-delta")


def test_a_chart_that_cannot_be_refreshed_says_so_and_keeps_what_it_shows(
    open_tab: OpenTab, path: str
) -> None:
    tab = open_tab()
    tab.open(path)
    wait_ready(tab)
    tab.page.route(FIRST, lambda route: route.fulfill(status=503, body="busy"))
    tab.page.locator("#panels").evaluate(
        "tag => tag.dispatchEvent(new CustomEvent('fp8:theme', {bubbles: true}))"
    )
    note = tab.page.locator("#panels .figure__note")
    note.get_by_role("button", name="Try again").wait_for()
    assert "Not up to date: the server answered 503" in note.inner_text() and tab.points("panels") > 100
    tab.page.unroute(FIRST)
    note.get_by_role("button", name="Try again").click()
    tab.wait(lambda: not note.inner_text(), "Refreshing")
    tab.console_errors.clear()


def test_the_address_has_the_state_of_the_charts(open_tab: OpenTab, path: str) -> None:
    tab = open_tab()
    tab.open(path)
    wait_ready(tab)
    assert query(tab) == {}, "the defaults are not in the address"
    tab.page.locator("form[data-controls=panels] input[name=log]").check()
    tab.page.locator("form[data-controls=panels] input[name=smooth][type=checkbox]").uncheck()
    relayout(tab, 40, 60)
    tab.wait(lambda: query(tab).get("steps") == ["40..60"], "The range in the address")
    assert query(tab) == {"panels.log": ["1"], "panels.smooth": ["0"], "steps": ["40..60"]}

    other = open_tab()
    other.open(tab.page.url.removeprefix(tab.url))
    assert other.page.locator("form[data-controls=panels] input[name=log]").is_checked()
    wait_ready(other)
    assert shown_range(other) == [40, 60]
    assert other.points("panels") <= 2 * 21, "a band has two points for each step"
    assert not other.page.locator("form[data-controls=panels] input[type=checkbox][name=smooth]").is_checked()
    assert other.page.evaluate("document.querySelector('#panels .figure__plot').layout.yaxis.type") == "log"
    assert other.page.locator("#panels [data-reset]").is_visible()


def test_a_zoom_over_tokens_asks_for_the_data_of_its_range(open_tab: OpenTab, compare: str) -> None:
    tab = open_tab()
    tab.open(compare)
    tab.page.locator("form[data-controls=compare-loss] input[value=tokens]").check()
    wait_ready(tab, "compare-loss")
    with tab.page.expect_request("**/figures/loss.json*from=*") as request:
        relayout(tab, 50_000.5, 100_000, "compare-loss")
    asked = parse_qs(urlsplit(request.value.url).query)
    assert (asked["x"], asked["from"], asked["to"]) == (["tokens"], ["50000.5"], ["100000"])
    wait_ready(tab, "compare-loss")
    assert query(tab)["compare-loss.tokens"] == ["50000.5..100000"]
    # Only steps are the same in all charts.
    assert "steps" not in query(tab) and "first" not in asked


def test_back_and_forward_restore_the_charts(open_tab: OpenTab, path: str) -> None:
    tab = open_tab()
    tab.open(path)
    wait_ready(tab)
    log = tab.page.locator("form[data-controls=panels] input[name=log]")
    axis = "document.querySelector('#panels .figure__plot')._fullLayout.yaxis.type"
    log.check()
    tab.wait(lambda: tab.page.evaluate(axis) == "log", "A logarithmic axis")
    tab.page.go_back()
    tab.wait(lambda: tab.page.evaluate(axis) == "linear", "Back")
    assert not log.is_checked() and query(tab) == {}
    tab.page.go_forward()
    tab.wait(lambda: tab.page.evaluate(axis) == "log", "Forward")
    assert log.is_checked() and query(tab) == {"panels.log": ["1"]}


def test_other_scripts_set_the_range_and_the_crosshair(open_tab: OpenTab, path: str) -> None:
    tab = open_tab()
    tab.open(path)
    wait_ready(tab)
    event = "document.dispatchEvent(new CustomEvent('fp8:%s', {detail: {axis: 'steps', %s}}))"
    tab.page.evaluate(event % ("range", "range: [100, 120]"))
    tab.wait(lambda: shown_range(tab) == [100, 120] and query(tab).get("steps") == ["100..120"], "The range")
    cross, plot = tab.page.locator("#panels .figure__cross"), tab.page.locator("#panels .nsewdrag").first

    def is_in_the_middle() -> bool:
        # Again each time: the chart may still change its width.
        tab.page.evaluate(event % ("hover", "x: 110, source: null"))
        line, area = cross.bounding_box(), plot.bounding_box()
        assert line is not None and area is not None
        return line["x"] == pytest.approx(area["x"] + area["width"] / 2, abs=2)

    tab.wait(is_in_the_middle, "The crosshair")
    tab.page.evaluate(event % ("hover", "x: null, source: null"))
    assert not cross.is_visible()
    tab.page.locator("#panels").get_by_role("button", name="Show all").click()
    tab.wait(lambda: shown_range(tab)[1] > 140 and query(tab) == {}, "Showing everything")


def test_a_drag_zooms_and_a_double_click_shows_everything(open_tab: OpenTab, path: str) -> None:
    tab = open_tab()
    tab.open(path)
    wait_ready(tab)
    area = tab.page.locator("#panels .nsewdrag").first
    box = area.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    with tab.page.expect_request("**/figures/panels.json*first=*"):
        tab.page.mouse.move(box["x"] + box["width"] * 0.4, middle)
        tab.page.mouse.down()
        tab.page.mouse.move(box["x"] + box["width"] * 0.6, middle, steps=5)
        tab.page.mouse.up()
    tab.wait(lambda: "steps" in query(tab), "The range in the address")
    first, last = (float(bound) for bound in query(tab)["steps"][0].split(".."))
    assert 50 < first < 70 and 80 < last < 100
    tab.page.mouse.dblclick(box["x"] + box["width"] / 2, middle)
    tab.wait(lambda: "steps" not in query(tab) and shown_range(tab)[1] > 140, "Everything")


def test_saves_pictures_and_data(open_tab: OpenTab, path: str, tmp_path: Path) -> None:
    tab = open_tab()
    tab.open(f"{path}?steps=40..49")
    wait_ready(tab)
    figure = tab.page.locator("#panels")
    files = {}
    for name in ("Save as PNG", "Save as SVG", "Data as CSV", "Data as JSON"):
        figure.locator(".figure__tools summary").click()
        with tab.page.expect_download() as download:
            figure.locator(".menu__list").get_by_text(name).click()
        file = tmp_path / download.value.suggested_filename
        download.value.save_as(file)
        files[name] = file
        tab.page.keyboard.press("Escape")
    assert files["Save as PNG"].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    picture = files["Save as SVG"].read_text()
    assert picture.startswith("<svg") and "Loss" in picture
    header, *rows = csv.reader(io.StringIO(files["Data as CSV"].read_text()))
    assert header[0] == "step" and [row[0] for row in rows] == [str(step) for step in range(40, 50)]
    assert json.loads(files["Data as JSON"].read_text())["columns"][0]["values"] == list(range(40, 50))


def test_a_link_to_a_chart_leads_to_this_chart(open_tab: OpenTab, path: str) -> None:
    tab = open_tab()
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.open(f"{path}?steps=40..49")
    wait_ready(tab, "panels")
    tab.page.locator("#panels .figure__tools summary").click()
    tab.page.locator("#panels").get_by_role("button", name="Copy link to this view").click()
    tab.page.locator("#panels").get_by_text("Copied").wait_for()
    assert tab.page.evaluate("navigator.clipboard.readText()") == f"{tab.url}{path}?steps=40..49#panels"


def test_a_chart_is_read_and_zoomed_with_the_keyboard(open_tab: OpenTab, path: str) -> None:
    tab = open_tab()
    tab.open(path)
    wait_ready(tab)
    tab.page.locator("#panels .figure__plot").focus()
    value = tab.page.locator("#panels .figure__value")
    tab.page.keyboard.press("ArrowRight")
    assert value.inner_text().startswith("step 0, ")
    for _ in range(4):
        tab.page.keyboard.press("PageDown")
    assert value.inner_text().startswith("step 80, ") and "gpt fp8 frozen scale" in value.inner_text()
    tab.page.keyboard.press("+")
    tab.wait(lambda: "steps" in query(tab), "Zooming")
    first, last = (float(bound) for bound in query(tab)["steps"][0].split(".."))
    assert first < 80 < last and last - first == pytest.approx(78, abs=8)
    tab.page.keyboard.press("0")
    tab.wait(lambda: "steps" not in query(tab), "Showing everything")


def test_new_rows_are_drawn_and_a_lost_connection_catches_up(
    open_tab: OpenTab, seeded: Seeded, path: str
) -> None:
    tab = open_tab()
    recorder = Recorder(run=seeded.faulty, rank=1)
    tab.open(f"{path}?panels.smooth=0")
    wait_ready(tab)
    live = tab.page.locator("[data-live]")
    tab.wait(lambda: live.get_attribute("data-state") == "live", "Connecting")

    def add(step: int) -> None:
        recorder.rows([step], {"loss": [2.5]})
        notifications.run_changed(seeded.faulty.id, seeded.faulty.project_id, "rows", step)

    add(170)
    tab.wait(lambda: last_step(tab) == 170, "Drawing the new row")
    # The stream breaks and cannot be opened again for a while; its events are lost.
    tab.page.route("**/events?*", lambda route: route.abort())
    tab.page.evaluate("dispatchEvent(new Event('pagehide'))")
    tab.page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true}))")
    tab.wait(lambda: live.get_attribute("data-state") == "waiting", "Losing the connection")
    add(180)
    tab.page.unroute("**/events?*")
    tab.wait(lambda: live.get_attribute("data-state") == "live" and last_step(tab) == 180, "Catching up")
    tab.console_errors.clear()


def test_a_chart_is_printed_as_wide_as_the_page_and_on_white(open_tab: OpenTab, path: str) -> None:
    tab = open_tab(theme="dark")
    tab.open(path)
    wait_ready(tab)
    plot = tab.page.locator("#panels .figure__plot")
    picture = plot.locator(".main-svg").first
    on_screen = picture.get_attribute("width")
    tab.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    # Of a picture as wide as the screen, the texts would be half as large.
    assert str(picture.get_attribute("viewBox")).startswith("0 0 900 ") and float(on_screen or 0) > 1000
    tab.page.emulate_media(media="print")
    assert "invert" in plot.evaluate("tag => getComputedStyle(tag).filter")
    # The card is narrower than on the screen, as on paper.
    plot.evaluate("tag => { tag.closest('.card').style.width = '500px'; }")
    widths = picture.evaluate("tag => [tag.getBoundingClientRect().width, tag.closest('.card').clientWidth]")
    assert 300 < widths[0] <= widths[1]
    tab.page.emulate_media(media="screen")
    tab.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert picture.get_attribute("viewBox") is None
    plot.evaluate("tag => tag.closest('.card').removeAttribute('style')")
    tab.wait(lambda: picture.get_attribute("width") == on_screen, "Drawing as wide as the screen")


def test_two_tabs_of_one_browser_both_follow_a_run(open_tab: OpenTab, seeded: Seeded, path: str) -> None:
    first = open_tab()
    second = Tab(first.page.context.new_page(), first.url)
    recorder = Recorder(run=seeded.faulty, rank=1)
    for tab in (first, second):
        tab.open(f"{path}?panels.smooth=0")
        wait_ready(tab)
        live = tab.page.locator("[data-live]")
        tab.wait(lambda live=live: live.get_attribute("data-state") == "live", "Connecting")  # type: ignore[misc]
    for step in (170, 175):
        recorder.rows([step], {"loss": [2.5]})
        notifications.run_changed(seeded.faulty.id, seeded.faulty.project_id, "rows", step)
        for tab in (first, second):
            tab.wait(lambda tab=tab, step=step: last_step(tab) == step, "Drawing the new row")  # type: ignore[misc]


def test_a_range_without_values_keeps_the_chart(open_tab: OpenTab, path: str) -> None:
    tab = open_tab()
    tab.open(path)
    wait_ready(tab)
    relayout(tab, 400, 500)
    note = tab.page.locator("#panels .figure__note")
    tab.wait(lambda: note.inner_text() == "No values in this range", "Saying that there is nothing")
    assert state(tab) == "ready"
    tab.page.locator("#panels").get_by_role("button", name="Show all").click()
    tab.wait(lambda: not note.inner_text() and shown_range(tab)[1] < 200, "Showing everything")
