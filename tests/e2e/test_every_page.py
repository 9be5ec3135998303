"""Every page and its states, in light and dark, on a desktop and a phone.

Each is accessible, fits the screen, logs nothing, does not move, and can be walked through with the Tab key.
Each is loaded once, on a phone; theme and width change while it is shown, as they do for people.
helpers/pages.py lists the pages. Every tab fails its test if it requests an address outside.
"""

from __future__ import annotations

from typing import Any

import pytest
from dashboard.helpers.addresses import Addresses
from dashboard.helpers.logged_media import log_examples
from dashboard.helpers.many_runs import fill_project
from dashboard.helpers.recording import Recorder
from dashboard.helpers.seeding import Seeded, seed_project
from dashboard.helpers.visitors import visitor_of
from e2e.helpers.accessibility import violations
from e2e.helpers.keyboard import focus_problems
from e2e.helpers.pages import OTHERS, PAGES, ROUTES, SIGNED_OUT, address_of, states
from e2e.helpers.tabs import OpenTab, Tab, wants_screenshots
from e2e.helpers.words import broken_words, cramped_controls, unnamed_controls
from helpers.live_servers import Server

from fp8scope_dashboard.accounts.models import Role, User
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts.models import Alert, Rule
from fp8scope_dashboard.file_imports.models import ImportJob
from fp8scope_dashboard.shared_reports.models import SharedReport
from fp8scope_dashboard.shared_reports.services import create_link

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

# A page is seen at each width, which decides what is visible, and in each theme, which decides the colours;
# another page the other way round. So what pages have in common is seen in all four.
LOOKS = ([("dark", 390), ("light", 1440)], [("light", 390), ("dark", 1440)])
PARTS = 2
"""Test processes share the pages: each part takes every second one."""
TABS_PRESSED = 25
MOVING = (
    "() => document.getAnimations().filter((each) => each.effect.getComputedTiming().duration > 1).length"
)


@pytest.fixture
def seeded(server: Server) -> Seeded:
    fill_project(server.project, 20)
    seeded = seed_project(server.project, 150)
    for number, run in enumerate((seeded.baselines[0], seeded.faulty)):
        log_examples(Recorder(run=run), number)
    return seeded


@pytest.fixture
def tab(open_tab: OpenTab, server: Server, seeded: Seeded) -> Tab:
    """A tab of an administrator of the server and two projects, one with runs and a report."""
    tab = open_tab(390, "dark")
    User.objects.filter(username="ada").update(is_superuser=True)
    visitor_of(create_project("elsewhere", "Elsewhere"), "eve", Role.ADMIN)
    imported = {"project": server.project, "title": "training_logs_of_march.zip", "bytes": 1}
    runs = [[str(run.pk), "150 rows, 900 values, 0 evaluations"] for run in seeded.baselines]
    ImportJob.objects.create(**imported, state="done", results=runs, problems=["a.csv: it has no step"])
    ImportJob.objects.create(**imported, state="failed", problems=["The import was interrupted twice."])
    tab.open(f"/p/{server.project.slug}/reports/new?runs={seeded.faulty.pk}")
    tab.page.get_by_role("button", name="Freeze the report").click()
    tab.page.get_by_role("button", name="Make a link").wait_for()
    return tab


def values_of(server: Server, seeded: Seeded) -> dict[str, Any]:
    """What the addresses of pages name: one object of each kind."""
    report = SharedReport.objects.get()
    assert report.created_by is not None
    return {
        "slug": server.project.slug,
        "run_id": seeded.faulty.pk,
        "index": 0,
        "alert_id": Alert.objects.filter(run=seeded.faulty).earliest("id").pk,
        "rule_id": Rule.objects.filter(project=server.project, kind="loss_spike").earliest("id").pk,
        "report_id": report.pk,
        "secret": create_link(report, report.created_by, None)[1],
        "chosen": "&".join(f"runs={each.pk}" for each in (seeded.faulty, *seeded.baselines)),
    }


def stays_too_wide(tab: Tab) -> bool:
    """Whether the page scrolls sideways after its charts had time to take the new width."""
    for _ in range(30):
        if not tab.is_too_wide():
            return False
        tab.page.wait_for_timeout(100)
    return True


