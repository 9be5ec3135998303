"""Permissions: every address of a project, requested by every kind of user."""

from __future__ import annotations

import uuid

import pytest
from dashboard.helpers.addresses import Addresses
from dashboard.helpers.visitors import Visitor
from django.test import Client

from fp8scope_dashboard.accounts.models import ApiToken
from fp8scope_dashboard.alerts.models import Channel
from fp8scope_dashboard.pages.urls import urlpatterns

READ = ["project", "run", "spark", "figure", "compare", "compare_figure", "evaluations", "scores", "alerts"]
READ += ["evidence", "settings", "token_list", "ranks", "run_commands", "run_reports", "report_figure"]
READ += [
    "run_data",
    "run_export",
    "diagnosis",
    "readiness",
    "readiness_figure",
    "changes",
    "related_runs",
    "progress",
    "channels",
    "channel_list",
    "alert",
    "alerts_recent",
    "rules",
    "rule",
    "rule_new",
    "rule_trial",
    "score_differences",
    "shared_reports",
    "shared_report",
    "run_suggest",
    "tensor",
    "tensor_map",
    "tensor_picture",
    "tensor_ranking",
    "compare_find",
    "fleet",
    "fleet_json",
    "compare_configuration",
    "console_lines",
    "console_text",
    "media",
    "media_content",
    "runs_figure",
    "run_charts",
    "run_scatter",
    "run_parallel",
    "panel_figure",
    "panel_form",
    "step_note",
]
# Redirect to an address that is listed here: test_tensors_views.py covers the first, and a run without a
# baseline has no certificate.
REDIRECTS = ["tensor_find", "certificate"]
# What people do for themselves; it changes nothing that others see.
PERSONAL = ["compare_selected", "view_save", "view_delete", "list_density"]
PERSONAL += ["panel_save", "panels_change", "panel_view_save", "panel_view_delete"]
STREAMS = ["project_events", "run_events"]
MEMBER = [
    "alert_change",
    "acknowledge_many",
    "acknowledge_undo",
    "token_create",
    "token_revoke",
    "token_rotate",
    "command_new",
]
MEMBER += ["rule_try"]
MEMBER += ["note_save", "note_preview", "artefact_new", "artefact_remove"]
MEMBER += ["step_note_save", "step_note_remove"]
MEMBER += ["share_link_new", "share_link_revoke", "shared_report_delete"]
MEMBER += ["runs_change", "runs_undo", "run_colour", "comparison_margin"]
MEMBER += ["delivery_again", "run_delete", "baseline_new", "group_new", "choice_undo"]
MEMBER += ["import_new"]
# Only members import, so only they see what was imported; see pages/imports.
READ_BY_MEMBERS = ["imports", "import_list"]
# Reading needs no role, writing does.
FORMS = ["shared_report_new"]
READ_BY_ADMINS = ["project_audit", "project_audit_file"]
# Addresses outside of projects, with tests of their own.
OTHERS = ["home", "llms", "shared", "alert_picture", "server_status", "server_status_json", "server_metrics"]
OTHERS += ["server_audit", "server_audit_file"]
# Makes a project, so it is not in one; test_home.py covers it.
MAKES = ["project_new"]
# Their address is a secret, which `Addresses` does not make.
SIGNED = ["shared", "alert_picture"]
ADMIN = ["rule_create", "rule_save", "rule_switch", "rule_remove", "change_undo"]
ADMIN += ["channel_create", "channel_change", "margins", "retention"]
ADMIN += ["project_general", "project_archive", "member_add", "member_change", "panel_view_default"]


@pytest.fixture
def addresses(admin: Visitor) -> Addresses:
    return Addresses(admin)


def test_it_works(viewer: Visitor, addresses: Addresses) -> None:
    for name in (*READ, *FORMS):
        assert viewer.client.get(addresses.of(name)).status_code == 200, name


def test_every_address_is_listed_here() -> None:
    listed = {
        *READ,
        *REDIRECTS,
        *STREAMS,
        *PERSONAL,
        *MEMBER,
        *ADMIN,
        *FORMS,
        *OTHERS,
        *MAKES,
        *READ_BY_MEMBERS,
        *READ_BY_ADMINS,
    }
    assert {entry.name for entry in urlpatterns} == listed


def test_an_address_takes_only_its_own_methods(admin: Visitor, addresses: Addresses) -> None:
    addresses.of("project")
    own = {
        name: {"GET", "HEAD"}
        for name in (*READ, *READ_BY_MEMBERS, *READ_BY_ADMINS, *REDIRECTS, *STREAMS, *OTHERS)
        if name not in SIGNED
    }
    own |= {name: {"POST"} for name in (*PERSONAL, *MEMBER, *ADMIN, *MAKES)}
    own |= {name: {"GET", "HEAD", "POST"} for name in FORMS}
    for name, methods in own.items():
        for method in {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} - methods:
            answer = admin.client.generic(method, addresses.of(name))
            assert answer.status_code == 405, (name, method)
            assert set(answer["Allow"].split(", ")) == methods, name


