"""The browser sends requests to this server only, even if everything is clicked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dashboard.helpers.seeding import Seeded, seed_project
from e2e.helpers.tabs import OpenTab, Tab
from helpers.live_servers import Server

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def seeded(server: Server) -> Seeded:
    return seed_project(server.project, 150)


@pytest.fixture
def tab(open_tab: OpenTab) -> Iterator[Tab]:
    yield open_tab()


def press_everything(tab: Tab) -> list[str]:
    """Press every button and link in the menus of all charts; returns their texts."""
    titles = []
    for figure in tab.page.locator("[data-figure][data-state=ready]").all():
        figure.scroll_into_view_if_needed()
        for button in figure.locator(".figure__tools :is(button, a)").all():
            titles.append(button.text_content() or "?")
            button.dispatch_event("click")
    tab.page.wait_for_timeout(300)
    return titles


def test_it_works(tab: Tab, server: Server, seeded: Seeded) -> None:
    own = f"/p/{server.project.slug}/"
    run = f"{own}runs/{seeded.faulty.id}/"
    titles: set[str] = set()
    for path in (
        own,
        run,
        f"{run}data/",
        *(f"{own}{rest}/" for rest in ("compare", "evaluations", "alerts", "settings")),
    ):
        tab.open(path)
        tab.draw_everything()
        titles |= set(press_everything(tab))
        tab.page.evaluate(
            "document.querySelectorAll('details > summary').forEach((summary) => summary.click())"
        )
    expected = {
        "Show all",
        "Save as PNG",
        "Save as SVG",
        "Data as CSV",
        "Data as JSON",
        "Add a note at a step",
    }
    assert titles - {"Copied", "Copy link to this view", "Copy the address above"} == expected
    assert tab.outside == []
    assert len(tab.page.context.pages) == 1, "a window was opened"


def test_records_an_outside_address(tab: Tab, server: Server) -> None:
    tab.open("/")
    tab.page.evaluate("open('http://outside.invalid/newchart')")
    tab.wait(lambda: tab.outside, "Seeing the window's address")
    tab.outside.clear()


def test_a_page_can_neither_fetch_nor_post_outside(tab: Tab, server: Server) -> None:
    tab.open("/")
    script = """async () => {
        const tried = await fetch("http://outside.invalid/fetch").then(() => "sent", () => "refused");
        const beacon = navigator.sendBeacon("http://outside.invalid/beacon", "chart");
        const form = Object.assign(document.createElement("form"), {method: "post", action: "http://outside.invalid/form"});
        document.body.append(form);
        form.submit();
        await new Promise((done) => setTimeout(done, 300));
        return tried;
    }"""
    assert tab.page.evaluate(script) == "refused"
    assert [url for url in tab.outside if "/form" in url] == []
    tab.outside.clear()
    assert len(tab.console_errors) >= 2 and all(
        "Content Security Policy" in error for error in tab.console_errors
    )
    tab.console_errors.clear()


def test_charts_have_no_server_to_upload_to(tab: Tab, server: Server, seeded: Seeded) -> None:
    tab.open(f"/p/{server.project.slug}/runs/{seeded.healthy.id}/")
    tab.draw_everything()
    context = tab.page.evaluate(
        "((context) => Object.fromEntries(['showSendToCloud', 'plotlyServerURL', 'topojsonURL']"
        ".map((name) => [name, context[name]])))(document.querySelector('#panels .figure__plot')._context)"
    )
    assert context == {"showSendToCloud": False, "plotlyServerURL": "", "topojsonURL": ""}
