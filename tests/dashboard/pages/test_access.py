"""Who may see and do what: every address of a project, for every kind of person."""

from __future__ import annotations

import re
import uuid

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.visitors import Visitor
from django.test import Client
from django.urls import reverse

from fp8scope_dashboard.accounts.models import ApiToken
from fp8scope_dashboard.accounts.services import create_token
from fp8scope_dashboard.alerts.models import Channel, Event, Rule
from fp8scope_dashboard.pages.urls import urlpatterns

READ = ["project", "run", "spark", "figure", "compare", "compare_figure", "evaluations", "scores", "alerts"]
READ += ["evidence", "settings", "token_list", "ranks", "run_commands", "run_reports", "report_figure"]
READ += ["run_data", "run_export"]
STREAMS = ["project_events", "run_events"]
MEMBER = ["acknowledge", "mute", "token_create", "token_revoke", "rule_change", "command_new"]
MEMBER += ["run_delete"]
ADMIN = ["channel_create", "channel_change", "margins", "retention"]


class Addresses:
    """The address of every page of a project, with one object of each kind in it."""

    def __init__(self, visitor: Visitor) -> None:
        self.slug = visitor.project.slug
        self.run = make_run(visitor.project, "a run")
        self.rule = Rule.objects.filter(project=visitor.project).earliest("id")
        self.event = Event.objects.create(
            run=self.run,
            rule=self.rule,
            kind="loss_spike",
            severity="warning",
            onset_step=1,
            step=2,
            message="Up.",
        )
        self.token, _ = create_token(visitor.project, "t")
        self.channel = Channel.objects.create(
            project=visitor.project, name="c", config={"url": "https://x.test"}
        )

    def of(self, name: str) -> str:
        route = str(next(one.pattern for one in urlpatterns if one.name == name))
        known = {"run_id": self.run.pk, "event_id": self.event.pk, "rule_id": self.rule.pk}
        known |= {"token_id": self.token.pk, "channel_id": self.channel.pk, "slug": self.slug}
        known |= {"name": "bisect" if name == "report_figure" else "loss", "form": "csv"}
        return reverse(name, kwargs={key: known[key] for key in re.findall(r"<\w+:(\w+)>", route)})


@pytest.fixture
def addresses(admin: Visitor) -> Addresses:
    return Addresses(admin)


def test_it_works(viewer: Visitor, addresses: Addresses) -> None:
    for name in READ:
        assert viewer.client.get(addresses.of(name)).status_code == 200, name


def test_no_address_is_forgotten_here() -> None:
    listed = {*READ, *STREAMS, *MEMBER, *ADMIN, "home"}
    assert {one.name for one in urlpatterns} == listed


def test_redirects_visitors_to_sign_in(db: None, addresses: Addresses) -> None:
    for name in READ:
        answer = Client().get(addresses.of(name))
        assert answer.status_code == 302 and answer["Location"].startswith("/signin/?next="), name
    for name in (*MEMBER, *ADMIN):
        assert Client().post(addresses.of(name)).status_code == 302, name
    for name in STREAMS:
        assert Client().get(addresses.of(name)).status_code == 401, name


def test_another_projects_member_finds_nothing(stranger: Visitor, addresses: Addresses) -> None:
    for name in (*READ, *STREAMS):
        assert stranger.client.get(addresses.of(name)).status_code == 404, name
    for name in (*MEMBER, *ADMIN):
        assert stranger.client.post(addresses.of(name)).status_code == 404, name


def test_ids_of_another_project_are_not_found_in_ones_own(stranger: Visitor, addresses: Addresses) -> None:
    addresses.slug = stranger.project.slug
    mine = ("ranks", "run_commands", "run_reports", "report_figure", "run_data", "run_export")
    for name in ("run", "spark", "figure", "evidence", "run_events", *mine):
        assert stranger.client.get(addresses.of(name)).status_code == 404, name
    for name in (
        *("acknowledge", "mute", "token_revoke", "rule_change", "channel_change"),
        *("command_new", "run_delete"),
    ):
        assert stranger.client.post(addresses.of(name)).status_code == 404, name
    assert ApiToken.objects.get(pk=addresses.token.pk).revoked_at is None
    assert Channel.objects.filter(pk=addresses.channel.pk).exists()


def test_a_viewer_changes_nothing(viewer: Visitor, addresses: Addresses) -> None:
    for name in (*MEMBER, *ADMIN):
        assert viewer.client.post(addresses.of(name)).status_code == 403, name
    assert ApiToken.objects.get(pk=addresses.token.pk).revoked_at is None


def test_a_member_changes_all_but_channels_and_margins(member: Visitor, addresses: Addresses) -> None:
    for name in ADMIN:
        assert member.client.post(addresses.of(name)).status_code == 403, name
    for name in MEMBER:
        assert member.client.post(addresses.of(name)).status_code in (200, 302), name


def test_nothing_is_changed_by_looking(admin: Visitor, addresses: Addresses) -> None:
    for name in (*MEMBER, *ADMIN):
        assert admin.client.get(addresses.of(name)).status_code == 405, name


def test_forms_are_safe_from_other_sites(admin: Visitor, addresses: Addresses) -> None:
    careful = Client(enforce_csrf_checks=True)
    careful.force_login(admin.user)
    for name in (*MEMBER, *ADMIN):
        assert careful.post(addresses.of(name)).status_code == 403, name


def test_unknown_runs_and_figures(admin: Visitor, addresses: Addresses) -> None:
    assert admin.client.get(admin.address(f"runs/{uuid.uuid4()}/")).status_code == 404
    assert admin.client.get(admin.address(f"runs/{addresses.run.pk}/figures/nothing.json")).status_code == 404
    assert admin.client.get(admin.address("compare/figures/nothing.json")).status_code == 404


def test_a_project_that_does_not_exist_looks_like_one_that_is_not_yours(
    stranger: Visitor, admin: Visitor
) -> None:
    theirs, nobodys = stranger.client.get(admin.address()), stranger.client.get("/p/nothing-here/")
    assert theirs.status_code == nobodys.status_code == 404
    assert theirs.content == nobodys.content
