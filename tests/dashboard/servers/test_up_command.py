"""`fp8scope up` as a user runs it: starting, stopping, being killed, and starting twice."""

from __future__ import annotations

import io
import os
import pwd
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from dashboard.helpers.installation import Up, names_below, processes_below, status_of
from helpers.waiting import wait_until

from fp8scope_dashboard.cli import CLEAR_LINE, COMMANDS, StageLine, main
from fp8scope_dashboard.embedded import processes

# Marks tests that start one or two installations.
own_installation = pytest.mark.slow


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A running installation that the tests do not change. It must stop cleanly and print no server logs."""
    folder = tmp_path_factory.mktemp("shared")
    with Up(folder / "data") as running:
        yield running
    assert running.process.returncode == 0
    assert names_below(folder) == []
    assert status_of(running.url + "/") == 0
    # The terminal shows no ordinary lines of the servers' logs.
    ordinary_lines = re.compile(r"^(postgres|redis|prepare|worker) +\|(?!.*(ERROR|FATAL))", re.M)
    assert not ordinary_lines.search(running.output), running.output


Prepared = Callable[[Path], Path]


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    wait_until(lambda: names_below(tmp_path) == [], f"nothing runs below {tmp_path}")


def test_it_works(up: Up) -> None:
    assert 0 < status_of(up.url + "/") < 500
    assert up.sign_in_link.startswith(up.url + "/")
    assert len(processes_below(up.data_dir)) >= 5
    assert "database system is ready" in (up.data_dir / "logs" / "postgres.log").read_text()


def test_shows_what_the_start_waits_for() -> None:
    terminal, log = io.StringIO(), io.StringIO()
    for stream, rewrites in ((terminal, True), (log, False)):
        line = StageLine(stream, rewrites=rewrites)
        line.show("PostgreSQL")
        line.show("web server")
        line.end()
    assert log.getvalue() == "fp8scope is starting: PostgreSQL\n"
    assert terminal.getvalue().count("\n") == 0
    assert terminal.getvalue().split("\r")[2] == f"{CLEAR_LINE}fp8scope is starting: web server ..."
    assert terminal.getvalue().endswith(f"\r{CLEAR_LINE}")


def test_the_supervisor_imports_neither_django_nor_celery() -> None:
    """Nor the client of Redis: each import delays the first line on the terminal."""
    code = "import sys, fp8scope_dashboard.cli; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert {"django.conf", "celery", "redis", "uvicorn", "numpy"} & set(shown.split()) == set()


@own_installation
def test_ctrl_c_stops_everything(tmp_path: Path, prepared: Prepared) -> None:
    """In a folder whose path is too long for sockets."""
    folder = prepared(tmp_path / ("long" * 40) / "with a space")
    with Up(folder, "--port", "0", "--verbose") as up:
        assert 0 < status_of(up.url + "/") < 500
        assert "database system is ready" in up.output
        assert up.finish(signal.SIGINT) == 0
    assert names_below(tmp_path) == []
    assert "Traceback" not in up.output.split("Ctrl-C stops it")[1]


def test_can_be_stopped_while_it_starts(tmp_path: Path) -> None:
    up = Up(tmp_path)
    wait_until(lambda: (tmp_path / "postgres" / "cluster").exists(), "the database is being made")
    assert up.finish(signal.SIGTERM) == 0
    assert names_below(tmp_path) == []


def complete_installation(directory: Path) -> Up:
    """An installation whose worker and beat have started too: they start after the web server answers."""
    up = Up(directory).wait_ready()
    assert 0 < status_of(up.url + "/") < 500
    wait_until(
        lambda: (
            {"fp8scope worker", "fp8scope beat"} <= {process.name() for process in processes_below(directory)}
        ),
        "worker and beat run",
    )
    return up


@own_installation
def test_nothing_outlives_a_killed_supervisor(tmp_path: Path, prepared: Prepared) -> None:
    """Except children that are stopped (SIGSTOP), which the next supervisor ends.

    They cannot act on the signal that the kernel sends them.
    """
    up = complete_installation(prepared(tmp_path))
    family = processes_below(tmp_path)
    up.finish(signal.SIGKILL)
    assert processes.wait_ended(family, 60) == []
    up = complete_installation(tmp_path)
    family = processes_below(tmp_path)
    for process in family:
        process.suspend()
    up.finish(signal.SIGKILL)
    assert [process for process in family if not processes.has_ended(process)] != []
    with Up(tmp_path) as restarted:
        assert [process for process in family if not processes.has_ended(process)] == []
        assert 0 < status_of(restarted.url + "/") < 500


def test_a_second_start_in_the_same_directory_is_refused(up: Up) -> None:
    second = Up(up.data_dir)
    assert second.finish() == 1
    assert f"{up.data_dir} is in use by process {up.process.pid}" in second.output
    assert 0 < status_of(up.url + "/") < 500


def test_reports_a_port_in_use_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        up = Up(tmp_path, "--port", str(port))
        assert up.finish() == 1
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in up.output
    assert f"Process {os.getpid()}" in up.output
    assert "--port" in up.output
    assert not (tmp_path / "postgres").exists()


def test_reports_a_data_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    up = Up(tmp_path / "file")
    assert up.finish() == 1
    assert "cannot use the data directory" in up.output
    assert "--data-dir" in up.output


@pytest.mark.parametrize("port", ["-1", "65536", "eighty", "８０"])
def test_refuses_an_invalid_port(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["up", f"--port={port}"])
    assert ended.value.code == 2
    assert "is not a port" in capsys.readouterr().err


def test_an_unknown_command_shows_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["down"]) == 2
    shown = capsys.readouterr().err
    assert [name for name in COMMANDS if name not in shown] == []


def test_each_command_has_a_line_of_help() -> None:
    for command in COMMANDS.values():
        assert (command.__doc__ or "").splitlines()[0].endswith(".")


@own_installation
def test_works_in_a_folder_with_special_characters() -> None:
    """The path is short enough to contain the sockets, so every server has to parse it from an address."""
    # Not tmp_path: its length varies with the number of test processes.
    with TemporaryDirectory() as directory, Up(Path(directory) / "it's 100% ü") as up:
        assert (up.data_dir / "postgres" / ".s.PGSQL.5432").exists()
        assert 0 < status_of(up.url + "/") < 500


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts PostgreSQL as another user")
def test_the_database_does_not_run_as_root(up: Up) -> None:
    owners = {process.name(): process.username() for process in processes_below(up.data_dir)}
    assert owners["postgres"] == "pgserver"
    assert pwd.getpwnam("pgserver").pw_uid != 0


def test_logs_and_arguments_contain_no_secrets(up: Up) -> None:
    assert status_of(up.sign_in_link) != 0
    assert status_of(up.sign_in_link + "nonsense/") == 404
    key = (up.data_dir / "secret_key").read_text()
    assert (up.data_dir / "secret_key").stat().st_mode & 0o777 == 0o600
    arguments = [argument for process in processes_below(up.data_dir) for argument in process.cmdline()]
    secrets = [key, up.sign_in_link.rstrip("/").rpartition("/")[2]]
    logs = "".join(path.read_text(errors="replace") for path in (up.data_dir / "logs").iterdir())
    assert "Applying" in logs
    texts = [logs, *arguments]
    assert [secret for secret in secrets if any(secret in text for text in texts)] == []


def test_the_process_tree_has_one_root(up: Up) -> None:
    descendants = {process.pid for process in psutil.Process(up.process.pid).children(recursive=True)}
    assert {process.pid for process in processes_below(up.data_dir)} <= descendants
