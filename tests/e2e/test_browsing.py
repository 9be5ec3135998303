"""Finding and comparing runs in a real browser, with the mouse, and with the keyboard alone."""

from __future__ import annotations

import re

import pytest
from dashboard.helpers.many_runs import fill_project
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.seeding import Seeded, seed_project
from e2e.helpers.accessibility import violations
from e2e.helpers.tabs import OpenTab, Tab
from helpers.live_servers import Server
from playwright.sync_api import Route, expect

from fp8scope_dashboard.runs.models import Run, SavedView

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def seeded(server: Server) -> Seeded:
    return seed_project(server.project, 150)


def names(tab: Tab) -> list[str]:
    return tab.page.locator("#runs .runs__name").all_inner_texts()


def open_list(tab: Tab, server: Server, query: str = "") -> None:
    tab.open(f"/p/{server.project.slug}/{query}")
    tab.page.locator("#runs .runs__name, #runs .group__toggle").first.wait_for()


def test_it_works(open_tab: OpenTab, server: Server, seeded: Seeded) -> None:
    """Filter by precision, and see in what the configurations of two runs differ: two and three clicks."""
    tab = open_tab()
    open_list(tab, server)
    tab.page.locator(".chip", has_text="FP8").click()
    expect(tab.page.locator("#runs .runs__name")).to_have_count(2)
    assert "precision%3Afp8" in tab.page.url
    expect(tab.page.locator("#find-text")).to_have_value("precision:fp8")
    boxes = tab.page.locator("#runs [name=runs]")
    boxes.nth(0).check()
    boxes.nth(1).check()
    tab.page.locator("#bulk").get_by_role("button", name="Compare").click()
    tab.page.get_by_role("heading", name="Compare", exact=True).wait_for()
    expect(tab.page.locator("#configuration .differs").first).to_be_visible()
    tab.draw_everything()
    tab.page.go_back()
    expect(tab.page.locator("#runs .runs__name")).to_have_count(2)


def test_with_the_keyboard_alone(open_tab: OpenTab, server: Server, seeded: Seeded) -> None:
    """Search with suggestions, select a range, and compare."""
    tab = open_tab()
    open_list(tab, server)
    page = tab.page
    page.keyboard.press("/")
    page.keyboard.type("prec", delay=20)
    expect(page.locator("#find-list [role=option]").first).to_contain_text("precision:")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("#find-list [role=option]").first).to_contain_text("precision:bf16")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#find-text")).to_have_attribute("aria-activedescendant", "find-list-0")
    page.keyboard.press("Tab")
    expect(page.locator("#runs .runs__name")).to_have_count(3)
    expect(page.locator("#find-text")).to_have_value("precision:bf16 ")
    page.keyboard.press("Tab")
    page.keyboard.press("j")
    page.keyboard.press("x")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("j")
    page.keyboard.press("Shift+X")
    expect(page.locator("[data-selected]")).to_have_text("3 selected")
    page.keyboard.press("c")
    page.get_by_role("heading", name="Compare", exact=True).wait_for()
    expect(page).to_have_url(re.compile("(.*runs=){3}"))
    page.go_back()
    page.locator("#runs .runs__name").first.wait_for()
    page.keyboard.press("?")
    expect(page.locator("#shortcuts")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("/runs/[0-9a-f-]{36}/"))


def test_shortcuts_of_one_letter_can_be_switched_off(
    open_tab: OpenTab, server: Server, seeded: Seeded
) -> None:
    tab = open_tab()
    open_list(tab, server)
    tab.page.get_by_role("button", name="Keyboard").click()
    tab.page.get_by_label("Shortcuts of one letter are on").uncheck()
    tab.page.get_by_role("button", name="Close").click()
    tab.page.reload()
    tab.page.locator("#runs .runs__name").first.wait_for()
    tab.page.keyboard.press("j")
    assert tab.page.locator("#runs tr.is-current").count() == 0
    tab.page.get_by_role("button", name="Keyboard").click()
    assert not tab.page.get_by_label("Shortcuts of one letter are on").is_checked()


