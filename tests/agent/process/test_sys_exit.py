"""Scripts that end by `sys.exit`: runs fail by the exit status, and output and status stay the same."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from agent.helpers.scripts import BEGIN, environment, run_script, without_address
from agent.helpers.wire_server import WireServer

from fp8scope.config import Settings
from fp8scope.process import open_runs, sys_exit
from fp8scope.process.patches import Patch
from fp8scope.process.sys_exit import exit_status
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run

MAIN = """
run = fp8scope.init(name="a job")
def main():
    train(run, 3)
    return {status}
{end}
"""


def test_a_failing_exit_fails_the_run(server: WireServer, settings: Settings) -> None:
    text = MAIN.format(status=3, end="sys.exit(main())")
    assert run_script(text, server, settings)[0] == 3
    assert server.run.steps == [1, 2, 3] and server.run.finish["state"] == "failed"
    error = server.run.finish["error"].splitlines()
    assert error[0].startswith("Traceback") and 'File "<string>"' in error[1] and error[-1] == "SystemExit: 3"


@pytest.mark.parametrize(
    ("end", "status", "error"),
    [
        ("sys.exit(main())", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('out of data')", 1, "SystemExit: out of data"),
        ("exit(4)", 4, "SystemExit: 4"),
        # Passes handlers of the script on its way out.
        ("try: sys.exit(5)\nfinally: print(end='')", 5, "SystemExit: 5"),
        ("try: sys.exit(5)\nexcept ValueError: pass", 5, "SystemExit: 5"),
        ("with open(os.devnull): sys.exit(5)", 5, "SystemExit: 5"),
        # Raised while another exception is handled.
        ("try: 1 / 0\nexcept Exception: sys.exit(6)", 6, "ZeroDivisionError: division by zero"),
        # Caught: the program goes on.
        ("try: sys.exit(7)\nexcept SystemExit: pass", 0, ""),
        ("try: sys.exit(7)\nexcept SystemExit: main()\nraise SystemExit(0)", 0, ""),
        ("try: sys.exit(7)\nexcept SystemExit: sys.exit(0)", 0, ""),
        ("try: sys.exit(7)\nexcept SystemExit: raise KeyError('worse')", 1, "KeyError: 'worse'"),
        # The run is finished already.
        ("run.finish(); sys.exit(8)", 8, ""),
    ],
)
def test_the_run_fails_only_if_the_exit_ends_the_program(
    end: str, status: int, error: str, server: WireServer, settings: Settings
) -> None:
    exit_code, out, err = run_script(MAIN.format(status=0, end=end), server, settings)
    assert (exit_code, out) == (status, ""), err
    assert server.run.finish["state"] == ("failed" if error else "finished")
    assert error in server.run.finish["error"] and bool(server.run.finish["error"]) == bool(error)


def test_functions_are_restored_after_the_last_run(settings: Settings) -> None:
    before = sys.exit, sys.excepthook, threading.excepthook, type(exit).__call__
    first, second = (Run(settings, blank_registration(name)) for name in ("first", "second"))
    open_runs.exit_hooks.install()
    assert sys.exit is not before[0]
    first.finish()
    assert sys.exit is not before[0]
    second.finish()
    assert (sys.exit, sys.excepthook, threading.excepthook, type(exit).__call__) == before


def test_does_not_restore_a_function_that_was_wrapped_since(monkeypatch: pytest.MonkeyPatch) -> None:
    patch = Patch(sys, "exit", lambda original: lambda code=None: original(code))
    ours = sys.exit
    monkeypatch.setattr(sys, "exit", lambda code=None: ours(code))
    theirs = sys.exit
    assert not patch.restore() and sys.exit is theirs


def test_bytecode_is_read_only_on_known_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = sys._getframe()
    monkeypatch.setattr(sys_exit, "CAN_READ_FRAMES", False)
    monkeypatch.setattr(sys_exit, "dis", None)
    assert sys_exit.was_left_by_exception(frame)


CODES = (None, 0, True, 3, 512, -1, "", "words", 0.0, (0,))


def test_exit_status_is_the_status_of_the_process() -> None:
    script = (
        "import os, sys\nif os.fork() == 0: sys.exit({!r})\nprint(os.waitstatus_to_exitcode(os.wait()[1]))"
    )
    for code in CODES:
        done = subprocess.run(
            [sys.executable, "-S", "-c", script.format(code)], check=True, capture_output=True, text=True
        )
        assert int(done.stdout) == exit_status(code), code


THREADED = """
run = fp8scope.init(name="threads")
def work():
    {first}
    sys.exit(9)
