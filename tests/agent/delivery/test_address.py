"""Where the run is to be seen: its address is printed when it is registered and at its end."""

import logging
import os
import subprocess
import sys

import pytest
from agent.helpers.launching import SCRIPTS, own_settings
from agent.helpers.scripts import environment, run_script
from agent.helpers.wire_server import WireServer

import fp8scope
from fp8scope.config import Settings
from fp8scope.guard import configure_logging

TRAIN = "\nrun = fp8scope.init(name='seen')\ntrain(run, 2)\n"


def lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("fp8scope: ")]


def test_it_works(server: WireServer, settings: Settings) -> None:
    wait = "deadline = time.monotonic() + 30\nwhile not run.url and time.monotonic() < deadline: wait_a_bit()"
    text = f"def wait_a_bit(): time.sleep(0.01)\n{TRAIN}{wait}\nprint(run.url)\nrun.finish()"
    status, out, err = run_script(text, server, settings)
    page = f"{server.url}/runs/{next(iter(server.runs))}"
    assert status == 0 and out.strip() == page
    assert lines(err) == [f"fp8scope: run seen: {page}", f"fp8scope: run seen has finished: {page}"]


def test_a_run_that_fails(server: WireServer, settings: Settings) -> None:
    status, _, err = run_script(f"{TRAIN}raise ValueError('mine')", server, settings)
    page = f"{server.url}/runs/{next(iter(server.runs))}"
    assert status == 1 and lines(err)[-1] == f"fp8scope: run seen has failed: {page}"


@pytest.mark.parametrize(
    ("setup", "variable", "expected"),
    [
        ("import logging; logging.getLogger('fp8scope').setLevel(logging.WARNING)", "", 0),
        (
            "import logging; logging.getLogger('fp8scope').setLevel(logging.WARNING); logging.basicConfig()",
            "",
            0,
        ),
        # A program whose own messages begin with warnings wants to know all the same.
        ("import logging; logging.basicConfig(level=logging.WARNING)", "", 2),
        ("pass", "warning", 0),
        ("pass", "info", 2),
    ],
)
def test_it_can_be_silenced(
    setup: str, variable: str, expected: int, server: WireServer, settings: Settings
) -> None:
    program = f"import time, fp8scope\n{setup}\nrun = fp8scope.init(name='seen')\n"
    program += "with run.step() as step: step.log(loss=1.0)\nrun.finish()\n"
    more = {"FP8SCOPE_LOG_LEVEL": variable} if variable else {}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(server, settings.directory, **more),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.count(f"{server.url}/runs/") == expected, done.stderr


def test_only_one_rank_prints_it(server: WireServer) -> None:
    command = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fp8scope", "run")
    done = subprocess.run(
        [sys.executable, *command, "--name", "ranks", str(SCRIPTS / "ddp.py")],
        env={**os.environ, **own_settings(server), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    page = f"{server.url}/runs/{next(iter(server.runs))}"
    assert [line for line in lines(done.stderr) if page in line] == [
        f"fp8scope: run ranks: {page}",
        f"fp8scope: run ranks has finished: {page}",
    ]


def test_offline_it_says_where_the_run_is_kept(
    settings: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8SCOPE_DIR", str(settings.directory))
    run = fp8scope.init(name="kept", mode="offline")
    assert f"run kept is kept in {run.directory}; later: fp8scope sync {run.directory}" in caplog.text
    caplog.clear()
    run.log({"loss": 1.0}, step=1)
    run.finish()
    assert caplog.text.count("fp8scope sync") == 1


def test_the_level_of_the_program_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("fp8scope")
    logger.setLevel(logging.ERROR)
    configure_logging()
    assert logger.level == logging.ERROR
    monkeypatch.setenv("FP8SCOPE_LOG_LEVEL", "nonsense")
    configure_logging()
    assert logger.level == logging.ERROR
