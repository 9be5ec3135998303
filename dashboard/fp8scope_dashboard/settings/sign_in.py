"""The ways to sign in: passwords, two factors, and a provider of OpenID Connect with its groups."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import yaml
from django.core.exceptions import ImproperlyConfigured

from fp8scope_dashboard.settings.secret_files import secret_from_environment

ROLES: Final = ("viewer", "member", "admin")
TWO_FACTORS: Final = ("", "administrators", "everybody")
MAX_FILE_BYTES: Final = 1 << 20
MAX_PROJECTS: Final = 10_000
LOCAL: Final = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class GroupRoles:
    """The roles that groups of the provider give.

    Attributes:
        administrators: groups whose members administer the server; None: groups do not decide it.
        projects: by slug, then by role, the groups. The groups decide the members of these projects alone.
    """

    administrators: frozenset[str] | None = None
    projects: Mapping[str, Mapping[str, frozenset[str]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OidcSettings:
    """A provider of OpenID Connect, and this server's account with it."""

    issuer: str
    client_id: str
    client_secret: str = field(repr=False)
    name: str
    scopes: str
    username_claim: str
    groups_claim: str
    session_hours: float
    # Not hashable: it has mappings.
    roles: GroupRoles | None = field(hash=False)


def oidc_from_environment() -> OidcSettings | None:
    """The provider of FP8SCOPE_OIDC_ISSUER; None without one.

    Raises:
        ImproperlyConfigured: a variable is missing or invalid; the message names it.
    """
    issuer = os.environ.get("FP8SCOPE_OIDC_ISSUER", "").rstrip("/")
    if not issuer:
        return None
    parts = urlsplit(issuer)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOCAL):
        raise ImproperlyConfigured("FP8SCOPE_OIDC_ISSUER must begin with https://.")
    client_id = os.environ.get("FP8SCOPE_OIDC_CLIENT_ID", "")
    client_secret = secret_from_environment("FP8SCOPE_OIDC_CLIENT_SECRET")
    if not client_id or not client_secret:
        raise ImproperlyConfigured(
            "FP8SCOPE_OIDC_ISSUER needs FP8SCOPE_OIDC_CLIENT_ID and FP8SCOPE_OIDC_CLIENT_SECRET_FILE."
        )
    path = os.environ.get("FP8SCOPE_OIDC_ROLES_FILE", "")
    return OidcSettings(
        issuer=issuer,
        client_id=client_id,
        client_secret=client_secret,
        name=os.environ.get("FP8SCOPE_OIDC_NAME", "") or "single sign-on",
        scopes=os.environ.get("FP8SCOPE_OIDC_SCOPES", "") or "openid profile email",
        username_claim=os.environ.get("FP8SCOPE_OIDC_USERNAME_CLAIM", "") or "preferred_username",
        groups_claim=os.environ.get("FP8SCOPE_OIDC_GROUPS_CLAIM", "") or "groups",
        session_hours=_hours(os.environ.get("FP8SCOPE_OIDC_SESSION_HOURS", "") or "24"),
        roles=group_roles(Path(path)) if path else None,
    )


def group_roles(path: Path) -> GroupRoles:
    """The roles in the YAML file of FP8SCOPE_OIDC_ROLES_FILE; see docs/accounts.md.

    Raises:
        ImproperlyConfigured: the file cannot be read, or is not as documented.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ImproperlyConfigured(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB.")
        document = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or "it is not YAML"
        raise ImproperlyConfigured(f"{path} cannot be read: {reason}.") from None
    document = _mapping(document, str(path), ("administrators", "projects"))
    administrators = document.get("administrators")
    projects = document.get("projects") or {}
    if not isinstance(projects, dict) or len(projects) > MAX_PROJECTS:
        raise ImproperlyConfigured(f"{path}: projects must be at most {MAX_PROJECTS:,} slugs with roles.")
    return GroupRoles(
        administrators=None if administrators is None else _groups(administrators, f"{path}: administrators"),
        projects={str(slug): _roles(roles, f"{path}: {slug}") for slug, roles in projects.items()},
    )


def two_factors_from_environment() -> str:
    """The people who must have two factors: `administrators`, `everybody`, or empty for nobody.

    Raises:
        ImproperlyConfigured: FP8SCOPE_TWO_FACTORS is something else.
    """
    text = os.environ.get("FP8SCOPE_TWO_FACTORS", "").strip().lower()
    if text not in TWO_FACTORS:
        raise ImproperlyConfigured("FP8SCOPE_TWO_FACTORS must be administrators or everybody, or not be set.")
    return text


def passwords_from_environment() -> bool:
    """Return whether people may sign in with passwords: unless FP8SCOPE_PASSWORDS is 0.

    Raises:
        ImproperlyConfigured: it is neither 0 nor 1.
    """
    text = os.environ.get("FP8SCOPE_PASSWORDS", "") or "1"
    if text not in ("0", "1"):
        raise ImproperlyConfigured("FP8SCOPE_PASSWORDS must be 0 or 1.")
    return text == "1"


def _mapping(value: Any, where: str, allowed: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) - set(allowed):
        raise ImproperlyConfigured(f"{where} must have only the entries {', '.join(allowed)}.")
    return value


def _roles(value: Any, where: str) -> dict[str, frozenset[str]]:
    return {
        role: _groups(groups, f"{where}: {role}") for role, groups in _mapping(value, where, ROLES).items()
    }


def _groups(value: Any, where: str) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(group, str) and group for group in value):
        raise ImproperlyConfigured(f"{where} must be a list of names of groups.")
    return frozenset(value)


def _hours(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]+)?", text) or not 0 < float(text) <= 14 * 24:
        raise ImproperlyConfigured("FP8SCOPE_OIDC_SESSION_HOURS must be a number of hours, at most 336.")
    return float(text)
