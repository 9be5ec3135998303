"""Managing users from the command line: the effect on the database."""

from __future__ import annotations

import pytest

from fp8scope_dashboard.accounts import services
from fp8scope_dashboard.accounts.models import Membership, Role, User
from fp8scope_dashboard.accounts.people import (
    PeopleError,
    invite,
    person_named,
    project_named,
    set_password,
)

pytestmark = pytest.mark.django_db
PASSWORD = "correct horse battery"


def test_it_works() -> None:
    project = services.create_project("default", "Default")
    user = invite("ada", "ada@example.org", project, Role.VIEWER)
    assert person_named("ada") == user
    assert (user.email, user.has_usable_password(), user.is_superuser) == ("ada@example.org", False, False)
    assert services.role_in(user, project) == Role.VIEWER
    set_password(user, PASSWORD)
    assert User.objects.get(pk=user.pk).check_password(PASSWORD)


def test_defaults_to_the_administrator() -> None:
    User.objects.create_user("ada")
    services.create_administrator_link("http://localhost")
    assert person_named(None).username == "admin"


def test_prefers_an_active_administrator() -> None:
    User.objects.create_superuser("first", is_active=False)
    User.objects.create_superuser("second")
    assert person_named(None).username == "second"


def test_creates_a_missing_administrator() -> None:
    User.objects.create_user("ada")
    user = person_named(None)
    assert (user.username, user.is_superuser, user.has_usable_password()) == ("admin", True, False)


def test_a_user_named_admin_is_not_an_administrator() -> None:
    User.objects.create_user("Admin")
    with pytest.raises(PeopleError, match="not an administrator"):
        person_named(None)


def test_an_unknown_name_lists_the_users() -> None:
    User.objects.create_user("ada")
    with pytest.raises(PeopleError, match=r"no user 'bob' \(users: ada\).*invite"):
        person_named("bob")


def test_rejects_a_deactivated_user() -> None:
    User.objects.create_user("ada", is_active=False)
    with pytest.raises(PeopleError, match="deactivated"):
        person_named("ada")


@pytest.mark.parametrize("password", ["short", "password123", "ada-lovelace", ""])
def test_a_weak_password_is_refused_with_reasons(password: str) -> None:
    user = User.objects.create_user("ada-lovelace", password=PASSWORD)
    with pytest.raises(PeopleError, match="too"):
        set_password(user, password)
    assert User.objects.get(pk=user.pk).check_password(PASSWORD)


def test_a_new_password_revokes_links() -> None:
    user = User.objects.create_user("ada")
    secret = services.create_sign_in_link(user, "http://localhost").split("/")[-2]
    set_password(user, PASSWORD)
    assert services.use_sign_in_link(secret) is None
    assert services.use_sign_in_link(services.create_sign_in_link(user, "http://x").split("/")[-2]) == user


@pytest.mark.parametrize(
    ("name", "email", "reason"),
    [
        ("ADA", "", "already"),
        ("", "", "username"),
        ("two words", "", "username"),
        ("x" * 151, "", "username"),
        ("bob", "nonsense", "email"),
    ],
)
def test_rejects_an_invalid_invitation(name: str, email: str, reason: str) -> None:
    User.objects.create_user("ada")
    with pytest.raises(PeopleError, match=reason):
        invite(name, email, None, Role.MEMBER)
    assert User.objects.count() == 1
    assert Membership.objects.count() == 0


def test_an_unknown_project_lists_the_projects() -> None:
    services.create_project("default", "Default")
    with pytest.raises(PeopleError, match="no project 'defualt'; the projects are: default"):
        project_named("defualt")
