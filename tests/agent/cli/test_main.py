"""The `fp8scope` command: its subcommands, those of other packages, and missing extras."""

import io
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from agent.helpers.faulty_http import Fault
from agent.helpers.wire_server import WireServer
from agent.helpers.writer import join_sender

from fp8scope.cli import main as cli
from fp8scope.config import Settings
from fp8scope.credentials import credentials_path, read_logins
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run


def test_it_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("fp8scope 0.")
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    for name in ("login", "sync", "up", "demo"):
        assert f"\n  {name} " in out


def test_an_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fly"]) == 2
    assert "there is no command 'fly'" in capsys.readouterr().err


def greet(arguments: list[str]) -> int:
    """Say hello.

    More about it.
    """
    print("hello", *arguments)
    return len(arguments)


def test_runs_a_command_of_another_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "__name__", "greeter", raising=False)
    monkeypatch.setitem(
        sys.modules, "greeter", sys.modules[test_runs_a_command_of_another_package.__module__]
    )
    points = {"greet": EntryPoint("greet", "greeter:greet", cli.GROUP)}
    monkeypatch.setattr(cli, "_installed", lambda: points)
    assert cli.main(["greet", "a", "b"]) == 2
    assert capsys.readouterr().out == "hello a b\n"
    assert "  greet      Say hello.\n" in cli.usage()


@pytest.mark.parametrize(("missing", "extra"), [("django", "dashboard"), ("torch", "torch")])
def test_names_the_missing_extra_of_a_command(
    missing: str,
    extra: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / f"needs_{missing}.py").write_text(f"import {missing}\ndef command(arguments): return 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, missing, None)
    points = {"up": EntryPoint("up", f"needs_{missing}:command", cli.GROUP)}
    monkeypatch.setattr(cli, "_installed", lambda: points)
    assert cli.main(["up"]) == 1
    assert f"pip install 'fp8scope[{extra}]'" in capsys.readouterr().err
    assert "not available" in cli.usage()


def test_the_agent_and_its_commands_need_no_torch() -> None:
    program = """
import sys
sys.modules["torch"] = None
import fp8scope, fp8scope.cli.main, numpy, tempfile
with tempfile.TemporaryDirectory() as directory:
    run = fp8scope.init(name="numpy only", mode="offline", directory=directory)
    with run.step() as step:
        step.log(loss=numpy.float32(1.5))
    run.log_eval("e", "m", numpy.array([1, 0]))
    assert run.finish().errors == 0
try:
    fp8scope.convert
except ImportError as error:
    print("convert needs", error.name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "convert needs torch"), done.stderr


def give_token(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(token + "\n"))


def test_login_stores_the_token(
    server: WireServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_token(monkeypatch, server.token)
    assert cli.main(["login", server.url + "/"]) == 0
    (login,) = read_logins(credentials_path())
    assert (login.url, login.token) == (server.url, server.token)
    shown = capsys.readouterr()
    assert server.token not in shown.out + shown.err


@pytest.mark.parametrize(
    ("token", "fault", "message"),
    [
        ("fp8s_wrong", None, "does not accept this token"),
        ("fp8s_test-token", Fault(page=True), "is not an fp8scope dashboard"),
        ("fp8s_test-token", Fault(status=404), "is not an fp8scope dashboard"),
        ("fp8s_test-token", Fault(drop=True), "does not answer"),
    ],
)
def test_a_failed_login_stores_nothing(
    token: str,
    fault: Fault | None,
    message: str,
    server: WireServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.plan = lambda method, path: fault
    give_token(monkeypatch, token)
    assert cli.main(["login", server.url]) == 1
    shown = capsys.readouterr().err
    assert message in shown and token not in shown
    assert read_logins(credentials_path()) == []


def test_sync_sends_the_spool(
    server: WireServer,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.stop()
    for name in ("one", "two"):
        run = Run(settings, blank_registration(name))
        for _ in range(10):
            with run.step() as step:
                step.log(loss=1.0)
        run.finish(timeout=0.2)
        join_sender(run)
    server.start()
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)
    assert cli.main(["sync", str(settings.directory)]) == 0
    assert capsys.readouterr().out.count("10 steps sent.") == 2
    assert sorted(run.registration["name"] for run in server.runs.values()) == ["one", "two"]
    assert all(
        run.steps == list(range(1, 11)) and run.finish["rows_sent"] == 10 for run in server.runs.values()
    )
    assert [path.name for path in settings.directory.iterdir()] == ["latest.json"]
    assert cli.main(["sync", str(settings.directory)]) == 0
    assert "Nothing to send." in capsys.readouterr().out


def test_sync_without_a_server_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sync", str(tmp_path)]) == 2
    assert "fp8scope login" in capsys.readouterr().err


def test_sync_keeps_the_spool_when_it_gives_up(
    server: WireServer,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.stop()
    run = Run(settings, blank_registration("kept"))
    with run.step() as step:
        step.log(loss=1.0)
    run.finish(timeout=0.1)
    join_sender(run)
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)
    assert cli.main(["sync", str(settings.directory), "--patience", "0.3"]) == 1
    assert "incomplete" in capsys.readouterr().out and run.directory.is_dir()
    server.start()
