"""Figures are read from a streaming replica; without it, or when it fails, from the primary."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import urllib3
from contract.helpers.wire_client import WireClient
from django.conf import settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.sessions.backends.db import SessionStore
from django.contrib.sessions.models import Session
from django.db import connection
from helpers.live_servers import Server, web_server
from helpers.postgres_standby import standby_of
from helpers.waiting import wait_until

from fp8scope_dashboard.accounts.models import User
from fp8scope_dashboard.db import replica
from fp8scope_dashboard.embedded.postgres import EmbeddedPostgres
from fp8scope_dashboard.runs.models import Run


@pytest.fixture
def cookie(server: Server) -> str:
    user = User.objects.create_user("visitor", is_superuser=True)
    session = SessionStore()
    session[SESSION_KEY], session[BACKEND_SESSION_KEY] = str(user.pk), settings.AUTHENTICATION_BACKENDS[0]
    session[HASH_SESSION_KEY] = user.get_session_auth_hash()
    session.save()
    return f"{settings.SESSION_COOKIE_NAME}={session.session_key}"


@pytest.fixture
def run(server: Server) -> WireClient:
    client = WireClient(server.url, server.token)
    client.register()
    client.send(client.batch(0, list(range(50)), scalars={"loss": [1.0] * 50}))
    return client


@pytest.fixture
def standby(server: Server, tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    """A replica of the PostgreSQL of this test session."""
    if "FP8SCOPE_TEST_SERVERS" not in os.environ:
        pytest.skip("DATABASE_URL names a server that is not ours to copy")
    primary = EmbeddedPostgres(Path(os.environ["FP8SCOPE_TEST_SERVERS"]) / "postgres", durable=False)
    # The account that it was started with.
    primary.account = primary.server_account() if os.geteuid() == 0 else None
    copy = standby_of(primary, tmp_path / "standby")
    with copy:
        yield copy


def url_of(standby: EmbeddedPostgres) -> str:
    return standby.database_url(str(connection.settings_dict["NAME"]))


def figure(url: str, run: WireClient, cookie: str) -> tuple[int, bytes]:
    address = f"{url}/p/default/runs/{run.run}/figures/loss.json"
    answer = urllib3.request("GET", address, headers={"Cookie": cookie}, timeout=60, retries=False)
    return answer.status, answer.data


def test_it_works(standby: EmbeddedPostgres, run: WireClient, cookie: str, tmp_path: Path) -> None:
    with web_server(tmp_path / "web.log", FP8SCOPE_REPLICA_URL=url_of(standby)) as (url, _):
        # The replica is up to date within moments; its statistics of scans follow a little later.
        wait_until(lambda: b'"figure"' in figure(url, run, cookie)[1] and scans(standby) > 0)
        # New rows are visible as well, from the replica or the primary.
        more = run.batch(1, list(range(50, 60)), scalars={"loss": [2.0] * 10})
        assert run.send(more).status == 201
        assert figure(url, run, cookie)[0] == 200
        assert standby.child is not None
        standby.child.kill()
        standby.child.wait()
        for _ in range(3):
            assert figure(url, run, cookie)[0] == 200
        assert run.send(run.batch(2, [70], scalars={"loss": [1.0]})).status == 201


def scans(standby: EmbeddedPostgres) -> int:
    """The number of scans of the table of runs in the replica."""
    with psycopg.connect(url_of(standby), autocommit=True) as there:
        counts = "SELECT coalesce(seq_scan, 0) + coalesce(idx_scan, 0) FROM pg_stat_user_tables"
        row = there.execute(f"{counts} WHERE relname = 'runs_run'").fetchone()
        return int(row[0]) if row else 0


@pytest.mark.django_db
def test_a_primary_is_not_a_replica() -> None:
    with connection.cursor() as cursor:
        cursor.execute(replica.FRESH, ["0/0", 1.0])
        assert cursor.fetchone() == (None,)


def test_pauses_after_a_failure_of_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = []
    monkeypatch.setattr(replica, "_is_fresh", lambda: not checks.append(1))  # type: ignore[func-returns-value]
    health = replica._Health()
    assert health.good() and health.good() and len(checks) == 1
    health.failed()
    assert not health.good() and len(checks) == 1
    health._until = 0.0
    assert health.good() and len(checks) == 2


def test_writes_and_other_apps_use_the_primary() -> None:
    router = replica.Router()
    assert router.db_for_read(Run) == router.db_for_write(Run) == "default"
    token = replica._wanted.set(True)
    try:
        assert (router.db_for_read(Run), router.db_for_write(Run)) == ("replica", "default")
        assert router.db_for_read(User) == router.db_for_read(Session) == "default"
    finally:
        replica._wanted.reset(token)
    assert router.allow_migrate("default", "runs") and not router.allow_migrate("replica", "runs")
    # Without FP8SCOPE_REPLICA_URL the primary is used.
    with replica.from_replica():
        assert replica.database() == "default"
