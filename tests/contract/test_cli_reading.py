"""The subcommands that read, against a real server: what they print, their JSON and their exit status."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.seeding import Seeded, seed_project
from helpers.live_servers import Server, web_server

import fp8scope
from fp8scope.cli.main import main
from fp8scope.cli.reading.printing import width_of

PROGRAM = [sys.executable, "-m", "fp8scope"]
NASTY = "\x1b]0;owned\x07\x1b[2J模型\n<b>"


@pytest.fixture
def login(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)


@pytest.fixture
def seeded(server: Server, login: None) -> Seeded:
    return seed_project(server.project, 150)


Output = Callable[..., tuple[int, str, str]]


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Output:
    """Runs a command; returns its exit status, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(list(arguments))
        read = capsys.readouterr()
        return status, read.out, read.err

    return run


def on_a_terminal(*arguments: str, columns: int = 80, **environment: str) -> str:
    """What a command writes on a terminal of so many columns."""
    main_end, command_end = pty.openpty()
    process = subprocess.Popen(
        [*PROGRAM, *arguments],
        stdout=command_end,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": str(columns), "TERM": "xterm", **environment},
    )
    os.close(command_end)
    read = b""
    try:
        while part := os.read(main_end, 1 << 16):
            read += part
    except OSError:
        # Linux's end of a terminal.
        pass
    finally:
        os.close(main_end)
    assert process.wait(60) == 0
    return read.decode()


def test_it_works(output: Output, seeded: Seeded) -> None:
    status, text, _ = output("runs", "precision:fp8")
    assert status == 0 and len(text.splitlines()) == 3
    assert re.search(r"^gpt fp8 frozen scale +finished +Worse than BF16", text, re.MULTILINE)
    status, text, _ = output("show", seeded.faulty.name)
    lines = text.splitlines()
    assert status == 0 and lines[0].startswith(seeded.faulty.name) and lines[1] == "Worse than BF16"
    for part in ("Loss NaN", "open of", "tensors left their range", "Scores", f"/runs/{seeded.faulty.pk}/"):
        assert part in text


def test_the_numbers_are_those_of_the_client(output: Output, seeded: Seeded) -> None:
    client = fp8scope.Client()
    run = client.run(seeded.healthy.pk)
    shown = json.loads(output("show", "--json", run.id)[1])
    assert shown["run"] == run.refresh().fields
    assert shown["verdict"]["delta"] == run.verdict().delta and shown["loss"]["thinned"] is False
    assert shown["loss"]["values"] == run.history("loss").values.tolist()
    assert [tensor["name"] for tensor in shown["ranking"]["tensors"]] == [
        tensor.name for tensor in run.ranking(limit=5).tensors
    ]
    assert json.loads(output("runs", "--json")[1]) == [listed.fields for listed in client.runs()]
    alerts = json.loads(output("alerts", "--json", "--state", "all")[1])
    assert [alert["id"] for alert in alerts] == [alert.id for alert in client.alerts(state="all")]
    pair = json.loads(output("compare", "--json", run.id, seeded.baselines[0].name)[1])
    assert pair["verdict"]["delta"] == run.verdict().delta and pair["judged"] == run.id


KEYS = {
    "runs": {
        "id",
        "name",
        "state",
        "verdict",
        "loss",
        "open_alerts",
        "url",
        "created_at",
        "last_step",
        "seed",
    },
    "show": {"run", "verdict", "loss", "ranking", "alerts", "scores"},
    "compare": {
        "a",
        "b",
        "judged",
        "verdict",
        "reason",
        "costs",
        "quantities",
        "evaluations",
        "configuration",
    },
    "alerts": {"id", "run", "run_id", "severity", "state", "onset_step", "message", "opened_at", "url"},
    "open": {"url", "opened"},
}


