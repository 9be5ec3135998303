"""The life of tokens: expiry, rotation, and the sentences on what does not work."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from fp8scope_dashboard.accounts import tokens
from fp8scope_dashboard.accounts.models import ApiToken, Project, User
from fp8scope_dashboard.accounts.services import authenticate_token, create_project, token_and_project
from fp8scope_dashboard.accounts.tokens import (
    TokenError,
    create_token,
    revoke_token,
    rotate_token,
    why_refused,
)

pytestmark = pytest.mark.django_db
DAY = timedelta(days=1)


@pytest.fixture
def project() -> Project:
    return create_project("default", "Default")


def later(token: ApiToken, by: timedelta) -> None:
    """Let time pass for a token: move all of its moments into the past."""
    token.refresh_from_db()
    for name in ("created_at", "expires_at", "rotated_at", "former_until"):
        moment = getattr(token, name)
        setattr(token, name, moment and moment - by)
    token.save()


def test_it_works(project: Project) -> None:
    token, secret = create_token(project, "cluster", lifetime=30 * DAY)
    assert token.expires_at is not None and token.expires_at - token.created_at == 30 * DAY
    assert authenticate_token(secret) == token and token_and_project(secret) == (token.pk, project.pk)
    later(token, 31 * DAY)
    assert authenticate_token(secret) is None and token_and_project(secret) is None
    assert f"The token “cluster” ({token.prefix}…) expired on " in why_refused(secret)


def test_a_token_without_a_lifetime_does_not_expire(project: Project) -> None:
    token, secret = create_token(project, "cluster")
    later(token, 10_000 * DAY)
    assert authenticate_token(secret) == token


def test_a_rotated_token_has_two_secrets_for_a_day(project: Project) -> None:
    token, former = create_token(project, "cluster")
    secret = rotate_token(token)
    assert secret != former and secret[:14] == former[:14]
    for works in (secret, former):
        authenticated = authenticate_token(works)
        assert authenticated == token and token_and_project(works) == (token.pk, project.pk)
    later(token, tokens.OVERLAP + timedelta(minutes=1))
    assert authenticate_token(former) is None and authenticate_token(secret) == token
    assert "has a new secret; this one worked until " in why_refused(former)


def test_a_second_rotation_ends_the_oldest_secret_at_once(project: Project) -> None:
    token, first = create_token(project, "cluster")
    second, third = rotate_token(token), rotate_token(token)
    assert [authenticate_token(secret) is not None for secret in (first, second, third)] == [
        False,
        True,
        True,
    ]


def test_revoking_ends_both_secrets(project: Project) -> None:
    token, former = create_token(project, "cluster")
    secret = rotate_token(token)
    revoke_token(token)
    for ended in (secret, former):
        assert authenticate_token(ended) is None and "was revoked on " in why_refused(ended)


def test_a_rotation_begins_the_lifetime_again(project: Project) -> None:
    token, _ = create_token(project, "cluster", lifetime=30 * DAY)
    for _ in range(2):
        later(token, 20 * DAY)
        rotate_token(token)
        assert token.expires_at is not None
        assert abs(token.expires_at - timezone.now() - 30 * DAY) < timedelta(minutes=5)


def test_an_expired_or_revoked_token_gets_no_new_secret(project: Project) -> None:
    expired, revoked = create_token(project, "e", lifetime=DAY)[0], create_token(project, "r")[0]
    later(expired, 2 * DAY)
    revoke_token(revoked)
    for token in (expired, revoked):
        with pytest.raises(TokenError, match="Create another token"):
            rotate_token(token)


def test_no_secret_is_stored_by_a_rotation(project: Project) -> None:
    token, former = create_token(project, "cluster")
    secret = rotate_token(token)
    stored = repr(ApiToken.objects.values_list())
    assert former[14:] not in stored and secret[14:] not in stored


@pytest.mark.parametrize("lifetime", [timedelta(0), -DAY, tokens.MAX_LIFETIME + DAY])
def test_refuses_lifetimes_out_of_bounds(project: Project, lifetime: timedelta) -> None:
    with pytest.raises(TokenError, match="at most 3,650 days"):
        create_token(project, "cluster", lifetime=lifetime)


def test_the_reason_is_told_only_for_the_whole_secret(project: Project) -> None:
    token, secret = create_token(project, "cluster")
    revoke_token(token)
    unknown = "The token is unknown or was revoked."
    assert why_refused(secret[:-1] + ("A" if secret[-1] != "A" else "B")) == unknown
    assert why_refused(token.prefix) == why_refused("") == why_refused("\0") == unknown


def test_a_deactivated_owner_is_named_as_the_reason(project: Project) -> None:
    ada = User.objects.create_user("ada")
    _, secret = create_token(project, "cluster", ada)
    User.objects.update(is_active=False)
    assert authenticate_token(secret) is None and "an account that is deactivated" in why_refused(secret)


def test_a_project_has_a_bounded_number_of_tokens_that_work(project: Project) -> None:
    bulk = (
        ApiToken(project=project, name="n", prefix="p", digest=number.to_bytes(32, "big"))
        for number in range(tokens.MAX_TOKENS)
    )
    ApiToken.objects.bulk_create(bulk)
    with pytest.raises(TokenError, match="200 tokens"):
        create_token(project, "one more")
    create_token(create_project("another", "Another"), "elsewhere")
    first, second = ApiToken.objects.filter(project=project).order_by("pk")[:2]
    revoke_token(first)
    create_token(project, "in place of a revoked one")
    ApiToken.objects.filter(pk=second.pk).update(expires_at=timezone.now() - DAY)
    create_token(project, "in place of an expired one")


@pytest.mark.django_db(transaction=True)
def test_tokens_made_at_the_same_time_keep_the_bound() -> None:
    project = create_project("default", "Default")
    bulk = (
        ApiToken(project=project, name="n", prefix="p", digest=number.to_bytes(32, "big"))
        for number in range(tokens.MAX_TOKENS - 2)
    )
    ApiToken.objects.bulk_create(bulk)

    def make(_: int) -> bool:
        try:
            create_token(project, "t")
        except TokenError:
            return False
        finally:
            connection.close()
        return True

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(make, range(6))) == 2
