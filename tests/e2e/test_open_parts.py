"""Menus, dialogs, confirmations and errors that are open: accessible in light and dark, and not too wide."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from dashboard.helpers.seeding import seed_project
from e2e.helpers.accessibility import violations
from e2e.helpers.tabs import OpenTab
from helpers.live_servers import Server

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


def click(selector: str) -> Callable[[Page], None]:
    return lambda page: page.locator(selector).first.click()


def search(text: str) -> Callable[[Page], None]:
    def type_and_wait(page: Page) -> None:
        page.locator("#find-text").fill(text)
        page.locator("#runs .notice--warning").wait_for()

    return type_and_wait


STATES: dict[str, tuple[str, Callable[[Page], None]]] = {
    "menu of the account": ("", click(".top__side details.menu > summary")),
    "menu of the project": ("", click(".menu--left > summary")),
    "views": ("", click(".views > summary")),
    "columns": ("", click(".tools details.menu:last-of-type > summary")),
    "shortcuts": ("", lambda page: page.keyboard.press("?")),
    "selected runs": ("", lambda page: page.locator('[type="checkbox"][name="runs"]').first.check()),
    "a search that is not finished": ("", search("loss<")),
    "help": ("alerts/", click("details.help > summary")),
    "revoking a token": ("settings/", click("#tokens details.confirm > summary")),
    "forms of channels": ("channels/", click("#add details:nth-of-type(2) > summary")),
    "quiet hours": ("rules/new", lambda page: page.get_by_label("Quiet hours").check()),
}


@pytest.mark.parametrize(("width", "theme"), [(1440, "light"), (390, "dark")])
def test_it_works(open_tab: OpenTab, server: Server, width: int, theme: str) -> None:
    seed_project(server.project, 60)
    from fp8scope_dashboard.accounts.tokens import create_token

    create_token(server.project, "cluster A")
    tab = open_tab(width, theme)
    problems: list[str] = []
    for name, (path, open_part) in STATES.items():
        tab.open(f"/p/{server.project.slug}/{path}")
        open_part(tab.page)
        tab.page.wait_for_timeout(200)
        if tab.is_too_wide():
            problems.append(f"{name}: scrolls sideways")
        # What the header of a scrolled page covers in part counts as too small to be touched.
        tab.page.evaluate("window.scrollTo(0, 0)")
        # What an open menu covers is too small to be touched, but cannot be touched at all.
        part = "details.menu[open]" if tab.page.locator("details.menu[open]").count() else "html"
        problems += [f"{name}: {violation}" for violation in violations(tab.page, within=part)]
    assert not problems, "\n".join(problems)


def test_a_removed_member_is_restored_and_a_role_is_saved_at_once(open_tab: OpenTab, server: Server) -> None:
    from fp8scope_dashboard.accounts.models import Membership, Role, User

    user = User.objects.create_user("mia")
    Membership.objects.create(user=user, project=server.project, role=Role.VIEWER)
    tab = open_tab()
    tab.open(f"/p/{server.project.slug}/settings/")
    tab.page.get_by_label("Role of mia").select_option("member")
    tab.page.get_by_text("mia has the role member now.").wait_for()
    tab.page.get_by_role("button", name="Remove mia").click()
    tab.page.get_by_role("button", name="Undo", exact=True).click()
    tab.page.get_by_text("Undone: ").first.wait_for()
    assert Membership.objects.get(user=user, project=server.project).role == Role.MEMBER
