"""What pages share, in a real browser: themes, charts, help and signing in."""

from __future__ import annotations

import pytest
from dashboard.helpers.seeding import Seeded, seed_project
from e2e.helpers.accessibility import violations
from e2e.helpers.tabs import PASSWORD, OpenTab
from helpers.live_servers import Server
from playwright.sync_api import Locator

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def seeded(server: Server) -> Seeded:
    return seed_project(server.project, 150)


def addresses(server: Server, seeded: Seeded) -> dict[str, str]:
    own = f"/p/{server.project.slug}/"
    pages = {
        "runs": own,
        "healthy": f"{own}runs/{seeded.healthy.id}/",
        "faulty": f"{own}runs/{seeded.faulty.id}/",
    }
    return pages | {name: f"{own}{name}/" for name in ("compare", "alerts")}


def test_a_choice_of_runs_is_in_the_address(open_tab: OpenTab, server: Server, seeded: Seeded) -> None:
    tab = open_tab()
    tab.open(addresses(server, seeded)["compare"])
    assert str(seeded.faulty.id) in tab.page.url, (
        "the initial choice is in the address, so the link can be shared"
    )
    tab.page.get_by_role("checkbox", name="gpt fp8 frozen scale").uncheck()
    tab.wait(lambda: str(seeded.faulty.id) not in tab.page.url, "The new address")
    tab.draw_everything()
    assert tab.page.locator("#verdicts .badge--danger").count() == 0
    second_tab = open_tab()
    second_tab.open(tab.page.url.removeprefix(server.url))
    assert not second_tab.page.get_by_role("checkbox", name="gpt fp8 frozen scale").is_checked()


def test_the_theme_is_remembered(open_tab: OpenTab, server: Server, seeded: Seeded) -> None:
    tab = open_tab(theme="light")
    tab.open(addresses(server, seeded)["healthy"])
    tab.draw_everything()

    def background() -> str:
        return str(tab.page.evaluate("getComputedStyle(document.body).backgroundColor"))

    def colour() -> str:
        return str(tab.page.evaluate("document.querySelector('#panels .figure__plot').layout.font.color"))

    light = background()
    button = tab.page.locator("[data-theme-toggle]")
    button.click()
    button.click()
    assert background() != light
    tab.wait(lambda: colour() == "#e6eaf1", "Drawing the chart in dark")
    tab.open(addresses(server, seeded)["alerts"])
    assert background() != light
    tab.page.locator("[data-theme-toggle]").click()
    assert background() == light


def test_a_chart_that_fails_can_be_tried_again(open_tab: OpenTab, server: Server, seeded: Seeded) -> None:
    # The page brings the chart for a wide window.
    tab = open_tab(390)
    tab.page.route("**/figures/panels.json*", lambda route: route.fulfill(status=500, body="oh"))
    tab.open(addresses(server, seeded)["healthy"])
    tab.page.locator("#panels").scroll_into_view_if_needed()
    retry = tab.page.locator("#panels").get_by_role("button", name="Try again")
    retry.wait_for()
    assert "500" in tab.page.locator("#panels .figure__note").inner_text()
    assert violations(tab.page, within="#panels") == [] and not tab.is_too_wide()
    tab.page.unroute("**/figures/panels.json*")
    retry.click()
    tab.wait(lambda: tab.page.locator("#panels").get_attribute("data-state") == "ready", "Drawing the chart")
    assert all("500" in error for error in tab.console_errors)
    tab.console_errors.clear()


def test_zooming_fetches_the_range_and_keeps_it(open_tab: OpenTab, server: Server, seeded: Seeded) -> None:
    tab = open_tab()
    tab.open(addresses(server, seeded)["healthy"])
    tab.draw_everything()
    with tab.page.expect_request("**/figures/panels.json*first=40*") as request:
        tab.page.evaluate(
            "Plotly.relayout(document.querySelector('#panels .figure__plot'),"
            " {'xaxis.range[0]': 40, 'xaxis.range[1]': 60})"
        )
    assert "last=60" in request.value.url
    shown = "document.querySelector('#panels .figure__plot').layout.xaxis.range.map(Math.round)"
    losses = """document.querySelector('#panels .figure__plot').data
        .find((trace) => trace.name === "gpt fp8 delayed").x"""
    tab.wait(
        lambda: len(list(tab.page.evaluate(f"Array.from({losses}?._inputArray ?? {losses})"))) == 21,
        "Showing the points of the range",
    )
    assert tab.page.evaluate(shown) == [40, 60]


def test_works_with_the_keyboard_alone(open_tab: OpenTab, server: Server, seeded: Seeded) -> None:
    tab = open_tab()
    tab.open(addresses(server, seeded)["healthy"])
    page = tab.page
    page.keyboard.press("Tab")
    assert page.locator(":focus").inner_text() == "Skip to content"
    assert page.evaluate("document.querySelector('.skip').getBoundingClientRect().left") >= 0
    help_field = page.locator("details.help").first
    help_field.locator("summary").focus()
    page.keyboard.press("Enter")
    assert help_field.locator(".help__text").is_visible()
    page.keyboard.press("Escape")
    assert not help_field.locator(".help__text").is_visible()


def test_help_stays_on_the_screen_of_a_phone(open_tab: OpenTab, server: Server, seeded: Seeded) -> None:
    tab = open_tab(390)
    tab.open(addresses(server, seeded)["healthy"])
    # What is loaded later must not move or replace a help text while it is looked at.
    tab.draw_everything()
    seen = 0
    for help_field in tab.page.locator("details.help").all():
        # Some are inside sections that are collapsed at first.
        help_field.evaluate(
            "(node) => { while ((node = node.parentElement?.closest('details'))) node.open = true; }"
        )
        if not help_field.locator("summary").is_visible():
            continue
        seen += 1
        help_field.locator("summary").click()
        text = help_field.locator(".help__text")

        def fits(text: Locator = text) -> bool:
            box = text.bounding_box()
            return box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390

        name = help_field.locator("summary").get_attribute("aria-label")
        tab.wait(fits, f"{name} within the screen")
        tab.page.keyboard.press("Escape")
    assert seen >= 8


def test_signing_out_leads_back_to_sign_in(open_tab: OpenTab, server: Server) -> None:
    tab = open_tab()
    tab.open("/")
    tab.page.locator("summary[aria-label^='Account']").click()
    tab.page.get_by_role("button", name="Sign out").click()
    tab.page.get_by_role("heading", name="Sign in").wait_for()
    settings = f"/p/{server.project.slug}/settings/"
    tab.open(settings)
    assert "next=" in tab.page.url
    tab.page.get_by_label("Username").fill("ada")
    tab.page.get_by_label("Password").fill(PASSWORD)
    tab.page.get_by_role("button", name="Sign in").click()
    tab.page.wait_for_url(tab.url + settings)
