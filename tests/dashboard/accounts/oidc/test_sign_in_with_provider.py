"""Sign in with a provider of OpenID Connect: what is accepted and refused, and the roles of groups."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from dashboard.helpers.oidc_provider import CLIENT_ID, CLIENT_SECRET, Provider, running_provider
from django.test import Client
from pytest_django import Settings

from fp8scope_dashboard.accounts.models import ApiToken, Membership, OidcIdentity, Project, Role, User
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.audit.models import Action, Entry
from fp8scope_dashboard.settings.sign_in import GroupRoles, OidcSettings

pytestmark = pytest.mark.django_db


def settings_of(issuer: str) -> OidcSettings:
    return OidcSettings(
        issuer=issuer,
        client_id=CLIENT_ID,
        client_secret=CLIENT_SECRET,
        name="Example",
        scopes="openid profile email",
        username_claim="preferred_username",
        groups_claim="groups",
        session_hours=12,
        roles=None,
    )


@pytest.fixture
def provider(settings: Settings) -> Iterator[Provider]:
    with running_provider() as running:
        settings.OIDC = settings_of(running.issuer)
        yield running


@pytest.fixture
def project(db: None) -> Project:
    return create_project("research", "Research")


@pytest.fixture
def roles(provider: Provider, project: Project, settings: Settings) -> GroupRoles:
    """`ml` are members of the project, `leads` administer it, and `ops` the server."""
    given = GroupRoles(
        frozenset({"ops"}), {"research": {"member": frozenset({"ml"}), "admin": frozenset({"leads"})}}
    )
    settings.OIDC = replace(settings.OIDC, roles=given)
    return given


def start(client: Client, query: str = "") -> str:
    answer = client.get(f"/signin/oidc/{query}")
    assert answer.status_code == 302
    return str(answer["Location"])


def sign_in(provider: Provider, client: Client, query: str = "") -> Any:
    return client.get("/signin/oidc/callback/", provider.code_for(start(client, query)))


def signed_in(client: Client) -> User | None:
    return User.objects.filter(pk=client.session.get("_auth_user_id", 0)).first()


def refused(answer: Any, client: Client, sentence: str) -> None:
    assert answer.status_code == 403 and sentence in answer.content.decode(), answer.content.decode()
    assert signed_in(client) is None


def test_it_works(provider: Provider, client: Client) -> None:
    assert "Sign in with Example" in client.get("/signin/").content.decode()
    answer = sign_in(provider, client, "?next=/account/")
    assert (answer.status_code, answer["Location"]) == (302, "/account/")
    user = signed_in(client)
    assert user is not None and (user.username, user.email) == ("ada", "ada@example.org")
    assert not user.has_usable_password() and not user.is_superuser
    assert client.session.get_expiry_age() == 12 * 3600
    assert OidcIdentity.objects.get().subject == "1"


def test_the_subject_identifies_a_user_and_not_the_name(provider: Provider, client: Client) -> None:
    sign_in(provider, client)
    provider.claims |= {"preferred_username": "countess"}
    again = Client()
    sign_in(provider, again)
    assert signed_in(again) == signed_in(client) and User.objects.count() == 1
    provider.claims |= {"sub": "2", "preferred_username": "ada"}
    other = Client()
    refused(sign_in(provider, other), other, "There is a user “ada” already")


def test_an_existing_user_is_not_taken_over_by_the_name(provider: Provider, client: Client) -> None:
    User.objects.create_superuser("ada")
    refused(sign_in(provider, client), client, "sign in as before and connect single sign-on")
    assert not OidcIdentity.objects.exists()


def test_a_signed_in_user_connects_the_account(provider: Provider, client: Client) -> None:
    user = User.objects.create_user("somebody")
    client.force_login(user)
    assert "Connect Example" in client.get("/account/").content.decode()
    assert sign_in(provider, client)["Location"] == "/account/"
    elsewhere = Client()
    sign_in(provider, elsewhere)
    assert signed_in(elsewhere) == user and User.objects.count() == 1
    # The account is taken: another user cannot connect it.
    other = Client()
    other.force_login(User.objects.create_user("other"))
    answer = sign_in(provider, other)
    assert answer.status_code == 403 and "belongs to another user" in answer.content.decode()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"nonce": "of another sign-in"}, "nonce"),
        ({"nonce": None}, "nonce"),
        ({"aud": "another-client"}, "aud"),
        ({"aud": "another-client", "azp": CLIENT_ID}, "aud"),
        ({"aud": [CLIENT_ID, "another"], "azp": "another"}, "azp"),
        ({"iss": "https://evil.example"}, "iss"),
        ({"exp": int(time.time()) - 3600}, "Expired"),
        ({"exp": None}, "exp"),
        ({"sub": None}, "sub"),
        ({"iat": int(time.time()) + 3600}, "refused"),
    ],
)
def test_refuses_a_wrong_id_token(
    provider: Provider, client: Client, wrong: dict[str, Any], reason: str
) -> None:
    provider.wrong = wrong
    answer = sign_in(provider, client)
    refused(answer, client, "was refused")
    assert reason in answer.content.decode() and not User.objects.exists()


def test_refuses_signatures_of_others(provider: Provider, client: Client) -> None:
    provider.signs_with_published_key = False
    refused(sign_in(provider, client), client, "was refused")
    provider.signs_with_published_key = True
    # The metadata offers both, but the client secret signs nothing, and neither does nobody.
    for algorithm in ("HS256", "none"):
        provider.algorithm = algorithm
        refused(sign_in(provider, client), client, "was refused")


def test_refuses_an_answer_without_an_id_token(provider: Provider, client: Client) -> None:
    provider.sends_id_token = False
    refused(sign_in(provider, client), client, "sent no ID token")


def test_refuses_a_state_that_this_session_did_not_begin(provider: Provider, client: Client) -> None:
    back = provider.code_for(start(client))
    other = Client()
    refused(other.get("/signin/oidc/callback/", back), other, "State")
    refused(client.get("/signin/oidc/callback/", {**back, "state": "x"}), client, "State")
    refused(client.get("/signin/oidc/callback/", {"code": back["code"]}), client, "State")
    refused(client.get("/signin/oidc/callback/"), client, "State")


def test_an_answer_works_once(provider: Provider, client: Client) -> None:
    back = provider.code_for(start(client))
    assert client.get("/signin/oidc/callback/", back).status_code == 302
    client.logout()
    refused(client.get("/signin/oidc/callback/", back), client, "State")


def test_says_that_the_person_cancelled(provider: Provider, client: Client) -> None:
    start(client)
    answer = client.get(
        "/signin/oidc/callback/", {"error": "access_denied", "error_description": "<b>no</b>"}
    )
    refused(answer, client, "was refused")
    assert "<b>no" not in answer.content.decode()


def test_says_that_the_provider_does_not_answer(client: Client, settings: Settings) -> None:
    with running_provider() as gone:
        address = gone.issuer
    settings.OIDC = settings_of(address)
    answer = client.get("/signin/oidc/")
    assert answer.status_code == 503 and "does not answer" in answer.content.decode()


def test_a_provider_that_hangs_is_given_up(
    client: Client, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8scope_dashboard.accounts.oidc.client.TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings.OIDC = settings_of(f"http://127.0.0.1:{silent.getsockname()[1]}")
        answer = client.get("/signin/oidc/")
    assert answer.status_code == 503 and "does not answer" in answer.content.decode()


def test_a_provider_with_another_issuer_is_refused(provider: Provider, client: Client) -> None:
    back = provider.code_for(start(client))
    settings_issuer, provider.issuer = provider.issuer, "https://evil.example"
    from fp8scope_dashboard.accounts.oidc.client import _registered

    _registered.cache_clear()
    answer = client.get("/signin/oidc/callback/", back)
    provider.issuer = settings_issuer
    refused(answer, client, "another address than FP8SCOPE_OIDC_ISSUER")


def test_groups_give_roles_and_take_them(provider: Provider, roles: GroupRoles, project: Project) -> None:
    def role_with(*groups: str) -> str | None:
        provider.claims["groups"] = list(groups)
        client = Client()
        answer = sign_in(provider, client)
        membership = Membership.objects.filter(user__username="ada", project=project).first()
        assert (answer.status_code == 302) == (membership is not None or "ops" in groups)
        return None if membership is None else membership.role

    assert role_with("ml") == Role.MEMBER
    assert role_with("ml", "leads") == Role.ADMIN
    token, _ = create_token(project, "cluster", User.objects.get(username="ada"))
    assert role_with("ml", "unknown") == Role.MEMBER
    assert ApiToken.objects.get(pk=token.pk).works
    assert role_with() is None
    assert not ApiToken.objects.get(pk=token.pk).works, "the tokens of a removed member end"
    assert role_with("leads") == Role.ADMIN
    assert role_with("ops") is None and User.objects.get().is_superuser
    assert role_with("ml") == Role.MEMBER and not User.objects.get().is_superuser
    changed = Entry.objects.filter(action=Action.ROLES_SYNCHRONISED).order_by("pk")
    texts = list(changed.filter(project=project).values_list("text", flat=True))
    assert texts[:3] == ["ada: none → member", "ada: member → admin", "ada: admin → member"]
    assert list(changed.filter(project=None).values_list("text", flat=True)) == [
        "ada: none → admin of the server",
        "ada: admin → none of the server",
    ]


def test_who_has_no_group_gets_no_account(provider: Provider, roles: GroupRoles, client: Client) -> None:
    for groups in (None, [], ["others"], "others"):
        provider.claims["groups"] = groups
        refused(sign_in(provider, client), client, "None of your groups has access")
    assert not User.objects.exists()


def test_a_removed_person_keeps_what_the_file_does_not_name(
    provider: Provider, roles: GroupRoles, project: Project
) -> None:
    provider.claims["groups"] = ["ml"]
    sign_in(provider, Client())
    elsewhere = create_project("by-hand", "By hand", User.objects.get())
    provider.claims["groups"] = []
    client = Client()
    assert sign_in(provider, client).status_code == 302
    assert [membership.project for membership in Membership.objects.all()] == [elsewhere]


def test_groups_come_from_the_user_information_too(
    provider: Provider, roles: GroupRoles, project: Project
) -> None:
    provider.userinfo = {"sub": "1", "groups": ["ml"]}
    sign_in(provider, Client())
    assert Membership.objects.get().role == Role.MEMBER
    # Of another subject it says nothing.
    provider.userinfo = {"sub": "2", "groups": ["leads"]}
    sign_in(provider, Client())
    assert not Membership.objects.exists()


def test_a_deactivated_user_stays_out(provider: Provider, client: Client) -> None:
    sign_in(provider, Client())
    User.objects.update(is_active=False)
    refused(sign_in(provider, client), client, "deactivated")


def test_the_next_page_stays_on_this_site(provider: Provider, client: Client) -> None:
    assert sign_in(provider, client, "?next=https://evil.example/")["Location"] == "/"


def test_without_a_provider_there_is_no_such_page(client: Client, db: None) -> None:
    for path in ("/signin/oidc/", "/signin/oidc/callback/"):
        assert client.get(path).status_code == 404
    assert "Sign in with" not in client.get("/signin/").content.decode()


def test_passwords_can_be_switched_off(provider: Provider, client: Client, settings: Settings) -> None:
    User.objects.create_user("old", password="correct horse battery")
    settings.PASSWORDS = False
    page = client.get("/signin/").content.decode()
    assert 'type="password"' not in page and "takes no passwords" in page
    form = {"username": "old", "password": "correct horse battery"}
    assert client.post("/signin/", form).status_code == 403 and signed_in(client) is None
    sign_in(provider, client)
    page = client.get("/account/").content.decode()
    assert "Set a password" not in page
    client.post("/account/", {"new_password1": "a long new password", "new_password2": "a long new password"})
    assert not User.objects.get(username="ada").has_usable_password()
