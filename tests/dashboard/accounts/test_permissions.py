"""The table of permissions."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8scope_dashboard.accounts import permissions
from fp8scope_dashboard.accounts.models import Role
from fp8scope_dashboard.accounts.permissions import PERMISSIONS, allows, includes, table

ROOT = Path(__file__).parents[3]


def test_it_works() -> None:
    assert "| delete runs, and restore them within ten minutes | no | own | yes |" in table()
    assert "| give tokens a new secret | no | own | own |" in table()


def test_the_documentation_has_the_table() -> None:
    assert table() in (ROOT / "docs/accounts.md").read_text()


def test_every_permission_is_in_the_table_once() -> None:
    declared = [value for value in vars(permissions).values() if isinstance(value, permissions.Permission)]
    assert len({permission.action for permission in PERMISSIONS}) == len(PERMISSIONS) == len(declared)
    assert {permission.action for permission in declared} == {permission.action for permission in PERMISSIONS}


def test_viewers_only_read_and_save_views() -> None:
    for permission in PERMISSIONS:
        if includes(Role.VIEWER, permission.own):
            assert permission in (permissions.READ, permissions.SAVE_VIEWS, permissions.DELETE_VIEWS)


@pytest.mark.parametrize("permission", PERMISSIONS)
def test_a_higher_role_may_do_what_a_lower_one_may(permission: permissions.Permission) -> None:
    for is_own in (True, False):
        for is_owned in (True, False):
            allowed = [
                allows(permission, role, is_own=is_own, is_owned=is_owned) for role in permissions.ORDER
            ]
            assert allowed == sorted(allowed)
    assert not allows(permission, None, is_own=True)
    assert allows(permission, Role.ADMIN, is_own=True)


def test_what_others_made_needs_a_sentence_for_who_is_refused() -> None:
    for permission in PERMISSIONS:
        assert bool(permission.refusal) == (permission.own != permission.others)


def test_what_belongs_to_nobody_is_the_administrators() -> None:
    for role in Role:
        is_admin = role == Role.ADMIN
        assert allows(permissions.ROTATE_TOKENS, role, is_own=False, is_owned=False) is is_admin
        assert not allows(permissions.ROTATE_TOKENS, role, is_own=False)
