"""What ends when a person leaves a project: their tokens and their links to reports."""

from __future__ import annotations

import subprocess
import sys

import pytest
from dashboard.helpers.visitors import Visitor, visitor_of
from django.test import Client
from helpers.live_servers import process_environment

from fp8scope_dashboard.accounts.models import ApiToken, Membership, Project, Role, Scope
from fp8scope_dashboard.accounts.services import authenticate_token, create_project, is_token
from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.audit.models import Action, Entry
from fp8scope_dashboard.shared_reports.models import SharedReport, ShareLink
from fp8scope_dashboard.shared_reports.services import create_link


class Leaver:
    """A member with a token and a link."""

    def __init__(self, project: Project, name: str = "mia") -> None:
        self.visitor = visitor_of(project, name, Role.MEMBER)
        self.membership = Membership.objects.get(user=self.visitor.user, project=project)
        self.token, self.secret = create_token(project, "mine", self.visitor.user)
        report = SharedReport.objects.create(project=project, title="r", content={"sections": []})
        self.link, self.link_secret = create_link(report, self.visitor.user, None)

    def works(self) -> tuple[bool, bool]:
        """Whether the token and the link let anybody in."""
        opened = Client().get(f"/shared/{self.link_secret}/").status_code == 200
        assert (authenticate_token(self.secret) is not None) == is_token(self.secret)
        return is_token(self.secret), opened


@pytest.fixture
def boss(db: None) -> Visitor:
    return visitor_of(create_project("research", "Research"), "ada", Role.ADMIN)


@pytest.fixture
def leaver(boss: Visitor) -> Leaver:
    return Leaver(boss.project)


def change(boss: Visitor, leaver: Leaver, **fields: str) -> str:
    address = boss.address(f"settings/members/{leaver.membership.pk}")
    answer = boss.client.post(address, fields, follow=True)
    assert answer.status_code == 200
    return answer.content.decode()


def test_it_works(boss: Visitor, leaver: Leaver) -> None:
    assert leaver.works() == (True, True)
    page = boss.client.get(boss.address("settings/")).content.decode()
    assert "1 API token and 1 link to reports" in page
    page = change(boss, leaver, remove="1", asked="1", revoke="1")
    assert leaver.works() == (False, False)
    assert "mia is no longer a member. Of theirs: 1 token and 1 link revoked." in page


def test_revokes_by_default(boss: Visitor, leaver: Leaver) -> None:
    change(boss, leaver, remove="1")
    assert leaver.works() == (False, False)


def test_leaves_what_others_made_and_what_they_made_elsewhere(boss: Visitor, leaver: Leaver) -> None:
    other = Leaver(boss.project, "tom")
    _, elsewhere = create_token(create_project("else", "Else"), "t", leaver.visitor.user)
    change(boss, leaver, remove="1")
    assert other.works() == (True, True) and is_token(elsewhere)


def test_the_administrator_takes_over_what_they_keep(boss: Visitor, leaver: Leaver) -> None:
    change(boss, leaver, remove="1", asked="1")
    assert leaver.works() == (True, True)
    assert ApiToken.objects.get(pk=leaver.token.pk).created_by == boss.user
    assert ShareLink.objects.get(pk=leaver.link.pk).created_by == boss.user
    assert Entry.objects.get().text == "mia (member); 1 token and 1 link taken over by ada"


@pytest.mark.parametrize("asked", [{}, {"asked": "1"}])
def test_undoing_gives_everything_back(boss: Visitor, leaver: Leaver, asked: dict[str, str]) -> None:
    _, revoked = create_token(boss.project, "revoked before", leaver.visitor.user)
    boss.client.post(boss.address(f"settings/tokens/{ApiToken.objects.latest('id').pk}/revoke"))
    change(boss, leaver, remove="1", **asked)
    entry = Entry.objects.get(action=Action.MEMBER_REMOVED)
    undo = boss.address(f"settings/changes/{entry.pk}/undo")
    page = boss.client.post(undo, follow=True).content.decode()
    assert "Undone: Removed a member: mia (member)" in page
    assert leaver.works() == (True, True) and not is_token(revoked)
    assert Membership.objects.get(user=leaver.visitor.user).role == Role.MEMBER
    assert ApiToken.objects.get(pk=leaver.token.pk).created_by == leaver.visitor.user


def test_what_was_taken_over_and_revoked_stays_revoked(boss: Visitor, leaver: Leaver) -> None:
    change(boss, leaver, remove="1", asked="1")
    boss.client.post(boss.address(f"settings/tokens/{leaver.token.pk}/revoke"))
    entry = Entry.objects.get(action=Action.MEMBER_REMOVED)
    boss.client.post(boss.address(f"settings/changes/{entry.pk}/undo"))
    assert not is_token(leaver.secret)


def test_a_member_cannot_undo_a_removal(boss: Visitor, leaver: Leaver) -> None:
    member = visitor_of(boss.project, "tom", Role.MEMBER)
    change(boss, leaver, remove="1")
    undo = boss.address(f"settings/changes/{Entry.objects.get().pk}/undo")
    assert member.client.post(undo).status_code == 403
    assert leaver.works() == (False, False)


def test_a_viewer_keeps_only_tokens_that_read(boss: Visitor, leaver: Leaver) -> None:
    _, reading = create_token(boss.project, "r", leaver.visitor.user, [Scope.READ])
    page = change(boss, leaver, role="viewer")
    assert "Of theirs: 1 token and 1 link revoked." in page
    assert leaver.works() == (False, False) and is_token(reading)
    boss.client.post(boss.address(f"settings/changes/{Entry.objects.get().pk}/undo"))
    leaver.membership.refresh_from_db()
    assert leaver.works() == (True, True) and leaver.membership.role == Role.MEMBER


def test_a_deactivated_accounts_tokens_and_links_do_not_work(leaver: Leaver) -> None:
    leaver.visitor.user.is_active = False
    leaver.visitor.user.save()
    assert leaver.works() == (False, False)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("option", [(), ("--keep-tokens",)])
def test_the_command_does_the_same(leaver: Leaver, option: tuple[str, ...]) -> None:
    command = [
        sys.executable,
        "-m",
        "fp8scope_dashboard.cli",
        "admin",
        "remove",
        "mia",
        "--project",
        "research",
    ]
    done = subprocess.run(
        [*command, *option], env=process_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "1 token and 1 link: " + ("kept" if option else "revoked") in done.stderr
    assert not Membership.objects.filter(pk=leaver.membership.pk).exists()
    assert leaver.works() == ((True, True) if option else (False, False))
    assert Entry.objects.get().by == "fp8scope admin"
