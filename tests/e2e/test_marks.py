"""Marks of a run's charts: what a click, a key and a finger do with them, and notes at steps."""

from __future__ import annotations

import re

import pytest
from dashboard.helpers.seeding import Seeded, seed_project
from e2e.helpers.accessibility import violations
from e2e.helpers.tabs import OpenTab, Tab
from helpers.live_servers import Server
from playwright.sync_api import expect

from fp8scope_dashboard.accounts.models import User
from fp8scope_dashboard.runs.models import StepNote
from fp8scope_dashboard.runs.notes import add_step_note

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

MARKS = """id => document.querySelector(`#${id} .figure__plot`)?.data
    ?.filter((trace) => trace.meta?.addresses).map((trace) => [trace.name, trace.x.length]) ?? []"""
# The place in the window of a step at the height of the marks, or of a share of the chart's height.
PLACE = """([id, step, share]) => {
    const plot = document.querySelector(`#${id} .figure__plot`);
    const { xaxis, yaxis, _size } = plot._fullLayout;
    const box = plot.getBoundingClientRect();
    const marks = plot._fullData.find((trace) => trace.meta?.addresses);
    const top = share === null ? yaxis._offset + yaxis.d2p(marks.y[0]) : _size.t + share * _size.h;
    return [box.left + xaxis._offset + xaxis.d2p(step), box.top + top];
}"""


@pytest.fixture
def seeded(server: Server) -> Seeded:
    return seed_project(server.project, 150)


@pytest.fixture
def path(server: Server, seeded: Seeded) -> str:
    return f"/p/{server.project.slug}/runs/{seeded.faulty.id}/"


def ready(tab: Tab, name: str = "panels") -> None:
    tab.draw(tab.page.locator(f"#{name}"))


def marks(tab: Tab, name: str = "panels") -> dict[str, int]:
    return dict(tab.page.evaluate(MARKS, name))


def place(tab: Tab, step: float, share: float | None, name: str = "panels") -> tuple[float, float]:
    x, y = tab.page.evaluate(PLACE, [name, step, share])
    return x, y


def hovered(tab: Tab, step: int) -> str:
    """What the chart tells of a mark below the pointer. A chart that is drawn again forgets the pointer."""
    x, y = place(tab, step, None)
    tab.page.mouse.move(x, y - 3)
    tab.page.mouse.move(x, y)
    return tab.page.locator("#panels .hoverlayer").text_content() or ""


def test_it_works(open_tab: OpenTab, path: str, seeded: Seeded) -> None:
    """A click on a step adds a note there, a click on its mark opens it, and a switch hides all marks."""
    tab = open_tab()
    tab.open(path)
    ready(tab)
    page = tab.page
    assert "alert" in marks(tab) and "note" not in marks(tab)
    page.mouse.click(*place(tab, 40, 0.2))
    callout = page.get_by_role("group", name=re.compile(r"^Step \d+$"))
    expect(callout).to_be_visible()
    shown = int(callout.get_attribute("aria-label").split()[1])  # type: ignore[union-attr]
    assert abs(shown - 40) <= 2
    assert violations(page, within=".figure__callout") == []
    tab.screenshot("chart with a callout")
    callout.get_by_role("link", name="Add a note here").click()
    dialog = page.get_by_role("dialog", name="Note at a step")
    expect(dialog.get_by_label("Step")).to_have_value(str(shown))
    assert violations(page, within="#note-dialog") == []
    tab.screenshot("form of a note")
    page.keyboard.type("Halved the learning rate.")
    dialog.get_by_role("button", name="Save the note").click()
    expect(dialog).to_be_hidden()
    expect(page.get_by_text(f"The note at step {shown} is saved.")).to_be_visible()
    tab.wait(lambda: marks(tab).get("note") == 1, "Drawing the mark")
    assert StepNote.objects.get().text == "Halved the learning rate."

    tab.wait(lambda: "Halved the learning rate." in hovered(tab, shown), "Telling what the mark says")
    tab.show(1440, "dark")
    tab.screenshot("dark chart with a note")
    ready(tab)
    page.mouse.click(*place(tab, shown, None))
    page.wait_for_url(f"**?tab=notes#step-note-{StepNote.objects.get().pk}")
    page.go_back()
    ready(tab)
    alert = page.evaluate(
        "document.querySelector('#panels .figure__plot').data.find((trace) => trace.name === 'alert').x[0]"
    )
    page.mouse.click(*place(tab, alert, None))
    page.wait_for_url(re.compile(r"/alerts/\d+/$"))
    page.go_back()
    ready(tab)
    page.get_by_label("Marks").uncheck()
    tab.wait(lambda: marks(tab) == {}, "Hiding the marks")
    assert "panels.marks=0" in page.url


