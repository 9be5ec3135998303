"""What sending a message may reach: real sockets, names and files."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest
from django.conf import LazySettings

from fp8scope_dashboard.alerts.channels import DeliveryError
from fp8scope_dashboard.alerts.channels.outgoing import is_public, restricted, translated, unrestricted


@pytest.fixture
def listener() -> Iterator[tuple[str, int]]:
    """The address of a server that counts as connected once it accepts."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[:2]


def test_it_works(listener: tuple[str, int], settings: LazySettings) -> None:
    settings.CHANNEL_NETWORKS = []
    with pytest.raises(DeliveryError, match="FP8SCOPE_CHANNEL_NETWORKS") as caught, restricted():
        socket.create_connection(listener)
    assert caught.value.permanent and listener[0] not in str(caught.value)
    settings.CHANNEL_NETWORKS = ["10.0.0.0/8", "127.0.0.1/32"]
    with restricted():
        socket.create_connection(listener).close()


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1"),
        *("169.254.169.254", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
        *("::1", "::", "fe80::1", "fe80::1%1", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1"),
        *(
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "64:ff9b::7f00:1",
            "64:ff9b::a9fe:a9fe",
            "2002:7f00:1::",
        ),
    ],
)
def test_private_addresses_are_not_public(address: str) -> None:
    parsed = ip_address(address)
    assert not (is_public(parsed) and is_public(translated(parsed)))


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "64:ff9b::101:101"])
def test_public_addresses_are_public(address: str) -> None:
    parsed = ip_address(address)
    assert is_public(parsed) and is_public(translated(parsed))


def test_a_name_is_checked_after_it_is_resolved(listener: tuple[str, int], settings: LazySettings) -> None:
    settings.CHANNEL_NETWORKS = []
    for name in ("localhost", "0x7f.1", "2130706433", "0177.0.0.1"):
        with pytest.raises(DeliveryError), restricted():
            socket.create_connection((name, listener[1]))


def test_the_address_of_the_connection_counts_not_an_earlier_answer(
    listener: tuple[str, int], settings: LazySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server that answers with a public address first, and a private one when it is asked again."""
    settings.CHANNEL_NETWORKS = []
    answers = iter(["1.1.1.1", listener[0]])

    def resolve(*_: object, **__: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), listener[1]))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert socket.getaddrinfo("rebinding.test", 80)[0][4][0] == "1.1.1.1"
    with pytest.raises(DeliveryError), restricted():
        socket.create_connection(("rebinding.test", listener[1]))


def test_datagrams_and_unix_sockets_are_refused(tmp_path: Path, settings: LazySettings) -> None:
    settings.CHANNEL_NETWORKS = []
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        pytest.raises(DeliveryError),
        restricted(),
    ):
        datagrams.sendto(b"x", ("127.0.0.1", 514))
    with socket.socket(socket.AF_UNIX) as local, pytest.raises(DeliveryError), restricted():
        local.connect(str(tmp_path / "socket"))


def test_programs_are_refused() -> None:
    for start in (lambda: subprocess.run([sys.executable, "-c", ""]), lambda: os.system("true")):
        with pytest.raises(DeliveryError, match="programs"), restricted():
            start()


def test_without_files_only_the_systems_files_can_be_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    with restricted(files=False):
        assert Path(os.__file__).read_bytes()
        for path, mode in ((secret, "r"), (tmp_path / "new", "w"), (Path(os.__file__), "a")):
            with pytest.raises(PermissionError):
                path.open(mode)
    assert secret.read_text() == "x"


def test_other_threads_and_code_after_the_block_are_not_restricted(
    listener: tuple[str, int], settings: LazySettings
) -> None:
    settings.CHANNEL_NETWORKS = []
    connected = threading.Event()

    def connect() -> None:
        socket.create_connection(listener).close()
        connected.set()

    with restricted():
        thread = threading.Thread(target=connect)
        thread.start()
        thread.join()
        with unrestricted():
            socket.create_connection(listener).close()
    assert connected.is_set()
    socket.create_connection(listener).close()


def test_other_errors_of_the_block_stay_as_they_are() -> None:
    with pytest.raises(ZeroDivisionError), restricted():
        _ = 1 / 0
