"""The disk that holds PostgreSQL's data fills up and is freed again, on a real small disk."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import psycopg
import pytest
import urllib3
from contract.helpers.migrated_cluster import MigratedCluster
from contract.helpers.wire_client import Answer, WireClient
from helpers.live_servers import web_server

from fp8scope_dashboard.embedded.postgres import EmbeddedPostgres

DISK_BYTES = 220 << 20
UNREACHABLE_REDIS = "redis://localhost:1/0"
BANNER = "disk of the server’s database is full"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk, which only root can mount. Otherwise the test fails if CI=true and is skipped if not."""
    mount_point = tmp_path / "disk"
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(mount_point)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        reason = f"could not mount a small disk ({mounted.stderr.strip()}): run this test as root"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    yield mount_point
    subprocess.run(["umount", str(mount_point)], check=True)


@pytest.fixture
def postgres(disk: Path, migrated: MigratedCluster) -> Iterator[EmbeddedPostgres]:
    server = migrated.copy(disk / "postgres", durable=False)
    server.start()
    yield server
    server.stop()


def environment(postgres: EmbeddedPostgres) -> dict[str, str]:
    return {
        "DATABASE_URL": postgres.url,
        "FP8SCOPE_DATABASE_DIR": "",
        "REDIS_URL": UNREACHABLE_REDIS,
    }


def fill(disk: Path) -> Path:
    """Use up all free space; returns the file to delete."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(b"\0" * 65536)
        except OSError:
            return ballast


def send_until_refused(client: WireClient, first: int) -> tuple[int, Answer]:
    """Send batches of a megabyte until one is refused. Returns its number and the answer."""
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
    """Batches are refused with 507, no acknowledged row is lost, and freeing space ends the refusals."""
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


def test_checks_the_disk_itself_when_postgresql_is_down(
    tmp_path: Path, disk: Path, postgres: EmbeddedPostgres, token: str
) -> None:
    """PostgreSQL exits if it cannot write its log; the server then measures the disk to report it as full."""
    variables = {**environment(postgres), "FP8SCOPE_DATABASE_DIR": str(postgres.data_dir)}
    with web_server(tmp_path / "web.log", **variables) as (url, _):
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
