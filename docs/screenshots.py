"""Take the pictures of README.md and docs/pages.md from a demo's data: `python docs/screenshots.py DATA_DIR`.

DATA_DIR is what `fp8scope demo --exit --data-dir DATA_DIR` left behind; it is copied first. The script starts
the installation in the copy, opens each page in chromium, and writes docs/images/NAME.webp. Some pictures
also have a dark variant, NAME-dark.webp.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

IMAGES = Path(__file__).parent / "images"
WIDTH, HEIGHT = 1440, 900
# Of the stored pictures, in pixels; text stays readable, and all of them together small.
STORED_WIDTH = 1200
QUALITY = 82
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


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture of a page. `path` follows the project's address, or begins with / for other pages.

    `{run}` stands for the id of the run in trouble. `before` prepares the page; `show` is the element that is
    scrolled to the top.
    """

    name: str
    path: str
    show: str = ""
    height: int = HEIGHT
    dark: bool = False
    before: Callable[[Page], None] | None = None


def make_report(page: Page) -> None:
    """Freeze the report whose form is shown."""
    page.get_by_role("button", name="Freeze the report").click()
    page.get_by_role("button", name="Make a link").wait_for()


PICTURES = (
    Picture(name="runs", path="", height=620),
    Picture(name="run", path="runs/{run}/", dark=True, height=1500),
    Picture(name="tensors", path="runs/{run}/?tab=tensors", height=1000),
    Picture(name="compare", path="compare/", height=1060),
    Picture(name="evaluations", path="evaluations/", height=1060),
    Picture(name="alerts", path="alerts/"),
    Picture(name="rules", path="rules/"),
    Picture(name="diagnosis", path="runs/{run}/diagnosis/"),
    Picture(name="readiness", path="runs/{run}/readiness/"),
    Picture(name="report", path="reports/new?runs={run}", before=make_report, show="article", height=1060),
    Picture(name="settings", path="settings/"),
    Picture(name="server", path="/server/", height=820),
)


def begin(environment: dict[str, str], base_url: str, run_name: str) -> tuple[str, str, str]:
    """A link that signs the administrator in, the project's address, and the newest run of the name."""
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
    return create_sign_in_link(user, base_url), reverse("project", args=[run.project.slug]), str(run.id)


def draw(page: Page) -> None:
    """Scroll through the page until every figure is drawn, then return to its top."""
    for figure in page.locator("[data-figure]").all():
        if not figure.is_visible():
            continue
        figure.scroll_into_view_if_needed()
        deadline = time.monotonic() + DRAW_SECONDS
        while figure.get_attribute("data-state") not in ("ready", "empty"):
            if time.monotonic() > deadline:
                raise SystemExit(f"the figure {figure.get_attribute('id')} was not drawn")
            page.wait_for_timeout(100)
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(500)


def take(context: BrowserContext, picture: Picture, address: str, theme: str) -> bytes:
    """The picture as PNG."""
    page = context.new_page()
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")  # type: ignore[arg-type]
    page.set_viewport_size({"width": WIDTH, "height": picture.height})
    page.goto(address)
    if picture.before is not None:
        picture.before(page)
    # A notice of the sign-in, and the connection's state, are not of the page.
    page.add_style_tag(content="main > .notice[role='status'] { display: none }")
    draw(page)
    if picture.show:
        page.locator(picture.show).first.evaluate("(element) => scrollTo(0, element.offsetTop - 70)")
        page.wait_for_timeout(200)
    shot = page.screenshot()
    page.close()
    return shot


def store(shot: bytes, name: str) -> int:
    """Write the picture; returns its size in bytes."""
    from PIL import Image

    image = Image.open(io.BytesIO(shot)).convert("RGB")
    height = round(image.height * STORED_WIDTH / image.width)
    path = IMAGES / f"{name}.webp"
    image.resize((STORED_WIDTH, height), Image.Resampling.LANCZOS).save(
        path, "WEBP", quality=QUALITY, method=6
    )
    return path.stat().st_size


def take_all(context: BrowserContext, link: str, addresses: dict[str, str]) -> int:
    """Sign in, and store the pictures of these addresses. Returns their size in bytes."""
    page = context.new_page()
    page.goto(link)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("heading", level=1).first.wait_for()
    total = 0
    for picture in PICTURES:
        if picture.name in addresses:
            address = addresses[picture.name]
            total += store(take(context, picture, address, "light"), picture.name)
            if picture.dark:
                total += store(take(context, picture, address, "dark"), f"{picture.name}-dark")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("--run", default="fp8 stale scales", help="name of a run (default: %(default)s)")
    parser.add_argument("--only", default="", help="names of pictures, with commas between; all if empty")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    from fp8scope_dashboard.servers.supervisor import Supervisor

    names = set(filter(None, options.only.split(",")))
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder) / "data"
        # The embedded PostgreSQL has a user of its own, which must own and reach its files.
        os.chmod(folder, 0o755)
        subprocess.run(["cp", "-a", options.data_dir, data_dir], check=True)
        with Supervisor(data_dir, port=0) as supervisor:
            # Before playwright, whose event loop keeps Django from the database.
            link, project, run = begin(supervisor.environment, supervisor.url, options.run)
            addresses = {
                picture.name: supervisor.url
                + (picture.path if picture.path.startswith("/") else project + picture.path).format(run=run)
                for picture in PICTURES
                if not names or picture.name in names
            }
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
                total = take_all(browser.new_context(), link, addresses)
                browser.close()
    print(f"{total / 1024:,.0f} KiB in {IMAGES}")


if __name__ == "__main__":
    main()