def examine(tab: Tab, name: str, path: str, status: int = 200, *, is_state: bool = False) -> list[str]:
    """Open a page and return its problems; the browser reports other statuses than 200 on its console."""
    looks, others = LOOKS if len(name) % 2 else reversed(LOOKS)
    tab.show(390, "dark")
    answer = tab.page.goto(tab.url + path)
    assert answer is not None
    problems = [] if answer.status == status else [f"{name}: status {answer.status}"]
    tab.draw_everything()
    for theme, width in looks:
        tab.show(width, theme)
        where = f"{name}, {theme}, {width} px"
        if stays_too_wide(tab):
            problems.append(f"{where}: scrolls sideways")
        problems += [f"{where}: outside of the window: {html}" for html in cramped_controls(tab.page)]
        problems += [f"{where}: breaks {word!r} in a table" for word in broken_words(tab.page)]
        problems += [f"{where}: {violation}" for violation in violations(tab.page)]
        tab.screenshot(f"{name}-{theme}-{width}".replace(" ", "-"))
    for theme, width in others if wants_screenshots() else ():
        tab.show(width, theme)
        tab.screenshot(f"{name}-{theme}-{width}".replace(" ", "-"))
    problems += [f"{name}: without a name: {html}" for html in unnamed_controls(tab.page)]
    if tab.page.evaluate(MOVING):
        problems.append(f"{name}: moves although motion is to be reduced")
    if not is_state:
        problems += [f"{name}: {problem}" for problem in focus_problems(tab.page, TABS_PRESSED)]
    expected = f"status of {status} "
    problems += [f"{name}: {error}" for error in tab.console_errors if status == 200 or expected not in error]
    tab.console_errors.clear()
    return problems


@pytest.mark.parametrize("part", range(PARTS))
def test_it_works(tab: Tab, server: Server, seeded: Seeded, part: int) -> None:
    problems: list[str] = []
    for name, path in list(states(values_of(server, seeded)).items())[part::PARTS]:
        problems += examine(tab, name, path, is_state=name not in PAGES)
    assert not problems, "\n".join(problems)


def test_no_page_is_forgotten(transactional_db: None) -> None:
    """Addresses that are not in PAGES answer with a part of a page, data, or to a form alone."""
    visitor = visitor_of(create_project("research", "Research"), "ada", Role.ADMIN)
    addresses = Addresses(visitor)
    forgotten = []
    for name in ROUTES.keys() - PAGES.keys() - SIGNED_OUT.keys() - set(OTHERS):
        answer = visitor.client.get(addresses.of(name))
        assert answer.status_code != 404, name
        if not answer.streaming and answer.content.lstrip().lower().startswith(b"<!doctype html"):
            forgotten.append(name)
    assert forgotten == []


def test_pages_for_everybody_and_of_errors(open_tab: OpenTab, server: Server) -> None:
    tab = open_tab(390, "dark")
    own = f"/p/{server.project.slug}/"
    User.objects.create_user("somebody")
    problems = examine(tab, "not found", f"{own}nothing", 404)
    problems += examine(tab, "refused", "/server/", 403)
    problems += examine(tab, "malformed", f"{own}?q=%00", 400)
    tab.page.context.clear_cookies()
    for name, status in SIGNED_OUT.items():
        values = {"secret": "unknown", "token": "unknown"}
        problems += examine(tab, f"{name}, signed out", address_of(name, values), status)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("width", [1440, 390])
def test_pages_without_data(open_tab: OpenTab, server: Server, width: int) -> None:
    problems: list[str] = []
    tab = open_tab(width)
    rests = (
        "",
        "compare/",
        "evaluations/",
        "alerts/",
        "rules/",
        "channels/",
        "settings/",
        "reports/",
        "reports/new",
        "imports/",
    )
    for rest in rests:
        tab.open(f"/p/{server.project.slug}/{rest}")
        if tab.is_too_wide():
            problems.append(f"{rest}: scrolls sideways")
        problems += [f"{rest}: {violation}" for violation in violations(tab.page)]
    assert not problems, "\n".join(problems)
