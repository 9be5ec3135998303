"""Where settings come from, in which order, and what is refused."""

import stat
from pathlib import Path
from typing import Any

import pytest

import fp8scope
from fp8scope.config import ConfigurationError, check_url, settings_from
from fp8scope.credentials import Login, credentials_path, find_login, read_logins, save_login

TOKEN = "fp8s_0123456789"


def test_it_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert settings_from().url == ""
    save_login(credentials_path(), Login("http://login:1", "fp8s_login"))
    assert (settings_from().url, settings_from().token) == ("http://login:1", "fp8s_login")
    monkeypatch.setenv("FP8SCOPE_URL", "http://environment:2/")
    monkeypatch.setenv("FP8SCOPE_TOKEN", "fp8s_environment")
    assert (settings_from().url, settings_from().token) == ("http://environment:2", "fp8s_environment")
    chosen = settings_from(url="http://argument:3", token="fp8s_argument", directory=tmp_path, mode="offline")
    assert (chosen.url, chosen.token) == ("http://argument:3", "fp8s_argument")
    assert (chosen.directory, chosen.mode) == (tmp_path, "offline")


def test_a_login_is_for_its_server_and_project(tmp_path: Path) -> None:
    path = tmp_path / "a" / "credentials.json"
    for login in (
        Login("http://one", "fp8s_old"),
        Login("http://two", "fp8s_two"),
        Login("http://one", "fp8s_project", "vision"),
        Login("http://one", "fp8s_new"),
    ):
        save_login(path, login)
    logins = read_logins(path)
    assert [login.token for login in logins] == ["fp8s_new", "fp8s_project", "fp8s_two"]

    def token(url: str, project: str | None) -> str | None:
        found = find_login(logins, url=url, project=project)
        return found.token if found else None

    assert token("", None) == "fp8s_new"
    assert token("http://one/", "vision") == "fp8s_project"
    assert token("http://one", "language") == "fp8s_new"
    assert token("http://two", None) == "fp8s_two"
    # A token is never sent to another server than the one that it was made by.
    assert token("http://three", None) is None


def test_the_file_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "config" / "credentials.json"
    path.parent.mkdir()
    path.write_text("{}")
    path.chmod(0o666)
    save_login(path, Login("http://one", TOKEN))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["credentials.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"logins": 3}', '{"logins": [{"url": 1}]}', "\xff"])
def test_a_damaged_file_is_no_login(content: str, tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    path.write_text(content, "latin-1")
    assert read_logins(path) == []


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8265",
        "ftp://host",
        "http://",
        "http://host:port",
        "http://user:hunter2@host",
        "https://host/?x=1",
        "javascript:alert(1)",
    ],
)
def test_a_wrong_address_is_refused_without_showing_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError, match="url must") as caught:
        check_url(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("token", ["with space", "with\nnewline", "ümlaut", "x" * 600])
def test_a_token_that_cannot_be_sent_is_not_shown(token: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        settings_from(url="http://host", token=token)
    assert token not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FP8SCOPE_INTERVAL", "soon"),
        ("FP8SCOPE_INTERVAL", "0"),
        ("FP8SCOPE_SPOOL_MIB", "nan"),
        ("FP8SCOPE_MODE", "on"),
    ],
)
def test_an_environment_that_cannot_be_meant(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigurationError, match=name.removeprefix("FP8SCOPE_").lower().partition("_")[0] + "|" + name
    ):
        settings_from()


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": ""},
        {"name": "x" * 201},
        {"name": 3},
        {"group": "x" * 129},
        {"tags": ["x" * 65]},
        {"tags": ["x"] * 51},
        {"seed": 1.5},
        {"seed": "1"},
        {"seed": 2**63},
        {"total_steps": -1},
        {"precision": "x" * 33},
        {"mode": "sometimes"},
        {"url": "host"},
    ],
    ids=str,
)
def test_an_argument_that_cannot_be_meant(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        fp8scope.init(**arguments)
    assert len(str(caught.value)) < 400


def test_without_a_server_a_run_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with fp8scope.init(name="x", directory=tmp_path / "kept") as run, run.step() as step:
        step.log(loss=1.0)
    assert run.finish().directory == run.directory
    assert list(run.directory.glob("*.log"))
    assert "the server address is missing" in caplog.text
    assert f"fp8scope sync {run.directory}" in caplog.text
