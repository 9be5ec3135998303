"""Alerts in a real browser: acknowledging, a rule that is tried and saved, and a browser notification."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from e2e.helpers.accessibility import violations
from e2e.helpers.tabs import OpenTab, Tab
from helpers.live_servers import Server, Worker
from playwright.sync_api import expect

from fp8scope_dashboard.alerts.models import Alert, Rule
from fp8scope_dashboard.alerts.services import evaluate
from fp8scope_dashboard.runs.models import Run

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

# Headless browsers show no notifications: this one notes those that the page makes.
NOTIFICATIONS = """
    window.shown = [];
    const Real = window.Notification;
    window.Notification = class extends EventTarget {
        constructor(title, options) { super(); this.title = title; window.shown.push({ title, ...options }); }
        close() {}
        static get permission() { return Real.permission; }
        static requestPermission() { window.asked = true; return Real.requestPermission(); }
    };
"""


def diverge(server: Server, name: str = "a live run") -> Run:
    """A run whose loss becomes NaN; its alert is open afterwards, and open pages know of it."""
    run = make_run(server.project, name)
    loss = np.full(60, 2.0)
    loss[40:] = np.nan
    Recorder(run=run).rows(np.arange(60), {"loss": loss})
    # A worker may have evaluated it already.
    evaluate(run.id)
    assert Alert.objects.filter(run=run).exists()
    return run


def shown(tab: Tab) -> list[dict[str, Any]]:
    notifications: list[dict[str, Any]] = tab.page.evaluate("window.shown")
    return notifications


def test_a_notification_of_the_browser(open_tab: OpenTab, server: Server) -> None:
    """It is asked for only on a click, and comes while the page is hidden too."""
    diverge(server, "the first run")
    tab = open_tab()
    tab.page.context.grant_permissions(["notifications"], origin=server.url)
    tab.page.add_init_script(NOTIFICATIONS)
    tab.open(f"/p/{server.project.slug}/alerts/")
    button = tab.page.get_by_role("button", name="Notify me in this browser")
    button.wait_for()
    assert tab.page.evaluate("window.asked") is None and shown(tab) == []
    button.click()
    tab.page.get_by_role("button", name="Notifications are on").wait_for()
    # The page hides its stream, but the notifications have one that stays.
    tab.page.evaluate("""() => {
        Object.defineProperty(document, "hidden", { value: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }""")
    tab.page.get_by_text("Paused").wait_for()
    run = diverge(server)
    tab.wait(lambda: any("a live run" in each["title"] for each in shown(tab)), "A notification")
    (notification,) = (each for each in shown(tab) if "a live run" in each["title"])
    assert notification["title"] == "Loss not finite in a live run"
    assert notification["body"] == Alert.objects.get(run=run, kind="loss_not_finite").message
    button = tab.page.get_by_role("button", name="Notifications are on")
    button.click()
    tab.page.get_by_role("button", name="Notify me in this browser").wait_for()


def test_a_message_on_an_open_page_leads_to_the_alert(open_tab: OpenTab, server: Server) -> None:
    tab = open_tab()
    tab.open(f"/p/{server.project.slug}/settings/")
    tab.page.get_by_text("Live", exact=True).wait_for()
    run = diverge(server)
    link = tab.page.get_by_role("link", name="Loss not finite in a live run")
    link.wait_for()
    tab.wait(lambda: ", 1 open" in (tab.page.locator("#alert-count").text_content() or ""), "Counting it")
    link.click()
    tab.page.get_by_role("heading", level=1, name="Loss not finite").wait_for()
    tab.page.get_by_role("textbox", name="Comment").fill("It was the data.")
    tab.page.get_by_role("button", name="Add the comment").click()
    tab.page.get_by_text("It was the data.").wait_for()
    tab.page.get_by_role("button", name="Acknowledge").click()
    tab.page.get_by_text("acknowledged").first.wait_for()
    assert Alert.objects.get(run=run, kind="loss_not_finite").state == "acknowledged"


def test_the_list_is_worked_through_with_the_keyboard(open_tab: OpenTab, server: Server) -> None:
    diverge(server)
    tab = open_tab()
    tab.open(f"/p/{server.project.slug}/alerts/?state=open")
    first = tab.page.get_by_role("checkbox", name="Choose").first
    first.focus()
    tab.page.keyboard.press("Space")
    submit = tab.page.locator("#chosen-alerts").get_by_role("button", name="Acknowledge", exact=True)
    submit.focus()
    tab.page.keyboard.press("Enter")
    tab.page.get_by_text("Acknowledged 1 alert, just now.").wait_for()


def many_alerts(server: Server, count: int) -> None:
    """Open alerts, a third of them critical, in one run."""
    run = make_run(server.project, "a run in trouble")
    for number in range(count):
        severity = "warning" if number % 3 else "critical"
        Alert.objects.create(
            run=run, kind="loss_spike", severity=severity, onset_step=number, step=number, message="Up."
        )


def test_acknowledges_all_that_match_and_undoes_it(open_tab: OpenTab, server: Server) -> None:
    many_alerts(server, 150)
    tab = open_tab()
    tab.open(f"/p/{server.project.slug}/alerts/?severity=warning")
    page = tab.page
    page.get_by_label("Select all of this page").check()
    expect(page.locator("[data-chosen]")).to_have_text("50 selected")
    page.get_by_role("checkbox", name="Choose").first.uncheck()
    expect(page.locator("[data-chosen]")).to_have_text("49 selected")
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("#chosen-alerts")).to_be_hidden()
    page.get_by_role("checkbox", name="Choose").first.check()
    assert violations(page) == []
    tab.screenshot("alerts-selected")
    page.get_by_role("button", name="Acknowledge all 100 that match").click()
    expect(page.locator("form.undo")).to_contain_text("Acknowledged 100 alerts, just now.")
    assert Alert.objects.filter(state="open").count() == 50
    expect(page.get_by_role("link", name="Acknowledged 100")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".notice--success")).to_contain_text("100 alerts are open again.")
    assert Alert.objects.filter(state="open").count() == 150


def test_a_button_that_cannot_work_is_hidden(open_tab: OpenTab, server: Server) -> None:
    """A browser without notifications, such as one that reached the server over plain HTTP."""
    many_alerts(server, 1)
    tab = open_tab()
    tab.page.add_init_script("delete window.Notification")
    tab.open(f"/p/{server.project.slug}/alerts/")
    tab.page.get_by_role("checkbox", name="Choose").wait_for()
    expect(tab.page.locator("[data-notify]")).to_be_hidden()


def test_the_navigation_fits_a_phone_beside_many_alerts(open_tab: OpenTab, server: Server) -> None:
    many_alerts(server, 120)
    tab = open_tab(390)
    tab.open(f"/p/{server.project.slug}/settings/")
    expect(tab.page.locator("#alert-count")).to_contain_text("99+")
    expect(tab.page.locator("#alert-count .sr-only")).to_have_text(", 120 open")
    navigation = "document.querySelector('nav.nav')"
    assert tab.page.evaluate(f"{navigation}.scrollWidth <= {navigation}.clientWidth")


def test_a_rule_is_tried_and_saved(open_tab: OpenTab, server: Server, worker: Worker) -> None:
    diverge(server, "the past run")
    tab = open_tab()
    tab.open(f"/p/{server.project.slug}/rules/")
    tab.page.get_by_role("link", name="New rule").click()
    tab.page.get_by_label("Name").fill("Loss too high")
    tab.page.get_by_label("Statistic").fill("loss")
    tab.page.get_by_label("Value").fill("1.5")
    tab.page.get_by_role("button", name="Try").click()
    tab.page.get_by_text("loss is 2, above 1.5, since step 0.").wait_for()
    tab.page.get_by_role("button", name="Save").click()
    tab.page.get_by_text("Saved the rule “Loss too high”").wait_for()
    assert Rule.objects.get(name="Loss too high").parameters["value"] == 1.5
