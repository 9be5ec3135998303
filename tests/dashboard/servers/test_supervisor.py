"""The supervisor as a library: starting, restarting killed children, stopping, and errors."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
import redis
from dashboard.helpers.installation import clean_environment, names_below, status_of
from dashboard.helpers.unreadable_redis import make_unreadable
from helpers.waiting import wait_until

from fp8scope_dashboard.embedded import processes
from fp8scope_dashboard.embedded.postgres import EmbeddedPostgres
from fp8scope_dashboard.embedded.processes import AlreadyRunningError, ServerError
from fp8scope_dashboard.embedded.redis import EmbeddedRedis
from fp8scope_dashboard.servers.supervisor import Stopped, Supervisor

Prepared = Callable[[Path], Path]
EXECUTED = ["postgres", "redis", "fork_server"]
FORKED = ["web", "alerts", "worker", "beat"]
CHILDREN = [*EXECUTED, *FORKED]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the servers of the test session."""
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    """An installation whose processes the tests of this module may kill."""
    directory = tmp_path_factory.mktemp("installation")
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - set(clean_environment()):
            patch.delenv(name)
        # Durable: without synchronous commits a killed database loses acknowledged rows.
        supervisor = Supervisor(directory, port=0)
        supervisor.start()
        supervisor.wait_ready()
    yield supervisor
    supervisor.stop()
    assert names_below(directory) == []


def answers(supervisor: Supervisor) -> bool:
    return 0 < status_of(supervisor.url + "/") < 500


def test_it_works(running: Supervisor) -> None:
    assert answers(running)
    assert sorted(running.pids()) == sorted(CHILDREN)
    pids = running.pids()
    assert {psutil.Process(pids[name]).ppid() for name in EXECUTED} == {os.getpid()}
    assert {psutil.Process(pids[name]).ppid() for name in FORKED} == {pids["fork_server"]}
    assert {psutil.Process(pids[name]).name() for name in FORKED} == {f"fp8scope {name}" for name in FORKED}
    assert running.sign_in_link is not None
    assert running.sign_in_link.startswith(running.url)
    assert running.environment["FP8SCOPE_BASE_URL"] == running.url


@pytest.mark.parametrize("name", CHILDREN)
def test_restarts_a_killed_child(running: Supervisor, name: str) -> None:
    wait_until(lambda: sorted(running.pids()) == sorted(CHILDREN), "all children run")
    victim = psutil.Process(running.pids()[name])
    family = [victim, *victim.children(recursive=True)]
    victim.kill()
    wait_until(lambda: running.pids().get(name, victim.pid) != victim.pid, f"{name} runs again")
    assert processes.wait_ended(family, 60) == []
    wait_until(lambda: answers(running), "the web server answers")
    log = (running.data.logs / "up.log").read_text()
    assert f"{name} was ended by SIGKILL; restarting it" in log
    assert f"{name} restarted as process" in log


def test_committed_rows_survive_a_killed_database(running: Supervisor) -> None:
    # It may still be recovering from an earlier kill.
    wait_until(EmbeddedPostgres(running.data.root / "postgres").is_ready, "the database answers")
    url = EmbeddedPostgres(running.data.root / "postgres").url
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE kept AS SELECT generate_series(1, 1000) AS value")
    old = running.pids()["postgres"]
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: running.pids().get("postgres", old) != old, "postgres runs again")

    def stored() -> bool:
        try:
            with psycopg.connect(url) as connection:
                return connection.execute("SELECT count(*) FROM kept").fetchone() == (1000,)
        except psycopg.OperationalError:
            return False

    wait_until(stored, "the rows are there")


def test_a_request_waits_while_the_web_server_restarts(running: Supervisor) -> None:
    """The supervisor holds the listening socket, so no connection is refused."""
    wait_until(lambda: "web" in running.pids() and answers(running), "the web server answers")
    os.kill(running.pids()["web"], signal.SIGKILL)
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=100)
    connection.request("GET", "/")
    assert 0 < connection.getresponse().status < 500
    connection.close()


def test_the_worker_empties_the_queue(running: Supervisor) -> None:
    """This also holds after Redis was killed: the worker reconnects."""
    wait_until(EmbeddedRedis(running.data.root / "redis").is_ready, "Redis answers")
    with redis.Redis.from_url(EmbeddedRedis(running.data.root / "redis").url) as client:
        wait_until(lambda: not client.llen("celery") and not client.llen("evaluations"), "the queue is empty")
        wait_until(
            lambda: "succeeded" in (running.data.logs / "worker.log").read_text(), "a job of beat succeeded"
        )


