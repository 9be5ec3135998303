"""Parts of an open page show every change, also one that comes while they are loading or in use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from dashboard.helpers.recording import Recorder, make_run
from e2e.helpers.tabs import REFRESHED_MS, OpenTab, Tab
from helpers.live_servers import Server
from playwright.sync_api import Route, expect

from fp8scope_dashboard import notifications
from fp8scope_dashboard.alerts.models import Alert
from fp8scope_dashboard.runs import console
from fp8scope_dashboard.runs.console import NewLine
from fp8scope_dashboard.runs.models import Run, Writer

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

LINES = "**/console/lines?*"
COUNT_CHANGES = """
    window.changes = 0;
    document.addEventListener("fp8:change", () => { window.changes += 1; });
"""


@pytest.fixture
def run(server: Server) -> Run:
    return make_run(server.project, "prints")


@pytest.fixture
def write(run: Run) -> Callable[[int, str], None]:
    writer = Writer.objects.get(uuid=Recorder(run=run).uuid)

    def store(number: int, text: str) -> None:
        console.store(run, writer, [NewLine(number, run.created_at, 1, "stdout", text)])

    store(0, "the first line")
    return store


@pytest.fixture
def tab(open_tab: OpenTab) -> Tab:
    tab = open_tab()
    tab.page.add_init_script(COUNT_CHANGES)
    return tab


def announced(tab: Tab, change: Callable[[], None]) -> None:
    """Make a change, and wait until the page has heard of it and would have asked for its content."""
    before = tab.page.evaluate("window.changes")
    change()
    tab.wait(lambda: tab.page.evaluate("window.changes") > before, "Hearing of the change")
    tab.page.wait_for_timeout(REFRESHED_MS)


def hold(tab: Tab, address: str) -> list[Callable[[], None]]:
    """Keep the first answer of this address back once the server has made it. Returns what releases it."""
    held: list[Callable[[], None]] = []

    def keep(route: Route) -> None:
        if held:
            route.continue_()
            return
        answer = route.fetch()
        held.append(lambda: route.fulfill(response=answer))

    tab.page.route(address, keep)
    return held


def test_a_change_while_the_part_is_loading(
    tab: Tab, run: Run, write: Callable[[int, str], None], server: Server
) -> None:
    tab.open_live(f"/p/{server.project.slug}/runs/{run.id}/?tab=console")
    held = hold(tab, LINES)
    write(1, "the second line")
    tab.wait(lambda: bool(held), "Asking for the second line")
    announced(tab, lambda: write(2, "the third line"))
    held[0]()
    expect(tab.page.locator(".console")).to_contain_text("the third line")


def test_a_change_while_the_part_is_held(
    tab: Tab, run: Run, write: Callable[[int, str], None], server: Server
) -> None:
    tab.open_live(f"/p/{server.project.slug}/runs/{run.id}/?tab=console")
    tab.page.get_by_label("Hold").check()
    announced(tab, lambda: write(1, "the second line"))
    expect(tab.page.locator(".console")).not_to_contain_text("the second line")
    tab.page.get_by_label("Hold").uncheck()
    expect(tab.page.locator(".console")).to_contain_text("the second line")


def test_a_change_while_a_tab_with_the_part_is_loading(
    tab: Tab, run: Run, write: Callable[[int, str], None], server: Server
) -> None:
    tab.open_live(f"/p/{server.project.slug}/runs/{run.id}/")
    held = hold(tab, "**/?tab=console*")
    tab.page.get_by_role("link", name="System", exact=True).click()
    tab.page.locator("[data-tab-link=console]").click()
    tab.wait(lambda: bool(held), "Asking for the tab")
    announced(tab, lambda: write(1, "the second line"))
    held[0]()
    expect(tab.page.locator(".console")).to_contain_text("the second line")


def test_a_change_that_the_server_cannot_show_at_once(
    tab: Tab, run: Run, write: Callable[[int, str], None], server: Server
) -> None:
    tab.open_live(f"/p/{server.project.slug}/runs/{run.id}/?tab=console")
    refused: list[str] = []

    def refuse(route: Route) -> None:
        if refused:
            route.continue_()
        else:
            refused.append(route.request.url)
            route.fulfill(status=503, body="busy")

    tab.page.route(LINES, refuse)
    write(1, "the second line")
    expect(tab.page.locator(".console")).to_contain_text("the second line")
    assert refused
    # The browser writes the status on the console.
    tab.console_errors.clear()


def test_a_change_before_the_page_is_connected(tab: Tab, run: Run, server: Server) -> None:
    waiting: list[Route] = []
    tab.page.route("**/events?*", lambda route: waiting.append(route))
    tab.open(f"/p/{server.project.slug}/alerts/")
    tab.wait(lambda: bool(waiting), "Asking for events")
    Alert.objects.create(
        run=run, kind="loss_spike", severity="warning", onset_step=1, step=2, message="It rises."
    )
    notifications.run_changed(run.id, run.project_id, "alert", 2)
    assert notifications.flush()
    waiting[0].continue_()
    # In the list and as a message.
    expect(tab.page.locator("#alerts")).to_contain_text("It rises.")
    expect(tab.page.locator("[data-toasts]")).to_contain_text("It rises.")