def test_redirects_anonymous_visitors_to_sign_in(db: None, addresses: Addresses) -> None:
    for name in (*READ, *READ_BY_MEMBERS, *FORMS):
        answer = Client().get(addresses.of(name))
        assert answer.status_code == 302 and answer["Location"].startswith("/signin/?next="), name
    for name in (*PERSONAL, *MEMBER, *FORMS, *ADMIN):
        assert Client().post(addresses.of(name)).status_code == 302, name
    for name in STREAMS:
        assert Client().get(addresses.of(name)).status_code == 401, name


def test_a_member_of_another_project_gets_404(stranger: Visitor, addresses: Addresses) -> None:
    for name in (*READ, *READ_BY_MEMBERS, *FORMS, *STREAMS):
        assert stranger.client.get(addresses.of(name)).status_code == 404, name
    for name in (*PERSONAL, *MEMBER, *FORMS, *ADMIN):
        assert stranger.client.post(addresses.of(name)).status_code == 404, name


def test_objects_of_another_project_are_not_found(stranger: Visitor, addresses: Addresses) -> None:
    addresses.slug = stranger.project.slug
    cards: tuple[str, ...] = ("ranks", "run_commands", "run_reports", "report_figure", "run_data")
    cards += ("run_export", "diagnosis", "readiness", "readiness_figure", "changes", "related_runs")
    for name in (
        "run",
        "spark",
        "figure",
        "evidence",
        "run_events",
        "alert",
        "rule",
        "rule_trial",
        *cards,
        "shared_report",
    ):
        assert stranger.client.get(addresses.of(name)).status_code == 404, name
    for name in (
        *("alert_change", "rule_save", "rule_switch", "rule_remove", "token_revoke", "channel_change"),
        *("delivery_again", "member_change", "share_link_new", "share_link_revoke", "shared_report_delete"),
        *("delivery_again", "change_undo"),
        *("runs_undo", "view_delete", "run_colour", "comparison_margin"),
        *("command_new", "run_delete", "baseline_new", "group_new", "choice_undo"),
        *("note_save", "note_preview", "artefact_new", "artefact_remove"),
        *("step_note_save", "step_note_remove"),
    ):
        assert stranger.client.post(addresses.of(name)).status_code == 404, name
    assert ApiToken.objects.get(pk=addresses.token.pk).revoked_at is None
    assert Channel.objects.filter(pk=addresses.channel.pk).exists()


def test_a_viewer_can_change_nothing(viewer: Visitor, addresses: Addresses) -> None:
    for name in (*MEMBER, *FORMS, *ADMIN):
        assert viewer.client.post(addresses.of(name)).status_code == 403, name
    assert ApiToken.objects.get(pk=addresses.token.pk).revoked_at is None


def test_only_administrators_read_the_audit_log(
    member: Visitor, admin: Visitor, addresses: Addresses
) -> None:
    for name in READ_BY_ADMINS:
        assert member.client.get(addresses.of(name)).status_code == 403, name
        assert admin.client.get(addresses.of(name)).status_code == 200, name


def test_says_which_role_is_missing(viewer: Visitor, addresses: Addresses) -> None:
    page = viewer.client.post(addresses.of("token_create")).content.decode()
    assert "requires the role member in Research; yours is viewer" in page


def test_a_member_changes_nothing_that_belongs_to_the_project(member: Visitor, admin: Visitor) -> None:
    addresses = Addresses(admin, author=member.user)
    for name in ADMIN:
        assert member.client.post(addresses.of(name)).status_code == 403, name
    for name in MEMBER:
        # 422: the form of a rule without its fields.
        assert member.client.post(addresses.of(name)).status_code in (200, 302, 422), name


def test_get_requests_change_nothing(admin: Visitor, addresses: Addresses) -> None:
    for name in (*PERSONAL, *MEMBER, *ADMIN):
        assert admin.client.get(addresses.of(name)).status_code == 405, name


def test_forms_need_a_csrf_token(admin: Visitor, addresses: Addresses) -> None:
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(admin.user)
    for name in (*PERSONAL, *MEMBER, *FORMS, *ADMIN):
        assert strict.post(addresses.of(name)).status_code == 403, name


def test_refuses_nul_characters_at_every_address(admin: Visitor, addresses: Addresses) -> None:
    for name in (*READ, *REDIRECTS, *FORMS):
        assert admin.client.get(addresses.of(name), {"q": "a\0"}).status_code == 400, name
    for name in (*PERSONAL, *MEMBER, *ADMIN, *FORMS):
        assert admin.client.post(addresses.of(name), {"name": "a\0"}).status_code == 400, name


def test_unknown_runs_and_figures_get_404(admin: Visitor, addresses: Addresses) -> None:
    assert admin.client.get(admin.address(f"runs/{uuid.uuid4()}/")).status_code == 404
    assert admin.client.get(admin.address(f"runs/{addresses.run.pk}/figures/nothing.json")).status_code == 404
    assert admin.client.get(admin.address("compare/figures/nothing.json")).status_code == 404


def test_a_foreign_project_is_indistinguishable_from_a_missing_one(stranger: Visitor, admin: Visitor) -> None:
    foreign, missing = stranger.client.get(admin.address()), stranger.client.get("/p/nothing-here/")
    assert foreign.status_code == missing.status_code == 404
    assert foreign.content == missing.content
