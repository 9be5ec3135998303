"""PostgreSQL or Redis fail and come back: acknowledged data is stored, and no traceback is logged."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from contract.helpers.migrated_cluster import MigratedCluster
from contract.helpers.wire_client import Answer, WireClient
from helpers.live_servers import web_server
from helpers.waiting import wait_until

from fp8scope_dashboard.embedded.postgres import EmbeddedPostgres
from fp8scope_dashboard.embedded.redis import EmbeddedRedis


@pytest.fixture
def postgres(tmp_path: Path, migrated: MigratedCluster) -> Iterator[EmbeddedPostgres]:
    """A PostgreSQL for this test only, which can be stopped and started.

    It is as durable as in production. The shared one may acknowledge commits that a crash undoes.
    """
    server = migrated.copy(tmp_path / "postgres", durable=True)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path / "redis", durable=False)
    server.start()
    yield server
    server.stop()


def environment(postgres: EmbeddedPostgres, redis_url: str) -> dict[str, str]:
    """The settings of production, with the connection pool."""
    return {
        "DJANGO_SETTINGS_MODULE": "fp8scope_dashboard.settings.base",
        "DATABASE_URL": postgres.url,
        "REDIS_URL": redis_url,
    }


def rows_stored(postgres: EmbeddedPostgres) -> object:
    with psycopg.connect(postgres.url) as connection:
        row = connection.execute(
            "SELECT rows_stored, (SELECT count(*) FROM telemetry_chunk) FROM runs_run"
        ).fetchone()
    return row


def until_available(client: WireClient, body: bytes) -> Answer:
    """Send as an agent does: retry after Retry-After while the answer is 503."""
    for _ in range(20):
        answer = client.send(body)
        if answer.status != 503:
            return answer
        time.sleep(int(answer.headers["Retry-After"]))
    pytest.fail("PostgreSQL is back, but the server still answers 503")


@pytest.mark.parametrize("is_killed", [False, True])
def test_it_works(is_killed: bool, tmp_path: Path, postgres: EmbeddedPostgres, token: str) -> None:
    """PostgreSQL is stopped or killed, and started again."""
    log = tmp_path / "web.log"
    with web_server(log, **environment(postgres, "redis://localhost:1/0")) as (url, _):
        client = WireClient(url, token)
        assert client.register().status == 201
        first, second = (client.batch(seq, [seq], scalars={"loss": [1.0]}) for seq in range(2))
        assert client.send(first).status == 201
        if is_killed:
            assert postgres.child is not None
            postgres.child.kill()
        postgres.stop()
        for answer in (client.send(second), client.register(), client.request("GET")):
            assert (answer.status, answer.code) == (503, "unavailable")
            assert int(answer.headers["Retry-After"]) > 0
        postgres.start()
        assert until_available(client, first).json["status"] == "duplicate"
        assert client.send(second).json["status"] == "stored"
    assert rows_stored(postgres) == (2, 2)
    assert "Traceback" not in log.read_text()


def test_stores_batches_while_redis_hangs_and_after_it_stops(
    tmp_path: Path, postgres: EmbeddedPostgres, redis_server: EmbeddedRedis, token: str
) -> None:
    log = tmp_path / "web.log"
    with web_server(log, **environment(postgres, redis_server.url)) as (url, _):
        client = WireClient(url, token)
        client.register()
        assert redis_server.child is not None
        os.kill(redis_server.child.pid, signal.SIGSTOP)
        for seq in range(20):
            assert client.send(client.batch(seq, [seq], scalars={"loss": [1.0]})).status == 201
        os.kill(redis_server.child.pid, signal.SIGCONT)
        redis_server.stop()
        for seq in range(20, 40):
            assert client.send(client.batch(seq, [seq], scalars={"loss": [1.0]})).status == 201
    assert rows_stored(postgres) == (40, 40)
    # One line each of those that use Redis, however long it is away.
    assert log.read_text().count("Redis is unavailable") <= 1
    assert log.read_text().count("Redis does not answer") <= 1
    assert log.read_text().count("Metrics wait until Redis answers") <= 1
    assert "Traceback" not in log.read_text()


def waiting_for_standby(postgres: EmbeddedPostgres) -> list[int]:
    """The processes of PostgreSQL whose commit waits for a synchronous standby."""
    with psycopg.connect(postgres.url) as connection:
        rows = connection.execute("SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'").fetchall()
    return [pid for (pid,) in rows]


def set_standby(postgres: EmbeddedPostgres, name: str) -> None:
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")
        connection.execute("SELECT pg_reload_conf()")


def test_a_repeated_batch_is_not_acknowledged_before_the_standby_has_it(
    tmp_path: Path, postgres: EmbeddedPostgres, token: str
) -> None:
    """The first transaction is cut off while it waits: PostgreSQL has committed it on the primary alone."""
    log = tmp_path / "web.log"
    with web_server(log, **environment(postgres, "redis://localhost:1/0")) as (url, _):
        client = WireClient(url, token)
        client.register()
        body = client.batch(0, [0], scalars={"loss": [1.0]})
        # The first batch makes the writer; the second is one statement.
        assert client.send(body).status == 201
        body = client.batch(1, [1], scalars={"loss": [1.0]})
        set_standby(postgres, "absent")
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(client.send, body)
            wait_until(lambda: waiting_for_standby(postgres))
            (first,) = waiting_for_standby(postgres)
            with psycopg.connect(postgres.url) as connection:
                connection.execute("SELECT pg_terminate_backend(%s)", [first])
            # The server repeats the statement itself, as an agent repeats its message.
            wait_until(lambda: answer.done() or set(waiting_for_standby(postgres)) - {first})
            assert not answer.done(), "acknowledged, but only the primary has it"
            set_standby(postgres, "")
            assert answer.result().json["status"] == "duplicate"
    assert rows_stored(postgres) == (2, 2)
