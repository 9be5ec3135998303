"""Every page in light and dark, on a desktop and a phone: accessible, not too wide, without errors.

Each page is loaded once; theme and width change while it is shown, as they do for people.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from dashboard.helpers.seeding import Seeded, seed_project
from e2e.helpers.accessibility import EVERY_RULE, RULES_OF_COLOUR, violations
from e2e.helpers.tabs import OpenTab, Tab
from e2e.helpers.words import broken_words, unnamed_controls
from helpers.live_servers import Server

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

# At each width, which decides what is visible, every rule once; in each theme those that depend on it.
LOOKS = [
    ("light", 1440, EVERY_RULE),
    ("dark", 1440, RULES_OF_COLOUR),
    ("dark", 390, EVERY_RULE),
    ("light", 390, RULES_OF_COLOUR),
]
PARTS = 3
"""Test processes share the pages: each part takes every third one."""


def addresses(server: Server, seeded: Seeded) -> dict[str, str]:
    """The address of every kind of page, by its name."""
    from fp8scope_dashboard.alerts.models import Event
    from fp8scope_dashboard.shared_reports.models import SharedReport
    from fp8scope_dashboard.shared_reports.services import create_link

    own = f"/p/{server.project.slug}/"
    run = f"{own}runs/{seeded.faulty.pk}/"
    chosen = "&".join(f"runs={each.pk}" for each in (seeded.faulty, *seeded.baselines))
    report = SharedReport.objects.get()
    user = report.created_by
    assert user is not None
    _, secret = create_link(report, user, None)
    event = Event.objects.filter(run=seeded.faulty).earliest("id")
    return {
        "runs": own,
        "run": f"{own}runs/{seeded.healthy.pk}/",
        "run in trouble": run,
        **{name: f"{run}{name}/" for name in ("data", "diagnosis", "readiness")},
        **{f"tab {name}": f"{run}?tab={name}" for name in ("tensors", "configuration")},
        "tensor": f"{run}tensors/0/",
        "compare": f"{own}compare/?{chosen}",
        "evaluations": f"{own}evaluations/",
        "alerts": f"{own}alerts/?state=all",
        "alert": f"{own}alerts/{event.pk}/",
        "rules": f"{own}rules/",
        "new rule": f"{own}rules/new",
        "channels": f"{own}channels/",
        "settings": f"{own}settings/",
        "reports": f"{own}reports/",
        "new report": f"{own}reports/new?{chosen}",
        "report": f"{own}reports/{report.pk}/",
        "shared report": f"/shared/{secret}/",
        "account": "/account/",
        "server": "/server/",
    }


def stays_too_wide(tab: Tab) -> bool:
    """Whether the page scrolls sideways after its charts had time to take the new width."""
    for _ in range(30):
        if not tab.is_too_wide():
            return False
        tab.page.wait_for_timeout(100)
    return True


@pytest.fixture
def seeded(server: Server) -> Seeded:
    return seed_project(server.project, 150)


@pytest.fixture
def tab(open_tab: OpenTab, server: Server, seeded: Seeded) -> Iterator[Tab]:
    """A tab of an administrator of the server, in a project with runs and a report."""
    from fp8scope_dashboard.accounts.models import User

    tab = open_tab()
    User.objects.filter(username="ada").update(is_superuser=True)
    outside: list[str] = []

    def note(address: str) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("data", "blob") and f"{parts.scheme}://{parts.netloc}" != server.url:
            outside.append(address)

    tab.page.on("request", lambda request: note(request.url))
    tab.open(f"/p/{server.project.slug}/reports/new?runs={seeded.faulty.pk}")
    tab.page.get_by_role("button", name="Freeze the report").click()
    tab.page.get_by_role("button", name="Make a link").wait_for()
    yield tab
    assert outside == []


@pytest.mark.parametrize("part", range(PARTS))
def test_it_works(tab: Tab, server: Server, seeded: Seeded, part: int) -> None:
    problems: list[str] = []
    for name, path in list(addresses(server, seeded).items())[part::PARTS]:
        tab.show(1440, "light")
        tab.open(path)
        tab.draw_everything()
        problems += [f"{name}: without a name: {html}" for html in unnamed_controls(tab.page)]
        for theme, width, rules in LOOKS:
            tab.show(width, theme)
            where = f"{name}, {theme}, {width} px"
            if stays_too_wide(tab):
                problems.append(f"{where}: scrolls sideways")
            problems += [f"{where}: breaks {word!r} in a table" for word in broken_words(tab.page)]
            problems += [f"{where}: {violation}" for violation in violations(tab.page, rules)]
        problems += [f"{name}: {error}" for error in tab.console_errors]
        tab.console_errors.clear()
    assert not problems, "\n".join(problems)


def test_pages_without_data(open_tab: OpenTab, server: Server) -> None:
    problems: list[str] = []
    tab = open_tab(390)
    for rest in ("", "compare/", "evaluations/", "alerts/", "rules/", "reports/", "reports/new"):
        tab.open(f"/p/{server.project.slug}/{rest}")
        if tab.is_too_wide():
            problems.append(f"{rest}: scrolls sideways")
        problems += [f"{rest}: {violation}" for violation in violations(tab.page)]
    assert not problems, "\n".join(problems)