def test_logs_are_in_one_private_folder(running: Supervisor) -> None:
    names = {path.name for path in running.data.logs.iterdir()}
    assert names >= {f"{name}.log" for name in [*CHILDREN, "prepare", "up"]}
    assert running.data.logs.stat().st_mode & 0o077 == 0


def test_refuses_a_second_supervisor(running: Supervisor) -> None:
    second = Supervisor(running.data.root, port=0)
    second.start()
    with pytest.raises(AlreadyRunningError, match=f"in use by process {os.getpid()}"):
        second.wait_ready()
    assert answers(running)


def test_the_second_start_keeps_key_and_data(tmp_path: Path) -> None:
    """Also where the files of Redis cannot be read, which has nothing to keep."""
    keys: list[str] = []
    lines: list[str] = []
    for _ in range(2):
        with Supervisor(tmp_path, port=0, echo=lambda _, line: lines.append(line)) as supervisor:
            assert answers(supervisor)
            # Nobody has signed in yet, so each start creates a new link.
            assert supervisor.sign_in_link is not None
            keys.append((tmp_path / "secret_key").read_text())
        moved = [line for line in lines if "They are now in" in line]
        assert len(moved) == len(keys) - 1
        make_unreadable(tmp_path / "redis")
    assert keys[0] == keys[1]
    assert "No migrations to apply" in (tmp_path / "logs" / "prepare.log").read_text()


def test_stopping_while_starting_leaves_nothing(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, port=0, durable=False)
    supervisor.start()
    wait_until(lambda: supervisor.pids(), "the first child runs")
    supervisor.stop()
    with pytest.raises(Stopped):
        supervisor.wait_ready()
    assert supervisor.pids() == {}
    assert names_below(tmp_path) == []


def test_uses_the_servers_named_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    postgres = EmbeddedPostgres(tmp_path / "elsewhere" / "postgres", durable=False)
    with postgres as database_url, EmbeddedRedis(tmp_path / "elsewhere" / "redis") as redis_url:
        monkeypatch.setenv("DATABASE_URL", database_url)
        monkeypatch.setenv("REDIS_URL", redis_url)
        with Supervisor(tmp_path / "data", port=0) as supervisor:
            assert sorted(supervisor.pids()) == sorted([*FORKED, "fork_server"])
            with psycopg.connect(database_url) as connection:
                assert connection.execute("SELECT count(*) > 0 FROM django_migrations").fetchone() == (True,)
        assert not (tmp_path / "data" / "postgres").exists()
        assert postgres.is_ready()


def test_reports_an_unreachable_database_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://me:hidden-word@127.0.0.1:1/fp8scope")
    supervisor = Supervisor(tmp_path, port=0)
    supervisor.start()
    with pytest.raises(ServerError, match=r"(?s)database could not be prepared.*[Cc]onnection") as failure:
        supervisor.wait_ready()
    assert "hidden-word" not in str(failure.value)
    assert "hidden-word" not in "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
    assert names_below(tmp_path) == []


def test_a_child_that_cannot_start_shows_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8SCOPE_LOG_LEVEL", "NONSENSE")
    supervisor = Supervisor(tmp_path, port=0, durable=False)
    supervisor.start()
    with pytest.raises(ServerError, match=r"(?s)fork_server\.log:.*must be one of DEBUG.*NONSENSE"):
        supervisor.wait_ready()
    assert names_below(tmp_path) == []


def test_a_wildcard_address_accepts_the_names_of_the_machine(tmp_path: Path, prepared: Prepared) -> None:
    """And the supervisor stops in spite of an idle connection."""
    supervisor = Supervisor(prepared(tmp_path), host="0.0.0.0", port=0, durable=False)
    supervisor.start()
    supervisor.wait_ready()
    assert supervisor.url == f"http://localhost:{supervisor.port}"
    address = f"http://127.0.0.1:{supervisor.port}/signin/"
    assert status_of(address, host=f"{socket.gethostname()}:{supervisor.port}") != 400
    assert status_of(address, host="evil.example") == 400
    with socket.create_connection(("127.0.0.1", supervisor.port)) as idle:
        idle.sendall(b"POST /signin/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nhalf")
        stopping = threading.Thread(target=supervisor.stop)
        stopping.start()
        stopping.join(100)
        assert not stopping.is_alive()
    assert names_below(tmp_path) == []
