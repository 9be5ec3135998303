"""Headers, the description of the API, logs of refusals, and secrets in logs and files."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dashboard.helpers.visitors import visitor_of
from django.test import Client
from pytest_django import Settings

from fp8scope_dashboard.accounts.models import Role, Scope
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.embedded.processes import ServerError
from fp8scope_dashboard.pages.middleware import POLICY
from fp8scope_dashboard.servers import configuration
from fp8scope_dashboard.settings.redaction import redact
from fp8scope_dashboard.settings.refusals import RefusalsInOneLine

SHOWN = (
    "import json; from fp8scope_dashboard.settings import base as b; "
    "print(json.dumps([b.SECRET_KEY, b.DATABASE_URL, b.REDIS_URL, b.SMTP_URL, b.STATUS_TOKEN, "
    "b.SECURE_HSTS_PRELOAD, b.SECURE_HSTS_SECONDS, b.PRIVATE_API_DOCS]))"
)


def settings_of(**environment: str) -> subprocess.CompletedProcess[str]:
    """The settings of production in a process with these variables."""
    secret = ("FP8SCOPE_", "DATABASE_URL", "REDIS_URL", "DJANGO")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(secret)}
    return subprocess.run(
        [sys.executable, "-c", SHOWN],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_it_works(tmp_path: Path) -> None:
    texts = ["a-key", "postgresql://u:p@h/db", "redis://:p@h:6379/0", "smtp://u:p@mail", "a-token"]
    names = ("FP8SCOPE_SECRET_KEY", "DATABASE_URL", "REDIS_URL", "FP8SCOPE_SMTP_URL", "FP8SCOPE_STATUS_TOKEN")
    files = {}
    for name, text in zip(names, texts, strict=True):
        file = tmp_path / name
        file.write_text(f"{text}\n")
        files[f"{name}_FILE"] = str(file)
    done = settings_of(**files, FP8SCOPE_BASE_URL="https://fp8.example.org")
    assert done.stdout.strip() == str([*texts, False, 31_536_000, False]).replace("'", '"').replace(
        "False", "false"
    ), done.stderr


def test_a_file_that_cannot_be_read_stops_the_server_without_a_secret(tmp_path: Path) -> None:
    done = settings_of(FP8SCOPE_SECRET_KEY_FILE=str(tmp_path / "nothing"))
    assert done.returncode == 1 and "FP8SCOPE_SECRET_KEY_FILE cannot be read" in done.stderr
    done = settings_of(DATABASE_URL_FILE=str(tmp_path), DATABASE_URL="postgresql://u:hush@h/db")
    assert "both set" in done.stderr and "hush" not in done.stderr


def test_preloading_needs_to_be_asked_for() -> None:
    done = settings_of(FP8SCOPE_BASE_URL="https://fp8.example.org", FP8SCOPE_HSTS_PRELOAD="1")
    assert "true, 31536000" in done.stdout
    done = settings_of(FP8SCOPE_BASE_URL="http://fp8.example.org", FP8SCOPE_HSTS_PRELOAD="1")
    assert "false, 0" in done.stdout


def test_children_of_up_get_each_secret_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("of-the-file\n")
    monkeypatch.delenv("FP8SCOPE_SECRET_KEY")
    monkeypatch.setenv("FP8SCOPE_SECRET_KEY_FILE", str(key))
    monkeypatch.setenv("DATABASE_URL_FILE", str(tmp_path / "url"))
    data = configuration.DataDir(tmp_path)
    environment = configuration.child_environment(
        data, "http://h", "127.0.0.1", "postgresql://x", "redis://x"
    )
    assert (
        environment["FP8SCOPE_SECRET_KEY"] == "of-the-file"
        and environment["DATABASE_URL"] == "postgresql://x"
    )
    assert not any(name in environment for name in configuration.SECRET_FILES)
    monkeypatch.setenv("FP8SCOPE_SECRET_KEY", "of-the-variable")
    with pytest.raises(ServerError, match="both set"):
        configuration.secret("FP8SCOPE_SECRET_KEY")


def test_the_page_of_the_api_has_the_policy_of_pages(db: None, client: Client) -> None:
    answer = client.get("/api/v1/docs")
    assert answer.status_code == 200 and answer["Content-Security-Policy"] == POLICY
    page = answer.content.decode()
    scripts = [part.partition(">")[0] for part in page.split("<script")[1:]]
    assert scripts and all("src=" in script or 'type="application/json"' in script for script in scripts)
    assert "https://" not in page.replace("https://github.com", "")


def test_the_description_of_the_api_can_be_private(db: None, client: Client, settings: Settings) -> None:
    project = create_project("research", "Research")
    addresses = ("/api/v1/docs", "/api/v1/openapi.json")
    assert [client.get(address).status_code for address in addresses] == [200, 200]
    settings.PRIVATE_API_DOCS = True
    for address in addresses:
        answer = client.get(address)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "no_token"
        assert client.get(address, headers={"Authorization": "Bearer fp8s_x"}).status_code == 401
        assert visitor_of(project, address[-4:], Role.VIEWER).client.get(address).status_code == 200
        _, secret = create_token(project, "t", scopes=[Scope.WRITE])
        assert client.get(address, headers={"Authorization": f"Bearer {secret}"}).status_code == 200


def test_a_refusal_is_logged_in_one_line(db: None, caplog: pytest.LogCaptureFixture) -> None:
    project = create_project("research", "Research")
    viewer = visitor_of(project, "vic", Role.VIEWER)
    caplog.handler.addFilter(RefusalsInOneLine())
    viewer.client.raise_request_exception = False
    assert viewer.client.post(viewer.address("settings/margins")).status_code == 403
    (record,) = (record for record in caplog.records if "Forbidden" in record.getMessage())
    assert record.levelno == logging.WARNING and record.exc_info is None
    assert "Traceback" not in caplog.text


def test_errors_keep_their_traceback() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        error: Any = sys.exc_info()
    for name, level in (("django.request", logging.ERROR), ("fp8scope_dashboard.x", logging.WARNING)):
        record = logging.LogRecord(name, level, __file__, 1, "m", (), error)
        assert RefusalsInOneLine().filter(record) and record.exc_info is error


@pytest.mark.parametrize(
    "text",
    [
        "GET /signin/oidc/callback/?code=hush-hush&state=hush-hush",
        "POST body client_secret=hush-hush&code_verifier=hush-hush",
        "id_token=hush-hush access_token=hush-hush",
    ],
)
def test_what_a_provider_sends_is_not_logged(text: str) -> None:
    assert "hush" not in redact(text) and "[redacted]" in redact(text)


def test_other_words_are_logged() -> None:
    text = "exit code=x returncode=3 status_code=200 loss_code=1"
    assert redact(text) == "exit code=[redacted] returncode=3 status_code=200 loss_code=1"