@pytest.mark.parametrize("act", ["Next", "search"])
def test_a_refresh_does_not_take_the_place_of_what_was_asked_for(
    open_tab: OpenTab, server: Server, act: str
) -> None:
    fill_project(server.project, 120)
    tab = open_tab()
    open_list(tab, server)
    page = tab.page
    held: list[Route] = []
    page.route(re.compile(r"/p/[^/]+/\?.*(page=2|q=fp8)"), lambda route: held.append(route))
    if act == "Next":
        page.get_by_role("link", name="Next").click()
    else:
        page.locator("#find-text").fill("fp8")
    tab.wait(lambda: bool(held), "The request")
    with page.expect_response(re.compile(r"/p/[^/]+/$")):
        page.evaluate("htmx.trigger('#runs', 'fp8:refresh')")
    page.wait_for_function("() => !document.querySelector('#runs.htmx-request')")
    held[0].continue_()
    shown = page.locator("nav", has_text="Page 2 of 3") if act == "Next" else page.get_by_text("of 120 runs")
    expect(shown).to_be_visible()


def test_the_selection_survives_refreshes_pages_and_searches(open_tab: OpenTab, server: Server) -> None:
    fill_project(server.project, 120)
    tab = open_tab()
    open_list(tab, server)
    page = tab.page
    page.locator("#runs [name=runs]").nth(1).check()
    page.evaluate("htmx.trigger('#runs', 'fp8:refresh')")
    page.wait_for_load_state("networkidle")
    expect(page.locator("#runs [name=runs]").nth(1)).to_be_checked()
    page.get_by_role("link", name="Next").click()
    expect(page.locator("nav", has_text="Page 2 of 3")).to_be_visible()
    expect(page.locator("[data-selected]")).to_have_text("1 selected, 1 not shown here")
    page.locator("#runs [name=runs]").first.check()
    page.locator("#bulk [name=tag]").fill("chosen")
    page.locator("#bulk [name=tag]").press("Enter")
    expect(page.locator(".notice--success")).to_contain_text("Tagged 2 runs “chosen”.")
    assert Run.objects.filter(tags__contains=["chosen"]).count() == 2
    assert "page=2" in page.url


def test_deletes_all_that_match_and_undoes_it(open_tab: OpenTab, server: Server) -> None:
    fill_project(server.project, 120)
    tab = open_tab()
    open_list(tab, server, "?q=precision:fp8")
    page = tab.page
    page.get_by_label("Select all runs of this page").check()
    page.get_by_role("button", name="Select all 95 that match").click()
    expect(page.locator("[data-selected]")).to_have_text("All 95 that match")
    page.locator("#bulk").get_by_role("button", name="Delete").click()
    expect(page.locator(".notice--success")).to_contain_text("Deleted 95 runs.")
    assert Run.objects.count() == 25
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".notice--success")).to_contain_text("Undone for 95 runs.")
    assert Run.objects.count() == 120


def test_a_view_keeps_the_order_that_was_chosen_after_loading(
    open_tab: OpenTab, server: Server, seeded: Seeded
) -> None:
    tab = open_tab()
    open_list(tab, server)
    tab.page.locator("#runs thead").get_by_role("link", name="Last loss").click()
    tab.wait(lambda: "sort=loss" in tab.page.url, "The new address")
    expect(tab.page.locator("th[aria-sort=ascending]")).to_have_text("Last loss")
    ordered = names(tab)
    tab.page.locator("summary", has_text="Views").click()
    tab.page.get_by_label("Save this list as").fill("by loss")
    tab.page.get_by_role("button", name="Save", exact=True).click()
    expect(tab.page.locator(".notice--success")).to_contain_text("Saved the view “by loss”")
    assert SavedView.objects.get().query == "sort=loss" and names(tab) == ordered


def test_groups_open_in_place(open_tab: OpenTab, server: Server, seeded: Seeded) -> None:
    tab = open_tab()
    open_list(tab, server, "?by=group")
    toggle = tab.page.locator(".group__toggle", has_text="bf16")
    assert toggle.get_attribute("aria-expanded") == "false"
    toggle.click()
    expect(tab.page.locator("#runs .runs__name")).to_have_count(3)
    assert "open=group%3Abf16" in tab.page.url
    tab.page.get_by_label("Select the runs of this group").check()
    expect(tab.page.locator("[data-selected]")).to_have_text("3 selected")
    tab.page.go_back()
    expect(tab.page.locator("#runs .runs__name")).to_have_count(0)


