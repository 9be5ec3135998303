"""A browser tab that the tests control."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

# Schemes of addresses that a page creates itself.
INTERNAL_SCHEMES = ("data", "blob", "about")
PASSWORD = "correct horse battery"
"""Of the user whom every tab has signed in."""
REFRESHED_MS = 1500
"""The longest time from a change to the refresh that it causes."""
TIMEOUT_SECONDS = 60.0
"""Many charts are drawn within a second, but not beside three other test processes."""


@dataclass
class Tab:
    """A signed-in page, with the errors and warnings of its console, and its requests to other servers."""

    page: Page
    url: str
    console_errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)

    def note_request(self, url: str) -> None:
        """Keep an address that is neither the server's nor made by the page itself."""
        parts = urlsplit(url)
        if parts.scheme not in INTERNAL_SCHEMES and f"{parts.scheme}://{parts.netloc}" != self.url:
            self.outside.append(url)

    def open(self, path: str) -> None:
        self.page.goto(self.url + path)

    def open_live(self, path: str) -> None:
        """Open a page, and wait until it is connected and has loaded what it loads by itself."""
        self.open(path)
        indicator = self.page.locator("[data-live]")
        self.wait(lambda: indicator.get_attribute("data-state") == "live", "Connecting")
        self.page.wait_for_timeout(REFRESHED_MS)

    def wait(self, done: Callable[[], object], event: str) -> None:
        """Wait until `done()` is true. The pages' policy forbids Playwright's wait_for_function."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not done():
            if time.monotonic() > deadline:
                pytest.fail(
                    f"{event} did not happen. States of the figures: {self.figure_states()}. "
                    f"Messages on the console: {self.console_errors}"
                )
            self.page.wait_for_timeout(50)

    def draw_everything(self) -> None:
        """Scroll through the page until every figure is drawn or shows why it is empty.

        Figures in closed parts of the page are drawn when these are opened.
        """
        for figure in self.page.locator("[data-figure]").all():
            if not figure.evaluate("(tag) => tag.checkVisibility()"):
                continue
            self.draw(figure, "ready", "empty")
        self.page.evaluate("scrollTo(0, 0)")

    def draw(self, figure: Locator, *states: str) -> None:
        """Scroll to the figure until it has one of the states; it is "ready" where none is given.

        One scroll is not enough: what is drawn above the figure may move it out of the window before the
        page sees it there.
        """

        def is_drawn() -> bool:
            figure.scroll_into_view_if_needed()
            return figure.get_attribute("data-state") in (states or ("ready",))

        self.wait(is_drawn, f"Drawing {figure.get_attribute('id')}")

    def figure_states(self) -> dict[str, str]:
        """Each figure's state; "unseen" until it has been near the window."""
        script = """() => Object.fromEntries(
            [...document.querySelectorAll("[data-figure]")]
                .map((tag) => [tag.id, tag.dataset.state ?? "unseen"])
        )"""
        states: dict[str, str] = self.page.evaluate(script)
        return states

    def points(self, figure: str) -> int:
        """The number of finite points of the longest line in the figure."""
        script = """id => {
            const plot = document.querySelector(`#${id} .figure__plot`);
            const values = (trace) => Array.from(trace.y?._inputArray ?? trace.y ?? []);
            const count = (trace) => values(trace).filter(Number.isFinite).length;
            return Math.max(0, ...(plot.data || []).map(count));
        }"""
        return int(self.page.evaluate(script, figure))

    def is_too_wide(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth > innerWidth"))

    def show(self, width: int, theme: str) -> None:
        """Change the width and the theme of what is shown, and wait until it is drawn so."""
        self.page.set_viewport_size({"width": width, "height": height_of(width)})
        self.page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
        self.page.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def screenshot(self, name: str) -> None:
        """Save a screenshot in the folder FP8SCOPE_SCREENSHOTS, if it is set."""
        if folder := os.environ.get("FP8SCOPE_SCREENSHOTS"):
            # Charts take another theme or width a moment later, those out of sight when they are scrolled to.
            self.page.wait_for_timeout(500)
            self.draw_everything()
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def wants_screenshots() -> bool:
    """Return whether FP8SCOPE_SCREENSHOTS names a folder for them."""
    return bool(os.environ.get("FP8SCOPE_SCREENSHOTS"))


def height_of(width: int) -> int:
    """The height of a screen of this width, a phone's or a desktop's."""
    return 844 if width < 500 else 900


OpenTab = Callable[..., Tab]
