"""A real browser: Debian's chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from e2e.helpers.tabs import TIMEOUT_SECONDS, OpenTab, Tab

if TYPE_CHECKING:
    from helpers.live_servers import Server
    from playwright.sync_api import Browser

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]
PASSWORD = "correct horse battery"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One browser for the session. Without chromium, tests fail if CI=true and are skipped otherwise."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        reason = "chromium is not installed: the browser tests did not run (Debian: apt-get install chromium)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    # Playwright runs an event loop in this thread, so Django would refuse synchronous database calls.
    previous = os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE")
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
    try:
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(executable_path=program, args=FLAGS)
            yield chromium
            chromium.close()
    finally:
        if previous is None:
            del os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"]
        else:
            os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = previous


@pytest.fixture
def open_tab(browser: Browser, server: Server) -> Iterator[OpenTab]:
    """Open tabs signed in as the project's administrator. An error or warning on a console fails the test."""
    from fp8scope_dashboard.accounts.models import Membership, Role, User

    user = User.objects.create_user("ada", password=PASSWORD)
    Membership.objects.create(user=user, project=server.project, role=Role.ADMIN)
    tabs: list[Tab] = []

    def open_signed_in(width: int = 1440, theme: str = "light") -> Tab:
        height = 844 if width < 500 else 900
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=theme,  # type: ignore[arg-type]
            reduced_motion="reduce",
        )
        context.set_default_timeout(TIMEOUT_SECONDS * 1000)
        tab = Tab(context.new_page(), server.url)
        tab.page.on(
            "console",
            lambda message: (
                tab.console_errors.append(message.text) if message.type in ("error", "warning") else None
            ),
        )
        tab.page.on("pageerror", lambda error: tab.console_errors.append(str(error)))
        tabs.append(tab)
        tab.open("/signin/")
        tab.page.get_by_label("Username").fill("ada")
        tab.page.get_by_label("Password").fill(PASSWORD)
        tab.page.get_by_role("button", name="Sign in").click()
        tab.page.get_by_role("heading", level=1).wait_for()
        return tab

    yield open_signed_in
    errors = [error for tab in tabs for error in tab.console_errors]
    for tab in tabs:
        tab.page.context.close()
    assert errors == []