def test_the_chooser_finds_old_runs(open_tab: OpenTab, server: Server, seeded: Seeded) -> None:
    fill_project(server.project, 100)
    old = make_run(server.project, "very old", tags=["old"], created_at="2020-01-01T00:00:00Z")
    Recorder(run=old).rows(range(30), {"loss": [1.0] * 30})
    tab = open_tab()
    tab.open(f"/p/{server.project.slug}/compare/?runs={seeded.healthy.id}")
    tab.page.get_by_label("Find runs to compare").fill("tag:old")
    box = tab.page.get_by_role("checkbox", name="very old")
    box.check()
    tab.wait(lambda: str(old.id) in tab.page.url, "The new address")
    tab.page.get_by_label("Find runs to compare").fill("precision:bf16")
    expect(tab.page.locator("#choices")).to_contain_text("found")
    expect(box).to_be_checked()
    tab.draw_everything()


def test_eyes_choose_curves_and_colours_stay(open_tab: OpenTab, server: Server, seeded: Seeded) -> None:
    """The chart of chosen runs, an eye, the colour of a run on another page, and the density of rows."""
    tab = open_tab()
    open_list(tab, server)
    page = tab.page
    page.get_by_role("button", name="Chart", exact=True).click()
    lines = page.locator("#overlay-chart .legend .traces")
    expect(lines).to_have_count(5)
    # The symbols of alerts are diamonds, drawn after the crosses of values that are not finite.
    marks = page.locator("#overlay-chart .scatterlayer .trace:last-child path.point")
    expect(marks).to_have_count(4)
    tab.screenshot("list of runs with a chart with marks")
    # The symbols are small, and the chart has its own layer for the pointer.
    marked = marks.first.bounding_box()
    assert marked is not None
    page.mouse.click(marked["x"] + marked["width"] / 2, marked["y"] + marked["height"] / 2)
    page.wait_for_url(re.compile(r"/alerts/\d+/$"))
    page.go_back()
    expect(lines).to_have_count(5)
    page.locator("#overlay").get_by_label("Marks").uncheck()
    names = "document.querySelector('#overlay-chart .figure__plot').data?.map((trace) => trace.name)"
    tab.wait(lambda: "alert" not in (page.evaluate(names) or ["alert"]), "Hiding the marks")
    run = seeded.healthy
    page.locator(f"[data-eye='{run.pk}']").click()
    expect(lines).to_have_count(4)
    page.locator(f"[data-colour-of='{run.pk}']").click()
    page.get_by_role("button", name="Cyan", exact=True).click()
    expect(page.locator(f"[data-run-dot='{run.pk}']")).to_have_class(re.compile("run-colour--10"))
    expect(page.locator(f"[data-colour-of='{run.pk}']")).to_be_focused()
    expect(page.locator(f"#spark-{run.pk}")).to_have_attribute("src", re.compile("slot=run-10"))
    assert not violations(page)
    page.reload()
    expect(lines).to_have_count(4)
    page.get_by_role("button", name="Comfortable").click()
    expect(page.locator(".runs--comfortable")).to_be_visible()


def test_settings_and_results(open_tab: OpenTab, server: Server, seeded: Seeded) -> None:
    """A point of the scatter plot opens its run."""
    for number, run in enumerate((seeded.healthy, *seeded.baselines)):
        Run.objects.filter(pk=run.pk).update(config={"lr": 1e-4 * (number + 1), "depth": 12 + number % 2})
    tab = open_tab()
    open_list(tab, server)
    page = tab.page
    page.get_by_role("link", name="Settings and results").click()
    page.locator("[name=setting]").select_option("config.lr")
    expect(page.locator("#scatter .point")).to_have_count(4)
    tab.draw_everything()
    page.locator("#parallel summary, form[data-controls=parallel] summary").first.click()
    page.get_by_role("checkbox", name="Precision").check()
    expect(page.locator("#parallel .xtick text")).to_have_count(4)
    box = page.locator("#scatter .point").first.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_url(re.compile("/runs/[0-9a-f-]{36}/"))
