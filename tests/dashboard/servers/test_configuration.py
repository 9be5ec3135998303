"""The data directory, the addresses, and the environment of the child processes."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu.connection import Connection

from fp8scope_dashboard.embedded.processes import ServerError
from fp8scope_dashboard.embedded.redis import EmbeddedRedis
from fp8scope_dashboard.servers import configuration
from fp8scope_dashboard.servers.configuration import DataDir
from fp8scope_dashboard.settings.database import broker_from_url


@pytest.fixture(autouse=True)
def clear_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FP8SCOPE_BASE_URL", "FP8SCOPE_ALLOWED_HOSTS", "FP8SCOPE_SECRET_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_it_works(tmp_path: Path) -> None:
    data = DataDir(tmp_path / "data")
    data.make()
    environment = configuration.child_environment(
        data, "http://localhost:8265", "127.0.0.1", "postgresql:///x", "unix:///y"
    )
    assert environment["FP8SCOPE_SECRET_KEY"] == data.secret_key()
    assert environment["DATABASE_URL"] == "postgresql:///x"
    assert environment["REDIS_URL"] == "unix:///y"
    assert environment["FP8SCOPE_DATA_DIR"] == str(tmp_path / "data")
    assert environment["PATH"] == os.environ["PATH"]


def test_the_secret_key_is_long_private_and_persistent(tmp_path: Path) -> None:
    first = DataDir(tmp_path).secret_key()
    assert len(first) >= 50
    assert (tmp_path / "secret_key").stat().st_mode & 0o777 == 0o600
    assert DataDir(tmp_path).secret_key() == first
    assert [path.name for path in tmp_path.iterdir()] == ["secret_key"]


@pytest.mark.parametrize("name", ["two\nlines", "not UTF-8 \udcff", "bell\a"])
def test_refuses_directory_names_with_control_characters(name: str, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"control characters or is not UTF-8.*--data-dir"):
        DataDir(tmp_path / name).make()
    assert list(tmp_path.iterdir()) == []


def test_stores_the_address(tmp_path: Path) -> None:
    assert DataDir(tmp_path).address() is None
    DataDir(tmp_path).save_address("http://localhost:8265")
    assert DataDir(tmp_path).address() == "http://localhost:8265"


def test_each_installation_has_its_own_key(tmp_path: Path) -> None:
    keys = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        keys.add(DataDir(tmp_path / name).secret_key())
    assert len(keys) == 2


def test_ignores_a_partially_written_key(tmp_path: Path) -> None:
    (tmp_path / "secret_key.new").write_text("half")
    assert len(DataDir(tmp_path).secret_key()) >= 50


def test_refuses_a_short_key(tmp_path: Path) -> None:
    (tmp_path / "secret_key").write_text("short")
    with pytest.raises(ServerError, match="does not contain a key: restore it"):
        DataDir(tmp_path).secret_key()


def test_the_key_in_the_environment_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8SCOPE_SECRET_KEY", "given")
    environment = configuration.child_environment(DataDir(tmp_path), "http://x", "", "", "")
    assert environment["FP8SCOPE_SECRET_KEY"] == "given"
    assert not (tmp_path / "secret_key").exists()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://localhost:80"),
        ("::", "http://localhost:80"),
        ("", "http://localhost:80"),
        ("::1", "http://[::1]:80"),
        ("gpu-7.example", "http://gpu-7.example:80"),
    ],
)
def test_the_printed_address_can_be_opened(host: str, url: str) -> None:
    assert configuration.base_url(host, 80) == url


def test_the_address_in_the_environment_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8SCOPE_BASE_URL", "https://fp8.example")
    assert configuration.base_url("0.0.0.0", 80) == "https://fp8.example"


def test_allows_only_names_of_this_machine_and_configured_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert configuration.allowed_hosts("127.0.0.1") == ["127.0.0.1", "[::1]", "localhost"]
    assert "[fe80::7]" in configuration.allowed_hosts("fe80::7")
    everywhere = configuration.allowed_hosts("0.0.0.0")
    assert socket.gethostname() in everywhere
    assert "*" not in everywhere
    monkeypatch.setenv("FP8SCOPE_ALLOWED_HOSTS", "fp8.example,,other.example")
    assert {"fp8.example", "other.example"} <= set(configuration.allowed_hosts("127.0.0.1"))
    assert "" not in configuration.allowed_hosts("127.0.0.1")


def test_port_0_selects_a_free_port() -> None:
    with configuration.listen("127.0.0.1", 0) as first, configuration.listen("127.0.0.1", 0) as second:
        assert first.getsockname()[1] != second.getsockname()[1]


@pytest.mark.parametrize(
    ("host", "reason"),
    [("203.0.113.7", "Cannot assign requested address"), ("no such host", "not known|[Nn]ame|address")],
)
def test_reports_an_address_of_another_machine(host: str, reason: str) -> None:
    with pytest.raises(ServerError, match=rf"cannot listen on {host} port 0: .*({reason})"):
        configuration.listen(host, 0)


def test_a_port_in_use_names_its_process() -> None:
    with configuration.listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port}: Address already in use.*Process {os.getpid()} "):
            configuration.listen("127.0.0.1", port)


NAMES = st.text(st.characters(exclude_characters="/\x00", categories=["L", "N", "P", "S", "Zs"]))


@given(directory=NAMES, database=st.integers(0, 15))
def test_converts_socket_addresses_for_celery(directory: str, database: int) -> None:
    path = f"/run/{directory}/redis.sock"
    broker = urlsplit(broker_from_url(f"unix://{quote(path)}?db={database}"))
    assert broker.scheme == "redis+socket"
    assert unquote(broker.path) == path
    assert broker.query == f"virtual_host={database}"


def test_celery_reaches_redis_over_a_socket(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / "with a space, 100% ü", durable=False)
    with server as url, Connection(broker_from_url(url)) as connection:  # type: ignore[no-untyped-call]
        connection.ensure_connection(max_retries=1)
        queue = connection.SimpleQueue("words")
        queue.put({"word": "kept"})
        assert queue.get(timeout=30).payload == {"word": "kept"}
        queue.close()


@pytest.mark.parametrize("url", ["redis://localhost:6379/0", "rediss://user:word@host:6380/2"])
def test_does_not_change_other_addresses(url: str) -> None:
    assert broker_from_url(url) == url


@pytest.mark.parametrize(
    ("host", "base_url", "networks"),
    [
        ("127.0.0.1", None, "127.0.0.0/8,::1"),
        ("localhost", None, "127.0.0.0/8,::1"),
        ("0.0.0.0", None, ""),
        ("10.0.0.5", None, ""),
        # Behind a proxy others can use the server.
        ("127.0.0.1", "https://fp8.example.org", ""),
    ],
)
def test_channels_may_reach_this_machine_if_nobody_else_uses_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, base_url: str | None, networks: str
) -> None:
    monkeypatch.delenv("FP8SCOPE_CHANNEL_NETWORKS", raising=False)
    monkeypatch.delenv("FP8SCOPE_BASE_URL", raising=False)
    if base_url is not None:
        monkeypatch.setenv("FP8SCOPE_BASE_URL", base_url)
    environment = configuration.child_environment(DataDir(tmp_path), "http://x", host, "", "")
    assert environment["FP8SCOPE_CHANNEL_NETWORKS"] == networks
    monkeypatch.setenv("FP8SCOPE_CHANNEL_NETWORKS", "10.0.0.0/8")
    environment = configuration.child_environment(DataDir(tmp_path), "http://x", host, "", "")
    assert environment["FP8SCOPE_CHANNEL_NETWORKS"] == "10.0.0.0/8"