def test_the_keys_of_json_stay(output: Output, seeded: Seeded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("BROWSER", raising=False)
    name = seeded.faulty.name
    arguments = {"show": [name], "open": [name], "compare": [name, seeded.baselines[0].name]}
    for command, keys in KEYS.items():
        written = json.loads(output(command, "--json", *arguments.get(command, []))[1])
        first = written[0] if isinstance(written, list) else written
        assert keys <= first.keys(), command


def test_names_are_data(output: Output, server: Server, login: None) -> None:
    make_run(server.project, NASTY, group=NASTY, tags=["\x1b[1m"])
    for arguments in (
        ["runs"],
        ["show", NASTY],
        ["runs", "--json"],
        ["show", "--json", NASTY],
        ["open", NASTY],
    ):
        status, text, _ = output(*arguments)
        assert status == 0 and "\x1b" not in text and "\x07" not in text, arguments
    assert "\\x1b]0;owned\\x07\\x1b[2J模型\\x0a<b>" in output("runs")[1]
    _, _, error = output("show", "\x1b[31mnothing")
    assert "\x1b" not in error and "no run with the name" in error


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_tables_fit_the_terminal(seeded: Seeded, server: Server, columns: int) -> None:
    make_run(server.project, "模型" * 40)
    for arguments in (["runs"], ["alerts"], ["runs", "--ids", "--limit", "0"]):
        text = on_a_terminal(*arguments, columns=columns)
        plain = re.sub(r"\x1b\[\d*m", "", text)
        assert len(plain.splitlines()) > 1
        assert max(width_of(line) for line in plain.splitlines()) <= columns, arguments


def test_colours_only_on_a_terminal(output: Output, seeded: Seeded) -> None:
    assert "\x1b[31m" in on_a_terminal("show", seeded.faulty.name)
    assert "\x1b" not in on_a_terminal("show", seeded.faulty.name, NO_COLOR="1")
    assert "\x1b" not in output("show", seeded.faulty.name)[1]


def test_exit_statuses(output: Output, seeded: Seeded, monkeypatch: pytest.MonkeyPatch) -> None:
    assert output("show", "nothing")[0] == 1
    assert output("runs", "colour:red")[0] == 2
    assert output("runs", "--sort", "colour")[0] == 2
    assert output("compare", seeded.baselines[0].name, seeded.baselines[1].name)[0] == 3
    assert output("compare", seeded.healthy.name, seeded.baselines[1].name)[0] == 0
    for arguments in (["runs", "--limit", "-1"], ["alerts", "--state", "x"], ["tail", "x", "--every", "0"]):
        with pytest.raises(SystemExit) as wrong:
            main(arguments)
        assert wrong.value.code == 2
    monkeypatch.setenv("FP8SCOPE_TOKEN", "fp8s_wrong")
    status, _, error = output("runs")
    assert status == 1 and "unknown or was revoked" in error and "fp8s_wrong" not in error
    monkeypatch.delenv("FP8SCOPE_URL")
    monkeypatch.delenv("FP8SCOPE_TOKEN")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    status, _, error = output("runs")
    assert status == 2 and "fp8scope login" in error


def test_a_reader_that_goes_away(server: Server, login: None) -> None:
    for i in range(400):
        make_run(server.project, f"{i} {'x' * 150}")
    command = f"{' '.join(PROGRAM)} runs --limit 0 | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 141 and "Traceback" not in done.stderr and len(done.stdout.splitlines()) == 1


def test_open_prints_the_address_without_a_browser(
    output: Output, seeded: Seeded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    status, text, _ = output("open", seeded.healthy.name)
    assert status == 0 and text.strip().endswith(f"/p/default/runs/{seeded.healthy.pk}/")
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    environment = {**os.environ, "BROWSER": f"{browser} %s"}
    subprocess.run([*PROGRAM, "open", seeded.healthy.name], env=environment, check=True, capture_output=True)
    assert opened.read_text() == text


# --- tail


class Tail:
    """`fp8scope tail` of a run, as a process."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*PROGRAM, "tail", "--every", "0.2", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.texts = {"stdout": "", "stderr": ""}

    def until(self, part: str, name: str = "stdout") -> None:
        """Read until standard output, or another stream, has a text."""
        stream = getattr(self.process, name)
        deadline = time.monotonic() + 60.0
        while part not in self.texts[name]:
            assert time.monotonic() < deadline, self.texts
            if select.select([stream], [], [], 0.2)[0]:
                read = os.read(stream.fileno(), 1 << 16)
                assert read, self.texts
                self.texts[name] += read.decode()

    def end(self) -> tuple[int, str, str]:
        """Wait for its end; returns the exit status and everything that it wrote."""
        out, error = self.process.communicate(timeout=60)
        return (
            self.process.returncode,
            self.texts["stdout"] + out.decode(),
            self.texts["stderr"] + error.decode(),
        )


def train(steps: range, tmp_path: Path, **options: Any) -> fp8scope.Run:
    """A run of the real agent, which has recorded some steps and goes on."""
    run = fp8scope.init(directory=tmp_path / "spool", **options)
    log(run, steps)
    return run


def log(run: fp8scope.Run, steps: range) -> None:
    for number in steps:
        run.log({"loss": 1.0 / (number + 1), "grad_norm": 2.0}, step=number)


def test_tail_follows_a_run_to_its_end(
    server: Server, login: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8SCOPE_INTERVAL", "0.1")
    run = train(range(1, 30), tmp_path, name="live")
    wait_for_steps("live", 28)
    tail = Tail("live", "--last", "5", "--scalar", "loss", "--scalar", "grad_norm", "--json")
    tail.until('"step": 28')
    log(run, range(30, 60))
    tail.until('"step": 58')
    run.finish()
    status, text, error = tail.end()
    assert status == 0 and error == ""
    lines = [json.loads(line) for line in text.splitlines()]
    steps = [line["step"] for line in lines if line["type"] == "step"]
    assert steps == list(range(steps[0], 60)) and 20 <= steps[0] <= 28
    assert lines[-1] == {"type": "end", "state": "finished", "step": 59}
    assert next(line for line in lines if line.get("step") == 58)["values"] == {
        "loss": 1 / 59,
        "grad_norm": 2.0,
    }


def wait_for_steps(name: str, step: int) -> None:
    """Wait until the server has the step of a run."""
    client, deadline = fp8scope.Client(), time.monotonic() + 60
    while time.monotonic() < deadline:
        listed = client.runs(f'name:"{name}"').first()
        if listed is not None and (listed.last_step or 0) >= step:
            return
        time.sleep(0.1)
    pytest.fail("The steps did not arrive.")


def test_tail_survives_a_restart_of_the_server(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8SCOPE_INTERVAL", "0.1")
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)
    with web_server(tmp_path / "web.log") as (url, _):
        monkeypatch.setenv("FP8SCOPE_URL", url)
        run = train(range(1, 10), tmp_path, name="live")
        wait_for_steps("live", 8)
        tail = Tail("live")
        tail.until("        8  loss 0.1111")
    log(run, range(10, 20))
    tail.until("does not answer", "stderr")
    with web_server(tmp_path / "web2.log", port=url.rpartition(":")[2]):
        tail.until("       18  loss 0.05263")
        run.finish()
        status, text, error = tail.end()
    assert status == 0 and "The run has finished at step 19." in text
    assert [int(number) for number in re.findall(r"^ +(\d+)  loss", text, re.MULTILINE)] == list(range(1, 20))
    assert "does not answer" in error and "the server is back" in error


def test_tail_says_that_a_run_failed_and_began_again(output: Output, server: Server, login: None) -> None:
    from dashboard.helpers.recording import Recorder

    stored = make_run(server.project, "run")
    first = Recorder(run=stored)
    first.rows(range(1, 11), {"loss": [1.0] * 10})
    tail = Tail("run", "--last", "2")
    tail.until("       10  loss 1")
    second = Recorder(run=stored, attempt=1)
    second.rows(range(6, 9), {"loss": [0.5, float("nan"), 0.5]})
    tail.until("        8  loss 0.5")
    second.finish(error="Traceback: x")
    status, text, _ = tail.end()
    assert status == 3 and "Attempt 1 begins at step 6." in text and "        7  loss NaN" in text
    assert "The run has failed at step" in text


def test_tail_shows_new_alerts(output: Output, server: Server, login: None) -> None:
    from dashboard.helpers.recording import Recorder

    from fp8scope_dashboard.alerts.services import create_default_rules, evaluate

    create_default_rules(server.project)
    stored = make_run(server.project, "run")
    recorder = Recorder(run=stored)
    recorder.rows(range(1, 11), {"loss": [1.0] * 10})
    tail = Tail("run")
    tail.until("       10  loss 1")
    recorder.rows(range(11, 14), {"loss": [1.0, float("nan"), float("nan")]})
    evaluate(stored.pk)
    tail.until("Alert open: Loss not finite")
    recorder.finish()
    assert tail.end()[0] == 0


# --- completion


def complete(script: Path, *words: str) -> list[str]:
    """What bash proposes for the last of the words."""
    quoted = " ".join(f'"{word}"' for word in words)
    program = f"""
source {script}
fp8scope() {{ {" ".join(PROGRAM)} "$@"; }}
COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}
_fp8scope
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line]


