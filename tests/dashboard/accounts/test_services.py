"""Projects, roles, tokens and sign-in links."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import connection
from django.http import Http404
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from fp8scope_dashboard.accounts import services, tokens
from fp8scope_dashboard.accounts.models import ApiToken, Membership, Project, Role, SignInLink, User
from fp8scope_dashboard.alerts.models import Rule

pytestmark = pytest.mark.django_db


@pytest.fixture
def project() -> Project:
    return services.create_project("default", "Default")


def person(name: str = "ada", **fields: object) -> User:
    return User.objects.create(username=name, **fields)


def secret_of(link: str) -> str:
    match = re.fullmatch(r"http://host/signin/([A-Za-z0-9_-]{43})/", link)
    assert match
    return match[1]


def test_it_works(project: Project) -> None:
    token, secret = tokens.create_token(project, "cluster")
    assert re.fullmatch(r"fp8s_[A-Za-z0-9]{8}_[A-Za-z0-9_-]{43}", secret)
    assert services.authenticate_token(secret) == token
    assert secret.startswith(token.prefix)
    assert Rule.objects.filter(project=project).exists()


def test_no_secret_is_stored(project: Project) -> None:
    _, secret = tokens.create_token(project, "cluster")
    link = secret_of(services.create_sign_in_link(person(), "http://host/"))
    stored = [*ApiToken.objects.values_list(), *SignInLink.objects.values_list()]
    assert secret[14:] not in repr(stored)
    assert link not in repr(stored)


@pytest.mark.parametrize(
    "wrong", ["", "fp8s_", "x" * 57, "fp8s_AAAAAAAA_" + "A" * 43, "fp8s_AAAAAAAA_" + "é" * 43]
)
def test_rejects_an_unknown_token(project: Project, wrong: str) -> None:
    tokens.create_token(project, "cluster")
    assert services.authenticate_token(wrong) is None


def test_rejects_a_revoked_token(project: Project) -> None:
    token, secret = tokens.create_token(project, "cluster")
    tokens.revoke_token(token)
    assert services.authenticate_token(secret) is None
    first = ApiToken.objects.get().revoked_at
    tokens.revoke_token(token)
    assert ApiToken.objects.get().revoked_at == first


def test_records_the_last_use_at_most_every_minute(project: Project) -> None:
    _, secret = tokens.create_token(project, "cluster")
    services.authenticate_token(secret)
    first = ApiToken.objects.get().last_used_at
    assert first is not None
    services.authenticate_token(secret)
    assert ApiToken.objects.get().last_used_at == first
    ApiToken.objects.update(last_used_at=first - timedelta(minutes=2))
    services.authenticate_token(secret)
    again = ApiToken.objects.get().last_used_at
    assert again is not None
    assert again >= first


def test_names_are_bounded(project: Project) -> None:
    for slug, name in [("default", "Again"), ("no spaces", "x"), ("", "x"), ("x", ""), ("x", "y" * 129)]:
        with pytest.raises(ValidationError):
            services.create_project(slug, name)
    for name in ("", "x" * 129):
        with pytest.raises(ValidationError):
            tokens.create_token(project, name)
    assert Project.objects.count() == 1


def test_a_link_works_once() -> None:
    user = person()
    secret = secret_of(services.create_sign_in_link(user, "http://host"))
    assert services.is_usable_link(secret)
    assert services.use_sign_in_link(secret) == user
    assert services.use_sign_in_link(secret) is None
    assert not services.is_usable_link(secret)
    assert services.use_sign_in_link("nonsense") is None


def test_a_link_expires() -> None:
    secret = secret_of(services.create_sign_in_link(person(), "http://host", timedelta(minutes=5)))
    SignInLink.objects.update(expires_at=timezone.now())
    assert services.use_sign_in_link(secret) is None


def test_a_link_does_not_sign_in_a_deactivated_user() -> None:
    secret = secret_of(services.create_sign_in_link(person(is_active=False), "http://host"))
    assert services.use_sign_in_link(secret) is None


def test_creates_the_first_administrator_once() -> None:
    link = services.create_administrator_link("http://host")
    assert link is not None
    user = User.objects.get()
    assert (user.username, user.is_superuser, user.has_usable_password()) == ("admin", True, False)
    assert Membership.objects.get().role == Role.ADMIN
    assert Project.objects.get().slug == "default"
    # Until the first sign-in, each start prints a new link for the same user.
    again = services.create_administrator_link("http://host")
    assert again not in (None, link)
    assert (User.objects.count(), Project.objects.count()) == (1, 1)
    User.objects.update(last_login=timezone.now())
    assert services.create_administrator_link("http://host") is None


def test_users_see_their_projects(project: Project) -> None:
    other = services.create_project("other", "Other", owner=person("owner"))
    ada, root = person("ada"), person("root", is_superuser=True)
    Membership.objects.create(user=ada, project=project, role=Role.VIEWER)
    assert list(services.projects_of(ada)) == [project]
    assert list(services.projects_of(root)) == [project, other]
    assert services.require_project(ada, "default") == project
    for slug in ("other", "nothing"):
        with pytest.raises(Http404):
            services.require_project(ada, slug)


@pytest.mark.parametrize(("held", "enough"), [("viewer", 1), ("member", 2), ("admin", 3)])
def test_a_role_includes_the_roles_below_it(project: Project, held: str, enough: int) -> None:
    ada = person()
    Membership.objects.create(user=ada, project=project, role=held)
    for role in list(Role)[:enough]:
        assert services.require_project(ada, "default", role) == project
    for role in list(Role)[enough:]:
        with pytest.raises(PermissionDenied, match=role.value):
            services.require_project(ada, "default", role)


def test_a_deactivated_user_has_no_role(project: Project) -> None:
    root = person("root", is_superuser=True, is_active=False)
    assert services.role_in(root, project) is None
    with pytest.raises(Http404):
        services.require_project(root, "default")


def test_authenticating_loads_the_whole_token_and_project(project: Project) -> None:
    Project.objects.create(slug="another", name="Another")
    Project.objects.filter(pk=project.pk).update(margin=0.5, raw_days=7)
    _, secret = tokens.create_token(project, "cluster", person())
    services.authenticate_token(secret)  # records the first use
    expected = ApiToken.objects.select_related("project").get()
    with CaptureQueriesContext(connection) as queries:
        token = services.authenticate_token(secret)
        assert token is not None
        for loaded, stored in ((token, expected), (token.project, expected.project)):
            assert loaded == stored and not loaded.get_deferred_fields() and not loaded._state.adding
            for field in type(stored)._meta.concrete_fields:
                assert getattr(loaded, field.attname) == getattr(stored, field.attname), field
    assert not queries.captured_queries, "the token is read by one SQL statement, not by the ORM"
    tokens.revoke_token(token)
    assert services.authenticate_token(secret) is None
