"""The command line of the demo, its errors and its exit status."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest
from rich.console import Console

from fp8scope_dashboard.demo import command
from fp8scope_dashboard.demo.outcome import RunOutcome
from fp8scope_dashboard.demo.running import Demo
from fp8scope_dashboard.embedded.processes import locked
from fp8scope_dashboard.servers.supervisor import DEFAULT_PORT, Supervisor


def test_it_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.demo(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for option in ("--exit", "--port", "--data-dir", "--steps", "--json"):
        assert option in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "10"], "use a whole number from 100 to 20000"),
        (["--steps", "many"], "'many' is not a number of steps"),
        (["--port", "70000"], "'70000' is not a port"),
        (["--port", "-1"], "--port"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_explains_an_invalid_command_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.demo(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_refuses_a_second_demo_in_the_same_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with locked(tmp_path):
        assert command.demo(["--exit", "--port", "0", "--data-dir", str(tmp_path)]) == 1
    assert f"a demo is already running in {tmp_path}" in capsys.readouterr().err


def test_reports_a_port_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert command.demo(["--exit", "--port", str(port), "--data-dir", str(tmp_path / "data")]) == 1
    error = capsys.readouterr().err
    assert str(port) in error
    assert "--port" in error


def test_takes_a_free_port_if_the_default_port_is_in_use() -> None:
    try:
        with socket.create_server(("127.0.0.1", DEFAULT_PORT)):
            assert command.default_or_free_port() == 0
    except OSError:
        # Another program uses the default port, which is the tested case as well.
        assert command.default_or_free_port() == 0


def test_reports_an_unusable_data_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert command.demo(["--exit", "--port", "0", "--data-dir", str(tmp_path / "file" / "data")]) == 1
    assert "cannot use the data directory" in capsys.readouterr().err


@pytest.mark.parametrize(("stored", "status"), [(600, 0), (599, 1)])
def test_the_exit_status_depends_on_the_results(tmp_path: Path, stored: int, status: int) -> None:
    console = Console(record=True, width=120, force_terminal=False)
    demo = Demo(
        supervisor=Supervisor(tmp_path),
        console=console,
        steps=100,
        began=time.monotonic() - 100,
        first_rows=20.0,
    )
    outcome = RunOutcome(
        name="bf16 seed 1",
        group="bf16",
        fault_at=None,
        final_loss=2.5,
        seconds=20.0,
        verdict="",
        delta=None,
        tolerance=None,
        scores=(),
        alerts=(),
        points_sent=600,
        points_stored=stored,
        page="",
    )
    file = tmp_path / "result.json"
    assert command._report(demo, [outcome], file) == status
    summary = json.loads(file.read_text())
    assert summary["ok"] == (status == 0)
    assert summary["runs"][0]["points_stored"] == stored
    assert summary["first_rows_seconds"] == 20.0
    assert summary["seconds"] == pytest.approx(100, abs=60)
    assert ("Error: bf16 seed 1 sent 600 points" in console.export_text()) == (status == 1)


def test_an_unusual_verdict_is_a_sentence_on_the_screen(tmp_path: Path) -> None:
    console = Console(record=True, width=120, force_terminal=False)
    demo = Demo(
        supervisor=Supervisor(tmp_path),
        console=console,
        steps=100,
        began=time.monotonic() - 100,
        first_rows=20.0,
    )
    outcome = RunOutcome(
        name="fp8 delayed scaling",
        group="fp8",
        fault_at=None,
        final_loss=2.5,
        seconds=20.0,
        verdict="cannot_tell",
        delta=0.0106,
        tolerance=0.0325,
        scores=(),
        alerts=(),
        points_sent=600,
        points_stored=600,
        page="",
    )
    file = tmp_path / "result.json"
    assert command._report(demo, [outcome], file) == 0
    text = " ".join(console.export_text().split())
    assert "has the verdict 'cannot tell' at +1.06% with a tolerance of 3.25%" in text
    assert "Error" not in text
    summary = json.loads(file.read_text())
    assert summary["ok"] and len(summary["surprises"]) == 1
