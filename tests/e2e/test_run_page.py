"""The page of a run in a browser: what happened, the range of steps, tabs and notes."""

from __future__ import annotations

import re
from urllib.parse import parse_qs, urlsplit

import pytest
from dashboard.helpers.seeding import Seeded, seed_project
from e2e.helpers.tabs import OpenTab, Tab
from helpers.live_servers import Server
from playwright.sync_api import Route, expect

from fp8scope_dashboard.runs.models import Run

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

RANGE = "document.querySelector('#panels .figure__plot')?.layout?.xaxis?.range?.map(Math.round) ?? []"


@pytest.fixture
def seeded(server: Server) -> Seeded:
    return seed_project(server.project, 150)


def open_run(tab: Tab, run: Run, rest: str = "") -> None:
    tab.open(f"/p/{run.project.slug}/runs/{run.id}/{rest}")


def steps(tab: Tab) -> str:
    return parse_qs(urlsplit(tab.page.url).query).get("steps", [""])[0]


def shows(tab: Tab, first: int, last: int) -> None:
    tab.wait(lambda: tab.page.evaluate(RANGE) == [first, last], f"Showing the steps {first} to {last}")
    ready = tab.page.locator("#panels")
    tab.wait(lambda: ready.get_attribute("data-state") == "ready", "Drawing the panels")


def test_it_works(open_tab: OpenTab, seeded: Seeded) -> None:
    """A click on an onset shows the steps around it, in the panels, in the form and in the address."""
    tab = open_tab()
    open_run(tab, seeded.faulty)
    shows(tab, 0, 149)
    onset = tab.page.locator(".onset__zoom", has_text="loss is not finite")
    with tab.page.expect_request("**/figures/panels.json*first=102*") as request:
        onset.click()
    assert "last=152" in request.value.url
    shows(tab, 102, 152)
    assert steps(tab) == "102..152"
    expect(tab.page.get_by_label("First step").first).to_have_value("102")
    expect(onset).to_have_attribute("aria-current", "true")
    # The heat map follows.
    tab.page.locator("#tensors").scroll_into_view_if_needed()
    grid = tab.page.locator("#tensors [role=treegrid]")
    tab.wait(lambda: "steps 102–" in (grid.get_attribute("aria-label") or ""), "The map of these steps")


def test_a_typed_range_is_restored_on_reload(open_tab: OpenTab, seeded: Seeded) -> None:
    tab = open_tab()
    open_run(tab, seeded.faulty)
    shows(tab, 0, 149)
    tab.page.get_by_label("First step").first.fill("40")
    tab.page.get_by_label("Last step").first.fill("60")
    tab.page.get_by_role("button", name="Show", exact=True).first.click()
    shows(tab, 40, 60)
    tab.page.reload()
    shows(tab, 40, 60)
    expect(tab.page.get_by_label("Last step").first).to_have_value("60")
    tab.page.get_by_role("link", name="All steps").first.click()
    shows(tab, 0, 149)
    assert steps(tab) == ""


def test_a_range_that_ends_before_it_begins_is_refused(open_tab: OpenTab, seeded: Seeded) -> None:
    tab = open_tab()
    open_run(tab, seeded.faulty)
    shows(tab, 0, 149)
    tab.page.get_by_label("First step").first.fill("60")
    last = tab.page.get_by_label("Last step").first
    last.fill("40")
    tab.page.get_by_role("button", name="Show", exact=True).first.click()
    assert "above the first" in str(last.evaluate("(field) => field.validationMessage"))
    assert steps(tab) == ""
    # An empty field is the end of the run.
    last.fill("")
    tab.page.get_by_role("button", name="Show", exact=True).first.click()
    shows(tab, 60, 149)


def test_back_and_forward(open_tab: OpenTab, seeded: Seeded) -> None:
    tab = open_tab()
    open_run(tab, seeded.faulty)
    shows(tab, 0, 149)
    tab.page.locator(".onset__zoom", has_text="loss is not finite").click()
    shows(tab, 102, 152)
    tab.page.get_by_role("link", name="Details", exact=True).click()
    tab.page.get_by_role("heading", name=re.compile("differences? to")).wait_for()
    assert "tab=configuration" in tab.page.url and steps(tab) == "102..152"
    tab.page.go_back()
    shows(tab, 102, 152)
    tab.page.go_back()
    shows(tab, 0, 149)
    tab.page.go_forward()
    shows(tab, 102, 152)


