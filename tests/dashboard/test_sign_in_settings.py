"""Settings of sign-in and secrets from files: what is read, and what a mistake says."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from fp8scope_dashboard.settings.days import whole_days
from fp8scope_dashboard.settings.secret_files import MAX_BYTES, secret_from_environment
from fp8scope_dashboard.settings.sign_in import (
    GroupRoles,
    group_roles,
    oidc_from_environment,
    passwords_from_environment,
    two_factors_from_environment,
)

OIDC = {
    "FP8SCOPE_OIDC_ISSUER": "https://id.example.org/realm/",
    "FP8SCOPE_OIDC_CLIENT_ID": "fp8scope",
    "FP8SCOPE_OIDC_CLIENT_SECRET": "a secret",
}
ROLES = """
administrators: [ops]
projects:
  research:
    viewer: [staff]
    member: [ml, "ML interns"]
    admin: [leads]
  other: {member: [ml]}
"""


def set_environment(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_it_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert oidc_from_environment() is None and passwords_from_environment()
    assert two_factors_from_environment() == ""
    secret, roles = tmp_path / "secret", tmp_path / "roles.yaml"
    secret.write_text("from a file\n")
    roles.write_text(ROLES)
    set_environment(monkeypatch, **OIDC, FP8SCOPE_OIDC_ROLES_FILE=str(roles))
    monkeypatch.delenv("FP8SCOPE_OIDC_CLIENT_SECRET")
    monkeypatch.setenv("FP8SCOPE_OIDC_CLIENT_SECRET_FILE", str(secret))
    provider = oidc_from_environment()
    assert provider is not None and provider.issuer == "https://id.example.org/realm"
    assert provider.client_secret == "from a file" and "from a file" not in repr(provider)
    assert provider.scopes == "openid profile email" and provider.session_hours == 24
    assert provider.roles == GroupRoles(
        frozenset({"ops"}),
        {
            "research": {
                "viewer": frozenset({"staff"}),
                "member": frozenset({"ml", "ML interns"}),
                "admin": frozenset({"leads"}),
            },
            "other": {"member": frozenset({"ml"})},
        },
    )
    assert hash(provider)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"FP8SCOPE_OIDC_ISSUER": "http://id.example.org"}, "must begin with https://"),
        ({"FP8SCOPE_OIDC_ISSUER": "ftp://localhost"}, "must begin with https://"),
        ({"FP8SCOPE_OIDC_CLIENT_ID": ""}, "needs FP8SCOPE_OIDC_CLIENT_ID"),
        ({"FP8SCOPE_OIDC_CLIENT_SECRET": ""}, "FP8SCOPE_OIDC_CLIENT_SECRET_FILE"),
        ({"FP8SCOPE_OIDC_SESSION_HOURS": "0"}, "at most 336"),
        ({"FP8SCOPE_OIDC_SESSION_HOURS": "nan"}, "at most 336"),
        ({"FP8SCOPE_OIDC_SESSION_HOURS": "337"}, "at most 336"),
        ({"FP8SCOPE_OIDC_ROLES_FILE": "/nowhere/roles.yaml"}, "No such file"),
    ],
)
def test_refuses_a_wrong_provider(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], message: str
) -> None:
    set_environment(monkeypatch, **{**OIDC, **changes})
    with pytest.raises(ImproperlyConfigured, match=message):
        oidc_from_environment()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have only the entries"),
        ("[]", "must have only the entries"),
        ("a: [", "it is not YAML"),
        ("projekts: {}", "only the entries administrators, projects"),
        ("projects: [a]", "slugs with roles"),
        ("projects: {a: [x]}", "a must have only the entries viewer, member, admin"),
        ("projects: {a: {owner: [x]}}", "only the entries viewer, member, admin"),
        ("projects: {a: {member: x}}", "a: member must be a list of names"),
        ("administrators: [1]", "administrators must be a list of names"),
        ("administrators: ['']", "administrators must be a list of names"),
        ("!!python/object/apply:os.system ['x']", "it is not YAML"),
    ],
)
def test_refuses_a_wrong_file_of_roles(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "roles.yaml"
    path.write_text(text)
    with pytest.raises(ImproperlyConfigured, match=message):
        group_roles(path)


def test_a_file_of_roles_without_administrators_leaves_them_alone(tmp_path: Path) -> None:
    path = tmp_path / "roles.yaml"
    path.write_text("projects: {a: {member: [x]}}")
    assert group_roles(path).administrators is None
    path.write_text("administrators: []")
    assert group_roles(path).administrators == frozenset()


def test_a_secret_comes_from_its_variable_or_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert secret_from_environment("X_SECRET") == "" and secret_from_environment("X_SECRET", "d") == "d"
    monkeypatch.setenv("X_SECRET", "of the variable")
    assert secret_from_environment("X_SECRET", "d") == "of the variable"
    file = tmp_path / "secret"
    file.write_bytes(b" with spaces \r\n")
    monkeypatch.setenv("X_SECRET_FILE", str(file))
    with pytest.raises(ImproperlyConfigured, match="X_SECRET and X_SECRET_FILE are both set"):
        secret_from_environment("X_SECRET")
    monkeypatch.delenv("X_SECRET")
    assert secret_from_environment("X_SECRET") == " with spaces "


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"\xff\xfe", "not text in UTF-8"),
        (b"s" * (MAX_BYTES + 1), "larger than 64 KiB"),
    ],
)
def test_refuses_a_wrong_file_without_quoting_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("X_SECRET_FILE", str(file))
    with pytest.raises(ImproperlyConfigured, match=message) as caught:
        secret_from_environment("X_SECRET")
    assert "sss" not in str(caught.value) and caught.value.__cause__ is None


@pytest.mark.parametrize("text", ["yes", "2", "true"])
def test_refuses_other_switches(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    set_environment(monkeypatch, FP8SCOPE_PASSWORDS=text, FP8SCOPE_TWO_FACTORS=text)
    with pytest.raises(ImproperlyConfigured, match="FP8SCOPE_PASSWORDS must be 0 or 1"):
        passwords_from_environment()
    with pytest.raises(ImproperlyConfigured, match="administrators or everybody"):
        two_factors_from_environment()


def test_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, FP8SCOPE_PASSWORDS="0", FP8SCOPE_TWO_FACTORS=" Administrators ")
    assert not passwords_from_environment() and two_factors_from_environment() == "administrators"


@pytest.mark.parametrize("text", ["-1", "1.5", "36501", "٣", "always"])
def test_refuses_a_wrong_number_of_days(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("X_DAYS", text)
    with pytest.raises(ImproperlyConfigured, match="X_DAYS must be a whole number of days"):
        whole_days("X_DAYS")


def test_days(monkeypatch: pytest.MonkeyPatch) -> None:
    assert whole_days("X_DAYS") == 0
    monkeypatch.setenv("X_DAYS", " 730 ")
    assert whole_days("X_DAYS") == 730