def test_a_drag_and_a_double_click_zoom_and_open_nothing(open_tab: OpenTab, path: str) -> None:
    tab = open_tab()
    tab.open(path)
    ready(tab)
    page = tab.page
    page.mouse.move(*place(tab, 30, 0.1))
    page.mouse.down()
    page.mouse.move(*place(tab, 60, 0.1), steps=4)
    page.mouse.up()
    tab.wait(lambda: "steps=" in page.url, "Zooming")
    expect(page.locator(".figure__callout")).to_have_count(0)
    ready(tab)
    page.mouse.dblclick(*place(tab, 45, 0.1))
    tab.wait(lambda: "steps=" not in page.url, "Showing all steps")
    expect(page.locator(".figure__callout")).to_have_count(0)


def test_notes_without_a_mouse_on_a_narrow_screen(open_tab: OpenTab, path: str, seeded: Seeded) -> None:
    """Enter at a step that the arrow keys have reached; and the menu of a chart, where the step is typed."""
    tab = open_tab(width=390)
    tab.open(f"{path}?tab=charts")
    name = tab.page.locator(".figure[data-marks]").first.get_attribute("id") or ""
    ready(tab, name)
    page = tab.page
    page.locator(f"#{name} .figure__plot").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    reached = page.locator(".figure__callout strong").inner_text()
    page.keyboard.press("Escape")
    expect(page.locator(".figure__callout")).to_have_count(0)
    assert page.evaluate("document.activeElement.className").split()[0] == "figure__plot"
    page.keyboard.press("Enter")
    assert page.locator(".figure__callout strong").inner_text() == reached == "Step 2"
    tab.screenshot("narrow chart with a callout")
    assert not tab.is_too_wide()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Note at a step")
    expect(dialog.get_by_label("Note", exact=True)).to_be_focused()
    page.keyboard.type("From the keyboard.")
    tab.screenshot("narrow form of a note")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    tab.wait(lambda: marks(tab, name).get("note") == 1, "Drawing the mark")

    page.locator(f"#{name} .figure__tools summary").click()
    page.locator(f"#{name}").get_by_role("link", name="Add a note at a step").click()
    expect(dialog.get_by_label("Step")).to_be_focused()
    page.keyboard.type("120")
    dialog.get_by_label("Note", exact=True).fill("Typed.")
    dialog.get_by_role("button", name="Save the note").click()
    tab.wait(lambda: marks(tab, name).get("note") == 2, "Drawing the mark")
    assert {note.step for note in StepNote.objects.all()} >= {120}
    assert not tab.is_too_wide()


def test_marks_are_live(open_tab: OpenTab, path: str, seeded: Seeded) -> None:
    """A note of somebody else appears, in the charts and in the list."""
    tab, other = open_tab(), open_tab()
    tab.open(path)
    ready(tab)
    other.open(f"{path}?tab=notes")
    note = add_step_note(seeded.faulty, 33, "Theirs.", User.objects.create_user("bob"))
    tab.wait(lambda: marks(tab).get("note") == 1, "Drawing the mark")
    expect(other.page.locator(f"#{note.anchor}")).to_contain_text("Theirs.")