def test_tabs_with_the_keyboard(open_tab: OpenTab, seeded: Seeded) -> None:
    tab = open_tab()
    open_run(tab, seeded.faulty)
    focused = tab.page.locator(":focus")
    tab.page.get_by_role("link", name="Overview").focus()
    tab.page.keyboard.press("ArrowRight")
    expect(focused).to_have_text("Charts")
    tab.page.keyboard.press("End")
    expect(focused).to_have_text("Details")
    tab.page.keyboard.press("ArrowLeft")
    expect(focused).to_have_text("System")
    tab.page.keyboard.press("Enter")
    tab.page.get_by_role("link", name="Ranks", exact=True).wait_for()
    # The focus stays on the tab, so that the next arrow key goes on from there.
    expect(focused).to_have_text("System")
    expect(focused).to_have_attribute("aria-current", "page")
    assert "tab=efficiency" in tab.page.url
    # Tab leads to the parts of the group, among which the arrow keys move, too.
    tab.page.keyboard.press("Tab")
    tab.page.keyboard.press("Tab")
    tab.page.keyboard.press("End")
    expect(focused).to_have_text("Environment")
    tab.page.keyboard.press("Enter")
    expect(focused).to_have_text("Environment")
    assert "tab=environment" in tab.page.url


def test_a_tab_opens_with_the_keyboard_while_parts_of_the_page_are_loading(
    open_tab: OpenTab, seeded: Seeded
) -> None:
    tab = open_tab()
    held: list[Route] = []
    tab.page.route("**/tensors/ranking*", lambda route: held.append(route))
    open_run(tab, seeded.faulty)
    tab.wait(lambda: held, "The request of the ranking")
    tab.page.get_by_role("link", name="Details", exact=True).focus()
    tab.page.keyboard.press("Enter")
    tab.page.get_by_role("link", name="Notes", exact=True).wait_for()
    expect(tab.page.locator(":focus")).to_have_text("Details")
    for route in held:
        route.abort()


def test_the_map_of_tensors_works_after_a_change_of_tabs(open_tab: OpenTab, seeded: Seeded) -> None:
    tab = open_tab()
    open_run(tab, seeded.faulty, "?tab=notes")
    tab.page.get_by_role("link", name="Tensors").click()
    row = tab.page.locator("#tensors [role=treegrid] [role=row]").first
    row.wait_for()
    tab.page.get_by_role("link", name="Overview").click()
    shows(tab, 0, 149)
    tab.page.locator("#tensors").scroll_into_view_if_needed()
    row.wait_for()


def test_the_configuration_difference_is_one_click_away(open_tab: OpenTab, seeded: Seeded) -> None:
    tab = open_tab()
    open_run(tab, seeded.healthy)
    tab.page.get_by_role("link", name="Details", exact=True).click()
    table = tab.page.get_by_role("region", name="Differing entries")
    table.wait_for()
    assert "precision" in table.inner_text() and "bf16" in table.inner_text()


def test_a_note_is_previewed_and_saved(open_tab: OpenTab, seeded: Seeded) -> None:
    tab = open_tab()
    open_run(tab, seeded.faulty, "?tab=notes")
    page = tab.page
    page.get_by_text("Write", exact=True).click()
    page.get_by_label("Text, in Markdown").fill("**Frozen** at 127 <script>alert(1)</script>")
    page.get_by_role("button", name="Preview").click()
    page.locator("#note-preview strong").wait_for()
    page.get_by_role("button", name="Save").click()
    page.locator("#note .prose strong", has_text="Frozen").first.wait_for()
    assert "<script>alert(1)</script>" in page.locator("#note .prose").first.inner_text()
    page.get_by_label("Address").fill("s3://bucket/run/step-100")
    page.get_by_role("button", name="Add link").click()
    page.locator(".artefacts code", has_text="s3://bucket/run/step-100").wait_for()


def test_a_failed_run(open_tab: OpenTab, seeded: Seeded) -> None:
    error = 'Traceback (most recent call last):\n  File "train.py", line 3\nFloatingPointError: loss is NaN'
    Run.objects.filter(pk=seeded.faulty.pk).update(state="failed", error=error)
    tab = open_tab(390, "dark")
    open_run(tab, seeded.faulty)
    notice = tab.page.get_by_role("alert").first
    assert "FloatingPointError: loss is NaN" in notice.inner_text()
    assert not notice.locator("pre").is_visible()
    notice.get_by_text("Whole traceback").click()
    assert notice.locator("pre").is_visible()
    tab.draw_everything()
    tab.screenshot("failed-dark-390")


def test_works_without_scripts(open_tab: OpenTab, seeded: Seeded, server: Server) -> None:
    tab = open_tab()
    browser = tab.page.context.browser
    assert browser is not None
    plain = browser.new_context(
        java_script_enabled=False, storage_state=tab.page.context.storage_state(), base_url=server.url
    )
    try:
        page = plain.new_page()
        page.goto(f"/p/{server.project.slug}/runs/{seeded.faulty.id}/?tab=environment")
        page.get_by_role("link", name="Details", exact=True).click()
        page.get_by_role("heading", name=re.compile("differences? to")).wait_for()
        page.get_by_role("link", name="Overview").click()
        page.get_by_label("First step").first.fill("40")
        page.get_by_role("button", name="Show", exact=True).first.click()
        assert "steps=40..149" in page.url
        page.locator(".onset__zoom", has_text="loss is not finite").click()
        assert "steps=102..152" in page.url
    finally:
        plain.close()
