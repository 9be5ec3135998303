"""The settings page: tokens, webhooks, rules and margins."""

from __future__ import annotations

import re

import pytest
from dashboard.helpers.visitors import Visitor

from fp8scope_dashboard.accounts.models import ApiToken
from fp8scope_dashboard.accounts.services import authenticate_token
from fp8scope_dashboard.accounts.tokens import create_token, revoke_token
from fp8scope_dashboard.alerts.models import Channel


def html(visitor: Visitor) -> str:
    answer = visitor.client.get(visitor.address("settings/"))
    assert answer.status_code == 200
    return answer.content.decode()


def post(visitor: Visitor, rest: str, **data: str) -> str:
    """Submit a form; returns the page that follows, with its messages."""
    return visitor.client.post(visitor.address(f"settings/{rest}"), data, follow=True).content.decode()


def test_it_works(member: Visitor) -> None:
    address, htmx = member.address("settings/tokens/new"), {"HX-Request": "true"}
    answer = member.client.post(address, {"name": "cluster A"}, headers=htmx)
    (secret,) = re.findall(r"fp8s_[A-Za-z0-9]{8}_[\w-]{43}", answer.content.decode())
    token = authenticate_token(secret)
    assert token is not None and token.name == "cluster A" and token.created_by == member.user
    assert answer["HX-Trigger"] == "fp8:tokens"


def test_lists_the_channels_and_those_that_are_off(member: Visitor) -> None:
    for name, enabled in (("on-call", True), ("night <watch>", False)):
        Channel.objects.create(project=member.project, name=name, enabled=enabled)
    page = html(member)
    assert "on-call</span>" in page and "night &lt;watch&gt;, off</span>" in page


def test_a_token_is_shown_only_once(member: Visitor) -> None:
    answer = member.client.post(member.address("settings/tokens/new"), {"name": "cluster A"})
    (secret,) = re.findall(r"fp8s_[A-Za-z0-9]{8}_[\w-]{43}", answer.content.decode())
    for rest in ("settings/", "settings/tokens"):
        page = member.client.get(member.address(rest)).content.decode()
        assert "cluster A" in page and secret not in page
        assert ApiToken.objects.get().prefix in page


def test_without_javascript_the_whole_page_is_returned(member: Visitor) -> None:
    page = member.client.post(member.address("settings/tokens/new"), {"name": "cluster A"}).content.decode()
    assert "<html" in page and re.search(r"fp8s_[A-Za-z0-9]{8}_[\w-]{43}", page)


def test_revoked_tokens_are_listed_last(member: Visitor) -> None:
    for name in ("first", "revoked", "last"):
        create_token(member.project, name)
    revoke_token(ApiToken.objects.get(name="revoked"))
    page = member.client.get(member.address("settings/tokens")).content.decode()
    assert re.findall(r'tokens__name">(\w+)<', page) == ["last", "first", "revoked"]


def test_revokes_a_token(member: Visitor) -> None:
    token, secret = create_token(member.project, "old", member.user)
    page = post(member, f"tokens/{token.pk}/revoke")
    assert "Revoked the token “old”" in page
    assert authenticate_token(secret) is None


def test_refuses_a_name_that_is_too_long(member: Visitor) -> None:
    answer = member.client.post(member.address("settings/tokens/new"), {"name": "x" * 500})
    assert "notice--error" in answer.content.decode()
    assert not ApiToken.objects.exists()


def test_changes_the_margins(admin: Visitor) -> None:
    post(admin, "margins", margin="0.5", alpha="0.01")
    admin.project.refresh_from_db()
    assert admin.project.margin == 0.005 and admin.project.alpha == 0.01
    assert 'value="0.5"' in html(admin)


@pytest.mark.parametrize(
    ("margin", "alpha"), [("0", "0.05"), ("0.25", "0.9"), ("nan", "0.05"), ("", ""), ("x", "1")]
)
def test_refuses_margins_out_of_bounds(admin: Visitor, margin: str, alpha: str) -> None:
    assert "notice--error" in post(admin, "margins", margin=margin, alpha=alpha)
    admin.project.refresh_from_db()
    assert admin.project.margin == 0.0025 and admin.project.alpha == 0.05


def test_a_viewer_sees_no_forms(viewer: Visitor) -> None:
    page = html(viewer)
    assert "Create a token" not in page and "Save" not in page and "Add</button>" not in page
    assert page.count("disabled") >= 3
