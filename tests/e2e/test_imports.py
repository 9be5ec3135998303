"""Files are uploaded in a browser, imported by a real worker, and become runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent.helpers.import_files import write_csv, write_wandb
from e2e.helpers.accessibility import violations
from e2e.helpers.tabs import OpenTab, Tab
from helpers.live_servers import Server, celery_worker

from fp8scope_dashboard.accounts.models import ApiToken
from fp8scope_dashboard.runs.models import Run

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def worker_log(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The log of a worker that sends to the test's server."""
    monkeypatch.setenv("FP8SCOPE_BASE_URL", server.url)
    log = tmp_path / "worker.log"
    with celery_worker(log):
        yield log


def see(tab: Tab, name: str) -> None:
    """Look at the page at both widths and in both themes."""
    for width in (390, 1440):
        for theme in ("dark", "light"):
            tab.show(width, theme)
            tab.screenshot(f"imports-{name}-{theme}-{width}")
            assert not tab.is_too_wide() and violations(tab.page) == []


def test_it_works(open_tab: OpenTab, server: Server, worker_log: Path, tmp_path: Path) -> None:
    """Two formats at once, then a file that is none; the page follows without being loaded again."""
    tab = open_tab(1440)
    page = tab.page
    tab.open(f"/p/{server.project.slug}/imports/")
    see(tab, "empty")
    (tmp_path / "files").mkdir()
    files = [write_csv(tmp_path / "files"), write_wandb(tmp_path / "files")]
    page.locator("input[type=file]").set_input_files(files)
    page.locator("input[name=group]").fill("fp8")
    page.get_by_role("button", name="Import", exact=True).click()
    page.get_by_text("Uploaded log.csv and 1 other file.").wait_for()
    tab.screenshot("imports-live")
    page.get_by_text("Imported", exact=True).wait_for()
    runs = list(Run.objects.order_by("name"))
    assert len(runs) == 2 and {run.group for run in runs} >= {"fp8"}
    for run in runs:
        page.get_by_role("link", name=run.name, exact=True).wait_for()
    page.locator("input[type=file]").set_input_files(
        {"name": "holiday.txt", "mimeType": "text/plain", "buffer": b"hm\0"}
    )
    page.get_by_role("button", name="Import", exact=True).click()
    page.get_by_text("holiday.txt has no format that can be imported").wait_for()
    see(tab, "full")
    page.get_by_role("link", name="log", exact=True).click()
    page.get_by_role("heading", name="log").wait_for()
    log = worker_log.read_text()
    token = ApiToken.objects.get(name="imports of files")
    assert token.revoked_at is not None and token.prefix not in log and "fp8s_" not in log