thread = threading.Thread(target=work)
thread.start()
thread.join()
{last}
"""


@pytest.mark.parametrize(
    ("first", "last", "state"),
    [("pass", "train(run, 2)", "finished"), ("train(run, 2)", "pass", "failed")],
)
def test_an_exit_of_a_thread_ends_only_the_thread(
    first: str, last: str, state: str, server: WireServer, settings: Settings
) -> None:
    status, _, err = run_script(THREADED.format(first=first, last=last), server, settings)
    assert (status, without_address(err, server, "threads", state)) == (0, "")
    assert server.run.steps == [1, 2]
    assert server.run.finish["state"] == state


ATTACHED = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = fp8scope.attach(model, optimizer, name="attached")
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
sys.exit("diverged")
"""


def test_the_last_attached_step_does_not_undo_the_failure(server: WireServer, settings: Settings) -> None:
    """The last step is recorded at exit, after the failure was noted."""
    assert run_script(ATTACHED, server, settings)[0] == 1
    assert server.run.steps == [1, 2, 3] and server.run.finish["state"] == "failed"
    assert server.run.finish["error"].endswith("SystemExit: diverged\n")


def launch(
    server: WireServer, settings: Settings, *arguments: str | Path, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(server, settings.directory, **more),
        input="continue\nquit\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=settings.directory.parent,
    )


SPAWNING = """
import multiprocessing

def child(name):
    train(fp8scope.init(name=name), 2)
    if name != "good":
        sys.exit(name) if name == "leaves" else 1 / 0

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    children = [multiprocessing.Process(target=child, args=(name,)) for name in ("good", "leaves", "raises")]
    for process in children:
        process.start()
    for process in children:
        process.join()
    print([process.exitcode for process in children])
"""


def test_failed_children_of_multiprocessing_fail_their_runs(
    server: WireServer, settings: Settings, tmp_path: Path
) -> None:
    """multiprocessing catches exceptions of a child and calls `sys.exit`."""
    (tmp_path / "spawning.py").write_text(BEGIN + SPAWNING)
    done = launch(server, settings, tmp_path / "spawning.py")
    assert done.stdout == "[0, 1, 1]\n", done.stderr
    ends = {run.registration["name"]: run.finish["state"] for run in server.runs.values()}
    assert ends == {"good": "finished", "leaves": "failed", "raises": "failed"}


TOOL = """
import argparse
{begin}
def inner():
    {end}
if __name__ == "__main__":
    inner()
"""
AS_SCRIPT, AS_MODULE, IN_PDB = ("tool.py",), ("-m", "tool"), ("-m", "pdb", "tool.py")


@pytest.mark.parametrize(
    ("how", "end", "failed"),
    [
        (AS_SCRIPT, "sys.exit('a message')", True),
        (AS_SCRIPT, "argparse.ArgumentParser().parse_args(['--wrong'])", True),
        (AS_MODULE, "sys.exit(3)", True),
        # pdb shows how the script ended, and starts it again.
        (IN_PDB, "sys.exit(3)", None),
    ],
)
def test_output_and_status_are_those_of_the_script_alone(
    how: tuple[str, ...],
    end: str,
    failed: bool | None,
    server: WireServer,
    settings: Settings,
    tmp_path: Path,
) -> None:
    (tmp_path / "tool.py").write_text(
        TOOL.format(begin=BEGIN + "train(fp8scope.init(name='tool'), 2)", end=end)
    )
    watched = launch(server, settings, *how)
    alone = launch(server, settings, *how, FP8SCOPE_MODE="disabled")
    assert watched.returncode == alone.returncode
    stderr = without_address(watched.stderr, server, "tool", "failed" if failed else "finished")
    assert (watched.stdout, stderr) == (alone.stdout, alone.stderr)
    if failed is not None:
        assert server.run.finish["state"] == "failed" and "inner()" in server.run.finish["error"]
