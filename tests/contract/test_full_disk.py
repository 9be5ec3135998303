"""The disk under PostgreSQL fills up, for real, and is emptied again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import psycopg
import pytest
import urllib3
from contract.helpers.wire_client import Answer, WireClient
from helpers.live_servers import process_environment, web_server

from fp8scope_dashboard.embedded.postgres import EmbeddedPostgres

DISK_BYTES = 220 << 20
NOWHERE = "redis://localhost:1/0"
BANNER = "disk of the server’s database is full"
MAKE_TOKEN = """
import django; django.setup()
from fp8scope_dashboard.accounts.services import create_project, create_token
print(create_token(create_project("default", "Default"), "t")[1])
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk. Only root can mount one: without it a failure where CI=true, else a skip that says so."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        reason = f"no small disk could be mounted ({mounted.stderr.strip()}): run this test as root"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def postgres(disk: Path) -> Iterator[EmbeddedPostgres]:
    server = EmbeddedPostgres(disk / "postgres", durable=False)
    server.start()
    yield server
    server.stop()


def environment(postgres: EmbeddedPostgres) -> dict[str, str]:
    return {
        "DATABASE_URL": postgres.url,
        "FP8SCOPE_DATABASE_DIR": "",
        "REDIS_URL": NOWHERE,
    }


@pytest.fixture
def token(db: None, postgres: EmbeddedPostgres) -> str:
    surroundings = {**process_environment(), **environment(postgres), "FP8SCOPE_BASE_URL": "http://localhost"}
    migrate = [sys.executable, "-m", "django", "migrate", "--verbosity", "0"]
    subprocess.run(migrate, env=surroundings, check=True)
    made = subprocess.run(
        [sys.executable, "-c", MAKE_TOKEN], env=surroundings, check=True, capture_output=True, text=True
    )
    return made.stdout.strip()


def fill(disk: Path) -> Path:
    """Take all the room there is."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(b"\0" * 65536)
        except OSError:
            return ballast


def send_until_refused(client: WireClient, first: int) -> tuple[int, Answer]:
    """Send batches of a megabyte until one is not stored. Returns its number and the answer to it."""
    for seq in range(first, first + 200):
        answer = client.send(noise(client, seq))
        if answer.status != 201:
            return seq, answer
    pytest.fail("the disk never filled up")


def noise(client: WireClient, seq: int) -> bytes:
    """A batch that does not compress."""
    random = Random(seq)
    steps = range(seq * 2000, (seq + 1) * 2000)
    columns = {f"s{number}": [random.random() for _ in steps] for number in range(8)}
    return client.batch(seq, list(steps), scalars=columns)


def page(url: str) -> str:
    answer = urllib3.request("GET", f"{url}/signin/", timeout=30)
    assert answer.status == 200
    return answer.data.decode()


def stored(postgres: EmbeddedPostgres) -> object:
    with psycopg.connect(postgres.url) as connection:
        row = connection.execute("SELECT rows_stored FROM runs_run").fetchone()
    return row and row[0]


def test_it_works(tmp_path: Path, disk: Path, postgres: EmbeddedPostgres, token: str) -> None:
    """Nothing acknowledged is lost, refusals are 507, and with room again all goes on."""
    with web_server(tmp_path / "web.log", **environment(postgres)) as (url, _):
        client = WireClient(url, token)
        assert client.register().status == 201
        assert client.send(noise(client, 0)).status == 201
        assert BANNER not in page(url)
        ballast = fill(disk)
        seq, answer = send_until_refused(client, 1)
        assert (answer.status, answer.code) == (507, "storage_full"), answer
        assert int(answer.headers["Retry-After"]) > 0
        assert BANNER in page(url)
        ballast.unlink()
        assert client.send(noise(client, seq)).json["status"] == "stored"
    assert stored(postgres) == 2000 * (seq + 1)


def test_the_private_database_s_disk_is_looked_at(
    tmp_path: Path, disk: Path, postgres: EmbeddedPostgres, token: str
) -> None:
    """When PostgreSQL cannot write its log it ends, and says nothing any more: the disk still does."""
    surroundings = {**environment(postgres), "FP8SCOPE_DATABASE_DIR": str(postgres.data_dir)}
    with web_server(tmp_path / "web.log", **surroundings) as (url, _):
        client = WireClient(url, token)
        assert client.register().status == 201
        postgres.stop()
        assert client.send(noise(client, 0)).status == 503
        ballast = fill(disk)
        answer = client.send(noise(client, 0))
        assert (answer.status, answer.code) == (507, "storage_full")
        assert BANNER in page(url)
        ballast.unlink()
        postgres.start()
        deadline = time.monotonic() + 60
        while (answer := client.send(noise(client, 0))).status != 201:
            assert answer.status == 503
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert BANNER not in page(url)
