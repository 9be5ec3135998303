"""A real browser: Debian's chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from e2e.helpers.tabs import PASSWORD, TIMEOUT_SECONDS, OpenTab, Tab, height_of

if TYPE_CHECKING:
    from helpers.live_servers import Server
    from playwright.sync_api import Browser

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]
# Each browser would start renderers for the suggestions of an address bar that nobody sees. The other
# features are off in Playwright's own list, whose place this one takes.
OFF = (
    "WebUIOmniboxPopup",
    "WebUIOmniboxAimPopup",
    "HttpsUpgrades",
    "MediaRouter",
    "OptimizationHints",
    "PaintHolding",
)
FLAGS += [f"--disable-features={','.join(OFF)}"]
LOG_SHOWN = 10_000
"""Characters of the server's log that a failed test shows."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the tests of a file. Without chromium, tests fail if CI=true and are skipped otherwise.

    It ends with the file: while it runs, so does an event loop in this thread, in which Django refuses to
    answer other tests' requests for streams.
    """
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        reason = "chromium is not installed: the browser tests did not run (Debian: apt-get install chromium)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=TIMEOUT_SECONDS * 1000)

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
    """Open empty tabs of the project's administrator, who is signed in.

    An error or warning on a console fails the test, which then shows the end of the server's log; so does a
    request of an address outside.
    """
    from django.conf import settings
    from django.test import Client

    from fp8scope_dashboard.accounts.models import Membership, Role, User

    user = User.objects.create_user("ada", password=PASSWORD)
    Membership.objects.create(user=user, project=server.project, role=Role.ADMIN)
    client = Client()
    client.force_login(user)
    session = client.cookies[settings.SESSION_COOKIE_NAME].value
    tabs: list[Tab] = []
    before = server.log.stat().st_size

    def open_signed_in(width: int = 1440, theme: str = "light") -> Tab:
        context = browser.new_context(
            viewport={"width": width, "height": height_of(width)},
            color_scheme=theme,  # type: ignore[arg-type]
            reduced_motion="reduce",
        )
        context.set_default_timeout(TIMEOUT_SECONDS * 1000)
        context.add_cookies([{"name": settings.SESSION_COOKIE_NAME, "value": session, "url": server.url}])
        tab = Tab(context.new_page(), server.url)
        tab.page.on(
            "console",
            lambda message: (
                tab.console_errors.append(f"{message.text} ({message.location['url']})")
                if message.type in ("error", "warning")
                else None
            ),
        )
        context.on("request", lambda request: tab.note_request(request.url))
        context.on("page", lambda page: tab.note_request(page.url))
        tab.page.on("pageerror", lambda error: tab.console_errors.append(str(error)))
        tabs.append(tab)
        return tab

    yield open_signed_in
    errors = [error for tab in tabs for error in tab.console_errors]
    outside = [url for tab in tabs for url in tab.outside]
    for tab in tabs:
        tab.page.context.close()
    assert outside == [], "a page requested an address outside"
    if errors:
        log = server.log.read_bytes()[before:].decode(errors="replace")
        pytest.fail("\n".join(["On the console:", *errors, "The server's log:", log[-LOG_SHOWN:]]))
