"""A real browser: Debian's chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from helpers.live_servers import Server
    from playwright.sync_api import Browser, Page

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]
PASSWORD = "correct horse battery"
PATIENCE = 30.0


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One browser for the session. Without chromium: a failure where CI=true, else a skip that says so."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        reason = "chromium is not installed: the browser tests did not run (Debian: apt-get install chromium)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    # Playwright's own loop runs in this thread, and Django would take the tests for asynchronous code.
    before = os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE")
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
    try:
        with sync_playwright() as playwright:
            opened = playwright.chromium.launch(executable_path=program, args=FLAGS)
            yield opened
            opened.close()
    finally:
        if before is None:
            del os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"]
        else:
            os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = before


@dataclass
class Tab:
    """A page that is signed in, and what it complained about."""

    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)

    def open(self, path: str) -> None:
        self.page.goto(self.url + path)

    def wait(self, done: Callable[[], object], what: str) -> None:
        """Wait until something is true. (The pages' policy forbids what Playwright waits with.)"""
        deadline = time.monotonic() + PATIENCE
        while not done():
            if time.monotonic() > deadline:
                pytest.fail(f"{what} did not happen. The browser's complaints: {self.complaints}")
            self.page.wait_for_timeout(50)

    def draw_everything(self) -> None:
        """Scroll through the page until every figure is drawn (or says why it is empty)."""
        for figure in self.page.locator("[data-figure]").all():
            figure.scroll_into_view_if_needed()
            self.wait(
                lambda figure=figure: figure.get_attribute("data-state") in ("ready", "empty"),  # type: ignore[misc]
                f"Drawing {figure.get_attribute('id')}",
            )
        self.page.evaluate("scrollTo(0, 0)")

    def points(self, figure: str) -> int:
        """Finite points of the figure's longest line."""
        script = """id => {
            const plot = document.querySelector(`#${id} .figure__plot`);
            const values = (trace) => Array.from(trace.y?._inputArray ?? trace.y ?? []);
            const count = (trace) => values(trace).filter(Number.isFinite).length;
            return Math.max(0, ...(plot.data || []).map(count));
        }"""
        return int(self.page.evaluate(script, figure))

    def is_too_wide(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth > innerWidth"))

    def screenshot(self, name: str, folder: Path) -> None:
        """Into FP8SCOPE_SCREENSHOTS where that is set, for people to look at."""
        place = Path(os.environ.get("FP8SCOPE_SCREENSHOTS") or folder)
        place.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=place / f"{name}.png", full_page=True)


OpenTab = Callable[..., Tab]


@pytest.fixture
def open_tab(browser: Browser, server: Server) -> Iterator[OpenTab]:
    """Opens tabs that are signed in as the project's administrator; none may complain on its console."""
    from fp8scope_dashboard.accounts.models import Membership, Role, User

    user = User.objects.create_user("ada", password=PASSWORD)
    Membership.objects.create(user=user, project=server.project, role=Role.ADMIN)
    tabs: list[Tab] = []

    def open_one(width: int = 1440, theme: str = "light") -> Tab:
        height = 844 if width < 500 else 900
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=theme,  # type: ignore[arg-type]
            reduced_motion="reduce",
        )
        context.set_default_timeout(PATIENCE * 1000)
        tab = Tab(context.new_page(), server.url)
        tab.page.on(
            "console",
            lambda message: (
                tab.complaints.append(message.text) if message.type in ("error", "warning") else None
            ),
        )
        tab.page.on("pageerror", lambda error: tab.complaints.append(str(error)))
        tabs.append(tab)
        tab.open("/signin/")
        tab.page.get_by_label("Username").fill("ada")
        tab.page.get_by_label("Password").fill(PASSWORD)
        tab.page.get_by_role("button", name="Sign in").click()
        tab.page.get_by_role("heading", level=1).wait_for()
        return tab

    yield open_one
    complaints = [complaint for tab in tabs for complaint in tab.complaints]
    for tab in tabs:
        tab.page.context.close()
    assert complaints == []
