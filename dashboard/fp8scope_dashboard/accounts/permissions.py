"""The permissions of the roles in a project: one table for views, pages, documentation and tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fp8scope_dashboard.accounts.models import Role

ORDER: Final = (Role.VIEWER, Role.MEMBER, Role.ADMIN)
"""The roles, each of which may do what the ones before it may."""


@dataclass(frozen=True)
class Permission:
    """The least role that an action needs: for what a person made, and for what others made.

    Attributes:
        action: the action in words, as in the table of docs/accounts.md.
        own: the least role.
        others: the least role for what other people made; None: nobody. What belongs to nobody, such as a
            token of the command line, is then the administrators'.
        refusal: the sentence for a member who may not do it to what others made.
    """

    action: str
    own: Role
    others: Role | None
    refusal: str = ""


def _for_all(action: str, role: Role) -> Permission:
    return Permission(action, role, role)


def _own(action: str, refusal: str) -> Permission:
    return Permission(action, Role.MEMBER, Role.ADMIN, refusal)


READ: Final = _for_all("read and export runs, charts, alerts, rules, reports and settings", Role.VIEWER)
SAVE_VIEWS: Final = _for_all("save views and panels for oneself", Role.VIEWER)
DESCRIBE_RUNS: Final = _for_all(
    "tag, archive and colour runs, write notes, choose baselines, groups and margins of runs", Role.MEMBER
)
DELETE_RUNS: Final = _own(
    "delete runs, and restore them within ten minutes",
    "A member deletes and restores only runs that they made. An administrator of the project can do it.",
)
UNDO_RUNS: Final = _own(
    "undo a change of several runs",
    "A member undoes only their own changes. An administrator of the project can do it.",
)
COMMAND: Final = _for_all("give commands to trainings", Role.MEMBER)
ALERTS: Final = _for_all("acknowledge, mute, resolve and discuss alerts, send one again", Role.MEMBER)
TRY_RULES: Final = _for_all("try an alert rule on past runs", Role.MEMBER)
MAKE_REPORTS: Final = _for_all("make reports and links to them", Role.MEMBER)
END_REPORTS: Final = _own(
    "delete reports, revoke links to them",
    "A member deletes only reports, and revokes only links, that they made. An administrator of the project "
    "can do it.",
)
SHARE_VIEWS: Final = _for_all("share views with the project", Role.MEMBER)
DELETE_VIEWS: Final = Permission(
    "delete views",
    Role.VIEWER,
    Role.ADMIN,
    "Only its owner or an administrator can delete a shared view.",
)
IMPORT_FILES: Final = _for_all("import files of other tools", Role.MEMBER)
CREATE_TOKENS: Final = _for_all("create tokens that write or read runs", Role.MEMBER)
REVOKE_TOKENS: Final = _own(
    "revoke tokens",
    "A member revokes only tokens that they created. An administrator of the project can do it.",
)
ROTATE_TOKENS: Final = Permission(
    "give tokens a new secret",
    Role.MEMBER,
    None,
    "Only its owner gives a token a new secret. An administrator of the project can revoke it.",
)
ADMINISTER_TOKENS: Final = _for_all("create tokens that administer, and use them", Role.ADMIN)
CHANGE_RULES: Final = _for_all("make, change, switch and remove alert rules, undo that", Role.ADMIN)
CHANGE_CHANNELS: Final = _for_all("make, change and remove alert channels", Role.ADMIN)
CHANGE_PROJECT: Final = _for_all(
    "change the project: name, margins, price, retention, default view, archive", Role.ADMIN
)
CHANGE_MEMBERS: Final = _for_all("add and remove members, change roles, undo that", Role.ADMIN)
READ_AUDIT: Final = _for_all("read the whole audit log, with exports, and export it", Role.ADMIN)

PERMISSIONS: Final = (
    *(READ, SAVE_VIEWS, DESCRIBE_RUNS, DELETE_RUNS, UNDO_RUNS, COMMAND, ALERTS, TRY_RULES, MAKE_REPORTS),
    *(END_REPORTS, SHARE_VIEWS, DELETE_VIEWS, IMPORT_FILES),
    *(CREATE_TOKENS, REVOKE_TOKENS, ROTATE_TOKENS, ADMINISTER_TOKENS),
    *(CHANGE_RULES, CHANGE_CHANNELS, CHANGE_PROJECT, CHANGE_MEMBERS, READ_AUDIT),
)


def includes(held: Role, needed: Role) -> bool:
    """Return whether a role may do what another may."""
    return ORDER.index(held) >= ORDER.index(needed)


def allows(permission: Permission, held: Role | None, *, is_own: bool, is_owned: bool = True) -> bool:
    """Return whether a role may do something to a thing.

    Args:
        held: the role; None without one.
        is_own: whether the person made the thing.
        is_owned: whether anybody did.
    """
    if held is None:
        return False
    needed = permission.own if is_own else permission.others
    if needed is None:
        needed = None if is_owned else Role.ADMIN
    return needed is not None and includes(held, needed)


def table() -> str:
    """The permissions as the table of docs/accounts.md, in Markdown."""
    lines = ["| action | viewer | member | administrator |", "|---|---|---|---|"]
    for permission in PERMISSIONS:
        cells = [_cell(permission, role) for role in ORDER]
        lines.append(f"| {permission.action} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(permission: Permission, role: Role) -> str:
    if permission.others is not None and includes(role, permission.others):
        return "yes"
    return "own" if includes(role, permission.own) else "no"