@pytest.fixture
def script(tmp_path: Path, output: Output) -> Path:
    status, text, _ = output("completion", "bash")
    assert status == 0
    path = tmp_path / "completion.bash"
    path.write_text(text)
    return path


def test_bash_completes_commands_and_options(script: Path) -> None:
    assert complete(script, "fp8scope", "ru") == ["rules", "run", "runs"]
    assert {"--json", "--sort", "--limit"} <= set(complete(script, "fp8scope", "runs", "--"))
    assert complete(script, "fp8scope", "alerts", "--sev") == ["--severity"]
    assert {"export", "apply"} <= set(complete(script, "fp8scope", "rules", ""))
    assert "--convert" in complete(script, "fp8scope", "run", "--con")


def test_bash_completes_names_of_runs(script: Path, seeded: Seeded, server: Server) -> None:
    make_run(server.project, "$(touch /tmp/owned) x")
    make_run(server.project, "\x1b[31mred")
    assert complete(script, "fp8scope", "show", "gpt fp8 d") == ["gpt\\ fp8\\ delayed"]
    assert complete(script, "fp8scope", "show", "'gpt fp8 d") == ["gpt fp8 delayed"]
    every = complete(script, "fp8scope", "tail", "")
    assert len(every) == 6 and "\\$\\(touch\\ /tmp/owned\\)\\ x" in every
    assert complete(script, "fp8scope", "export", str(seeded.healthy.pk)[:6]) == [str(seeded.healthy.pk)]


def test_a_slow_server_does_not_hold_up_the_shell(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setenv("FP8SCOPE_TOKEN", "fp8s_x")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("FP8SCOPE_URL", f"http://127.0.0.1:{listening.getsockname()[1]}")
        began = time.monotonic()
        assert complete(script, "fp8scope", "show", "g") == []
        assert time.monotonic() - began < 20.0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_have_every_command(output: Output, shell: str) -> None:
    from fp8scope.cli.main import all_commands

    status, text, _ = output("completion", shell)
    assert status == 0
    for name in all_commands():
        assert re.search(rf"\b{name}\b", text), name
    assert "@" not in re.sub(r'\$\{\(@f\)|"\$?\{?[A-Z_a-z]*\[@\]\}?"|\$@|"\$\{\w+\[@\]\}"', "", text)
