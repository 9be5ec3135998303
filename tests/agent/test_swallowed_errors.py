"""What fails of our own is kept from the training, and counted: wherever it happens, none is swallowed."""

import ast
import ctypes
import errno
import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agent.helpers.loops import regression, train
from agent.helpers.wire_server import WireServer
from helpers.waiting import wait_until

import fp8scope
import fp8scope_kernels
from fp8scope import guard
from fp8scope.config import Settings
from fp8scope.metadata import git
from fp8scope.observe.timing.machine import Machine
from fp8scope.process import launch_ranks, open_runs, sigterm, sys_exit
from fp8scope.process.import_hook import when_imported
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run
from fp8scope_kernels import backends

PACKAGES = [Path(str(package.__file__)).parent for package in (fp8scope, fp8scope_kernels)]
COUNTING = {"caught", "error", "failed", "on_error", "_on_error", "report", "before_any_run"}
# By function: what becomes of the error there.
ELSEWHERE = {
    ("__init__.py", "init"): "there is no run: one line says so, and what is returned records nothing",
    ("__init__.py", "attach"): "as in init",
    ("run_script.py", "_install"): "as in init",
    ("doctor.py", "check_packages"): "it is what the command prints",
    ("backends.py", "_load"): "the run counts backends.failures()",
    ("doctor.py", "_guarded"): "it is what the command prints",
    (
        "doctor.py",
        "_test_in_fork",
    ): "the forked process prints it and ends with status 1, which the command prints",
    ("run_script.py", "_config"): "it is returned, and _begin counts it in the run",
    ("git.py", "_look"): "the run counts RepositoryLookup.failure",
    ("completion.py", "_parser_of"): "the command says it when somebody calls it; here it has no words",
}


@pytest.fixture(autouse=True)
def nothing_early() -> Iterator[None]:
    guard._early.clear()
    yield
    guard._early.clear()


def broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)


def names_called(nodes: list[ast.stmt]) -> set[str]:
    calls = [node.func for body in nodes for node in ast.walk(body) if isinstance(node, ast.Call)]
    return {call.attr if isinstance(call, ast.Attribute) else ast.unparse(call) for call in calls}


def swallowing(path: Path) -> Iterator[str]:
    """The functions in a file that catch every exception and neither raise it nor have it counted."""
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.ExceptHandler) and broad(node):
                raises = any(isinstance(inner, ast.Raise) for body in node.body for inner in ast.walk(body))
                if not raises and not names_called(node.body) & COUNTING:
                    yield function.name
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
                yield from [function.name for kind in node.args if ast.unparse(kind).endswith("Exception")]


def test_it_works(server: WireServer, settings: Settings) -> None:
    run = Run(settings, blank_registration("counted"))
    with run.step() as step:
        step.log(text="no number")
    report = run.finish()
    assert report.errors == 1 and server.run.finish["errors"] == 1


def test_no_error_is_swallowed_uncounted() -> None:
    found = {
        (path.name, name)
        for package in PACKAGES
        for path in package.rglob("*.py")
        for name in swallowing(path)
    }
    assert found == set(ELSEWHERE)


def test_the_end_says_how_many_there_were(
    server: WireServer, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(settings, blank_registration("counted"))
    for _ in range(3):
        with run.step() as step:
            step.log(text="no number")
    assert run.finish().errors == 3
    assert "0 steps were dropped, and 3 values or actions failed in the agent" in caplog.text


def test_what_fails_before_a_run_is_counted_by_the_next(
    server: WireServer, settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(job: launch_ranks.Job) -> Any:
        raise RuntimeError("planned")

    monkeypatch.setattr(launch_ranks.Job, "_store", broken)
    assert launch_ranks.Job(size=2).agree("the attempt", "7") == "7"
    assert "RuntimeError: planned" in caplog.text
    for expected in (1, 0):
        run = Run(settings, blank_registration("next"))
        assert run.finish().errors == expected


def test_a_repository_that_cannot_be_read(
    server: WireServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise RuntimeError("planned")

    monkeypatch.setattr(git, "describe_repository", broken)
    run = Run(settings, blank_registration("repository"))
    run.session.registration.look_up_repository()
    assert run.finish().errors == 1


def test_a_ledger_that_cannot_be_written(
    server: WireServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "planned")

    monkeypatch.setattr("fp8scope.session.resume.os.replace", full)
    run = Run(settings, blank_registration("ledger"))
    report = run.finish()
    assert report.complete and report.errors == 2
    assert list(settings.directory.glob("latest.json*")) == []


def test_leftovers_that_cannot_be_sent(
    server: WireServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> Any:
        raise RuntimeError("planned")

    first = Run(replace(settings, mode="offline"), blank_registration("left"))
    with first.step():
        pass
    first.finish()
    monkeypatch.setattr("fp8scope.session.leftovers.send_spool", broken)
    run = fp8scope.init(
        name="next", resume=first.id, url=server.url, token=server.token, directory=settings.directory
    )
    wait_until(lambda: run.guard.errors, "the error")
    assert run.finish().errors == 1


def test_a_run_whose_end_fails_keeps_no_other_from_its_own(
    server: WireServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("planned")

    first, second = (Run(settings, blank_registration(name)) for name in ("first", "second"))
    monkeypatch.setattr(first.session, "terminate", broken)
    open_runs.exit_hooks.terminate(5.0)
    assert first.guard.errors == 1 and second.finished
    assert open_runs.live_runs == [first]
    first.finish()
    assert open_runs.live_runs == []


def test_an_exit_that_cannot_be_noted(
    server: WireServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("planned")

    run = Run(settings, blank_registration("exit"))
    monkeypatch.setattr(sys_exit, "format_exit", broken)
    open_runs.exit_hooks.note_exit(SystemExit(3), sys._getframe())
    assert run.finish().errors == 1


def test_a_finisher_that_fails_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(patience: float) -> None:
        raise RuntimeError("planned")

    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("only asked for when it is over"))
    terminator = sigterm.Terminator.__new__(sigterm.Terminator)
    terminator.finishers = [broken]
    with pytest.raises(pytest.fail.Exception):
        terminator._end()
    assert "RuntimeError: planned" in caplog.text


def test_a_driver_that_answers_nonsense(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(index: int) -> Any:
        raise ValueError("planned")

    monkeypatch.setattr("fp8scope.observe.timing.machine.driver_of", broken)
    counter = guard.Guard()
    machine = Machine(counter, lambda: torch.device("cuda", 0))
    for _ in range(3):
        machine.sample()
    assert counter.errors == 1


def test_what_is_done_on_import_and_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("planned")

    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    when_imported("colorsys", broken)
    importlib.import_module("colorsys")
    assert len(guard._early) == 1 and "nothing will be recorded" in caplog.text


def test_kernels_that_could_not_be_built_are_counted_once(
    server: WireServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_cpu_failure", "RuntimeError: no compiler\nat all")
    model, optimizer = regression()
    fp8scope.convert(model, fp8scope.CurrentScaling())
    run = fp8scope.attach(model, optimizer, url=server.url, token=server.token, every=1)
    train(model, optimizer, 3)
    assert run.finish().errors == 1 and torch.is_grad_enabled()
