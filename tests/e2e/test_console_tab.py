"""The console log in a browser: it grows while the run writes, and a line has an address."""

from __future__ import annotations

import pytest
from dashboard.helpers.recording import Recorder, make_run
from e2e.helpers.tabs import OpenTab
from helpers.live_servers import Server
from playwright.sync_api import Route, expect

from fp8scope_dashboard.runs import console
from fp8scope_dashboard.runs.console import NewLine
from fp8scope_dashboard.runs.models import ConsoleLine, Writer

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


def test_it_works(open_tab: OpenTab, server: Server) -> None:
    run = make_run(server.project, "prints")
    writer = Writer.objects.get(uuid=Recorder(run=run).uuid)

    def write(begin: int, *texts: str) -> None:
        lines = [NewLine(begin + i, run.created_at, 1, "stdout", text) for i, text in enumerate(texts)]
        console.store(run, writer, lines)

    write(0, *[f"step {number} loss 2.{number}" for number in range(300)])
    tab = open_tab()
    tab.open(f"/p/{server.project.slug}/runs/{run.id}/?tab=console")
    log = tab.page.locator(".console")
    expect(log).to_contain_text("step 299 loss")
    at_end = "log => log.scrollHeight - log.scrollTop - log.clientHeight < 24"
    tab.wait(lambda: log.evaluate(at_end), "Showing the end")
    # A new line, and the last state of one that is there.
    write(299, "99 %", "the newest line")
    expect(log).to_contain_text("the newest line")
    expect(log).to_contain_text("99 %")
    expect(log).not_to_contain_text("step 299 loss")
    tab.wait(lambda: log.evaluate(at_end), "Following the end")
    tab.screenshot("console")
    line = ConsoleLine.objects.get(number=150)
    tab.page.locator(f"#line-{line.pk} a").click()
    expect(tab.page.locator(f"#line-{line.pk}")).to_have_attribute("aria-current", "true")
    expect(tab.page.locator(f"#line-{line.pk}")).to_be_in_viewport()
    assert f"line={line.pk}" in tab.page.url


def test_lines_written_before_the_page_is_connected(open_tab: OpenTab, server: Server) -> None:
    run = make_run(server.project, "prints")
    writer = Writer.objects.get(uuid=Recorder(run=run).uuid)
    console.store(run, writer, [NewLine(0, run.created_at, 1, "stdout", "the first line")])
    tab = open_tab()
    waiting: list[Route] = []
    tab.page.route("**/events?*", lambda route: waiting.append(route))
    tab.open(f"/p/{server.project.slug}/runs/{run.id}/?tab=console")
    tab.wait(lambda: bool(waiting), "Asking for events")
    console.store(run, writer, [NewLine(1, run.created_at, 1, "stdout", "the second line")])
    waiting[0].continue_()
    expect(tab.page.locator(".console")).to_contain_text("the second line")
