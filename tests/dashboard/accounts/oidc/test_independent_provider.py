"""Sign in at a provider that others wrote: oidc-provider-mock, as a process of its own."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests
from django.test import Client
from helpers.waiting import wait_until
from pytest_django import Settings

from fp8scope_dashboard.accounts.models import Membership, Role, User
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.settings.sign_in import GroupRoles, OidcSettings

pytestmark = pytest.mark.django_db
CLAIMS = '{"sub": "ada-1", "preferred_username": "ada", "email": "ada@example.org", "groups": ["ml"]}'


@pytest.fixture
def issuer(tmp_path: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    program = str(Path(sys.executable).with_name("oidc-provider-mock"))
    command = [program, "--port", str(port), "--require-nonce", "true", "--user-claims", CLAIMS]
    with (tmp_path / "provider.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        address = f"http://localhost:{port}"
        try:
            wait_until(lambda: _answers(address), "the provider listens")
            yield address
        finally:
            process.terminate()
            process.wait()


def _answers(address: str) -> bool:
    try:
        return requests.get(f"{address}/.well-known/openid-configuration", timeout=5).ok
    except requests.RequestException:
        return False


def test_it_works(issuer: str, settings: Settings) -> None:
    settings.OIDC = OidcSettings(
        issuer=issuer,
        client_id="fp8scope",
        client_secret="secret",
        name="Mock",
        scopes="openid profile email",
        username_claim="preferred_username",
        groups_claim="groups",
        session_hours=8,
        roles=GroupRoles(projects={"research": {"member": frozenset({"ml"})}}),
    )
    create_project("research", "Research")
    client = Client()
    page = client.get("/signin/oidc/")["Location"]
    assert page.startswith(issuer)
    # The form in which a person chooses who they are.
    answer = requests.post(page, data={"sub": "ada-1"}, allow_redirects=False, timeout=10)
    assert answer.status_code in (302, 303), answer.text[:500]
    back = urlsplit(answer.headers["Location"])
    assert back.path == "/signin/oidc/callback/" and re.search(r"\bcode=", back.query)
    done = client.get(f"{back.path}?{back.query}")
    assert done.status_code == 302, done.content.decode()
    user = User.objects.get()
    assert user.username == "ada" and client.session["_auth_user_id"] == str(user.pk)
    assert Membership.objects.get(user=user).role == Role.MEMBER
    assert 0 < client.session.get_expiry_age() <= 8 * 3600
