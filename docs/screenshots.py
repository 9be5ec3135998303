"""Take the README's screenshot from a demo's data: `python docs/screenshots.py DATA_DIR`.

DATA_DIR is what `fp8scope demo --exit --data-dir DATA_DIR` left behind. The script starts the installation in
it, opens the page of an FP8 run in chromium, and writes docs/images/run.png.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

IMAGES = Path(__file__).parent / "images"
WIDTH, HEIGHT = 1440, 862
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DRAW_SECONDS = 60.0


def addresses(base_url: str, environment: dict[str, str], run_name: str) -> tuple[str, str]:
    """A link that signs the administrator in, and the page of the newest run with this name."""
    os.environ |= environment
    import django

    # The dashboard's models can be imported only after this.
    django.setup()
    from django.urls import reverse

    from fp8scope_dashboard.accounts.models import User
    from fp8scope_dashboard.accounts.services import create_sign_in_link
    from fp8scope_dashboard.runs.models import Run

    run = Run.objects.filter(name=run_name).order_by("-created_at").first()
    user = User.objects.filter(is_superuser=True, is_active=True).order_by("pk").first()
    if run is None or user is None:
        raise SystemExit(f"no run named {run_name!r}: run `fp8scope demo --exit --data-dir ...` first")
    return create_sign_in_link(user, base_url), base_url + reverse("run", args=[run.project.slug, run.id])


def draw(page: Page) -> None:
    """Scroll through the page until every figure is drawn, then return to its top."""
    for figure in page.locator("[data-figure]").all():
        figure.scroll_into_view_if_needed()
        deadline = time.monotonic() + DRAW_SECONDS
        while figure.get_attribute("data-state") not in ("ready", "empty"):
            if time.monotonic() > deadline:
                raise SystemExit(f"the figure {figure.get_attribute('id')} was not drawn")
            page.wait_for_timeout(100)
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(500)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("--run", default="fp8 stale scales", help="name of a run (default: %(default)s)")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    from fp8scope_dashboard.servers.supervisor import Supervisor

    IMAGES.mkdir(exist_ok=True)
    with Supervisor(options.data_dir, port=0) as supervisor:
        link, run_page = addresses(supervisor.url, supervisor.environment, options.run)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
            context = browser.new_context(
                viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light", reduced_motion="reduce"
            )
            page = context.new_page()
            page.goto(link)
            if page.get_by_role("button", name="Sign in").count():
                page.get_by_role("button", name="Sign in").click()
            page.goto(run_page)
            draw(page)
            page.screenshot(path=IMAGES / "run.png")
            browser.close()


if __name__ == "__main__":
    main()
