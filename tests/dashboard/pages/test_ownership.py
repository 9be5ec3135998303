"""Members delete, restore, revoke and rotate only what they made; administrators also what others made."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.visitors import Visitor, html, visitor_of

from fp8scope_dashboard.accounts.models import Role
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.accounts.tokens import create_token, rotate_token
from fp8scope_dashboard.runs import services
from fp8scope_dashboard.runs.models import BulkAction, Run
from fp8scope_dashboard.shared_reports.models import SharedReport, ShareLink


@dataclass(frozen=True)
class Team:
    """Two members, an administrator and a viewer of one project; `ada` has a run, and `bob` another."""

    ada: Visitor
    bob: Visitor
    boss: Visitor
    viewer: Visitor
    ada_run: Run
    bob_run: Run


@pytest.fixture
def team(db: None) -> Team:
    project = create_project("research", "Research")
    ada, bob = (visitor_of(project, name, Role.MEMBER) for name in ("ada", "bob"))
    runs = [make_run(project, f"{person.user.username}'s run") for person in (ada, bob)]
    for run, person in zip(runs, (ada, bob), strict=True):
        Run.objects.filter(pk=run.pk).update(owner=person.user)
    boss, viewer = visitor_of(project, "boss", Role.ADMIN), visitor_of(project, "vera", Role.VIEWER)
    return Team(ada, bob, boss, viewer, *runs)


def delete(visitor: Visitor, run: Run) -> int:
    return visitor.client.post(visitor.address(f"runs/{run.pk}/data/delete"), {"name": run.name}).status_code


def exists(run: Run) -> bool:
    return Run.objects.filter(pk=run.pk).exists()


def test_it_works(team: Team) -> None:
    assert delete(team.ada, team.bob_run) == 403 and exists(team.bob_run)
    assert delete(team.viewer, team.bob_run) == 403 and exists(team.bob_run)
    assert delete(team.bob, team.bob_run) == 302 and not exists(team.bob_run)
    assert delete(team.boss, team.ada_run) == 302 and not exists(team.ada_run)


def test_a_run_belongs_to_the_owner_of_the_token_that_registered_it(team: Team) -> None:
    project = team.ada.project
    token, _ = create_token(project, "cluster", team.ada.user)
    run, _ = services.register(team.ada_run.pk.__class__(int=5), project, {"name": "r"}, token=token)
    assert run.owner == team.ada.user
    # It stays theirs if somebody takes the token over.
    token.created_by = team.boss.user
    token.save()
    run.refresh_from_db()
    assert run.owner == team.ada.user
    assert services.register(run.pk, project, {"name": "r"}, token=token)[0].owner == team.ada.user


def test_a_selection_with_runs_of_others_is_not_deleted(team: Team) -> None:
    both = {"action": "delete", "runs": [str(team.ada_run.pk), str(team.bob_run.pk)]}
    address = team.ada.address("find/change")
    page = team.ada.client.post(address, both, follow=True).content.decode()
    assert "1 of these runs belongs to other people" in page
    assert exists(team.ada_run) and exists(team.bob_run)
    everything = {"action": "delete", "all": "1", "q": "", "matching": "2"}
    assert (
        "belongs to other people" in team.ada.client.post(address, everything, follow=True).content.decode()
    )
    assert exists(team.ada_run) and exists(team.bob_run)
    # Tags, which can be removed again, are for all members.
    team.ada.client.post(address, {**both, "action": "tag", "tag": "x"})
    assert Run.objects.filter(tags=["x"]).count() == 2
    team.boss.client.post(address, both)
    assert not Run.objects.exists()


def test_a_deletion_by_an_administrator_is_not_restored_by_a_member(team: Team) -> None:
    delete(team.boss, team.ada_run)
    action = BulkAction.objects.get()
    undo = team.ada.address(f"find/changes/{action.pk}/undo")
    assert team.ada.client.post(undo).status_code == 403 and not exists(team.ada_run)
    assert "Undo" not in html(team.ada)
    assert team.boss.client.post(undo).status_code == 302 and exists(team.ada_run)


def test_who_is_no_administrator_any_more_does_not_restore_runs_of_others(team: Team) -> None:
    delete(team.boss, team.ada_run)
    action = BulkAction.objects.get()
    team.boss.user.memberships.update(role=Role.MEMBER)
    undo = team.boss.address(f"find/changes/{action.pk}/undo")
    page = team.boss.client.post(undo, follow=True).content.decode()
    assert "belongs to other people" in page and not exists(team.ada_run)


def test_the_page_of_a_run_names_its_owner_and_offers_only_what_works(team: Team) -> None:
    address = f"runs/{team.bob_run.pk}/data/"
    assert "Delete run" in html(team.bob, address) and "Delete run" in html(team.boss, address)
    page = html(team.ada, address)
    assert "Delete run" not in page and "bob made this run" in page
    assert "Delete this run" not in html(team.viewer, address)
    assert "by bob" in html(team.ada, f"runs/{team.bob_run.pk}/")


def test_runs_are_found_by_their_owner(team: Team) -> None:
    page = html(team.ada, "?q=owner:bob")
    assert "bob&#x27;s run" in page and "ada&#x27;s run" not in page


def test_tokens_are_revoked_and_rotated_by_their_owner(team: Team) -> None:
    token, _ = create_token(team.ada.project, "cluster", team.ada.user)
    revoke, rotate = (f"settings/tokens/{token.pk}/{what}" for what in ("revoke", "rotate"))
    for person in (team.bob, team.viewer):
        assert person.client.post(person.address(revoke)).status_code == 403
        assert person.client.post(person.address(rotate)).status_code == 403
    # A secret acts in the name of its owner, so that no administrator gets it.
    assert team.boss.client.post(team.boss.address(rotate)).status_code == 403
    token.refresh_from_db()
    assert token.works and token.rotated_at is None
    assert team.ada.client.post(team.ada.address(rotate)).status_code == 200
    assert team.boss.client.post(team.boss.address(revoke)).status_code == 302
    token.refresh_from_db()
    assert token.revoked_at is not None and token.rotated_at is not None


def test_the_table_of_tokens_offers_only_what_works(team: Team) -> None:
    create_token(team.ada.project, "cluster", team.ada.user)
    nobodys, _ = create_token(team.ada.project, "made by a command")
    table = {name: html(getattr(team, name), "settings/tokens") for name in ("ada", "bob", "boss", "viewer")}
    assert [table[name].count("Revoke…") for name in table] == [1, 0, 2, 0]
    assert [table[name].count("New secret…") for name in table] == [1, 0, 1, 0]
    assert team.boss.client.post(team.boss.address(f"settings/tokens/{nobodys.pk}/rotate")).status_code == 200


def test_only_administrators_create_tokens_that_administer(team: Team) -> None:
    form = {"name": "t", "has_scopes": "1", "scopes": ["read", "administer"]}
    assert "administer" not in html(team.ada, "settings/#tokens").partition('id="tokens"')[2][:6000]
    assert team.ada.client.post(team.ada.address("settings/tokens/new"), form).status_code == 403
    assert team.boss.client.post(team.boss.address("settings/tokens/new"), form).status_code == 200
    assert [token.created_by for token in team.ada.project.tokens.all()] == [team.boss.user]


def test_reports_and_links_are_ended_by_who_made_them(team: Team) -> None:
    project = team.ada.project
    report = SharedReport.objects.create(project=project, title="r", content={}, created_by=team.ada.user)
    link = ShareLink.objects.create(report=report, digest=bytes(32), created_by=team.ada.user)
    address = f"reports/{report.pk}/"
    assert "Delete the report" not in html(team.bob, address) and "Revoke…" not in html(team.bob, address)
    assert team.bob.client.post(team.bob.address(f"{address}links/{link.pk}/revoke")).status_code == 403
    assert team.bob.client.post(team.bob.address(f"{address}delete")).status_code == 403
    assert "Delete the report" in html(team.ada, address) and "Revoke…" in html(team.ada, address)
    assert team.ada.client.post(team.ada.address(f"{address}links/{link.pk}/revoke")).status_code == 302
    assert team.boss.client.post(team.boss.address(f"{address}delete")).status_code == 302
    assert not SharedReport.objects.exists()


def test_members_try_rules_that_administrators_save(team: Team) -> None:
    for person, button in ((team.ada, "Try a rule"), (team.boss, "New rule")):
        assert button in html(person, "rules/")
    form = html(team.ada, "rules/new?kind=threshold")
    assert "Administrators of the project save rules" in form and ">Save<" not in form
    assert ">Save<" in html(team.boss, "rules/new?kind=threshold")
    assert "Switch" not in html(team.ada, "rules/")


def test_a_rotation_on_the_page_shows_the_secret_once(team: Team) -> None:
    token, _ = create_token(team.ada.project, "cluster", team.ada.user)
    answer = team.ada.client.post(
        team.ada.address(f"settings/tokens/{token.pk}/rotate"), headers={"HX-Request": "true"}
    )
    page = answer.content.decode()
    assert answer["HX-Trigger"] == "fp8:tokens" and f"{token.prefix}_" in page
    assert "The former secret works until" in page
    table = html(team.ada, "settings/tokens")
    assert "new secret" in table and f"{token.prefix}_" not in table
    rotate_token(token)
    assert "stops at" in " ".join(html(team.ada, "settings/tokens").split())
