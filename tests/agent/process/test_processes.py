"""Runs in programs with threads, os._exit, spawned children, notebooks and module reloads."""

import os
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from agent.helpers.scripts import BEGIN, environment, run_script, sync_all
from agent.helpers.wire_server import WireServer

from fp8scope.config import Settings


def test_it_works(server: WireServer, settings: Settings) -> None:
    """A script that never finishes its run: the interpreter's exit does."""
    before = datetime.now(UTC)
    status, _, err = run_script("train(fp8scope.init(name='plain'), 5)", server, settings)
    assert status == 0, err
    assert server.run.steps == [1, 2, 3, 4, 5] and server.run.finish["state"] == "finished"
    assert before < datetime.fromisoformat(server.run.finish["finished_at"]) < datetime.now(UTC)


def test_sync_recognises_os_exit(server: WireServer, settings: Settings) -> None:
    text = "run = fp8scope.init(name='abrupt')\ntrain(run, 20)\nos._exit(7)"
    assert run_script(text, server, settings)[0] == 7
    assert [report.killed for report in sync_all(settings)] == [True]
    assert server.run.steps in (list(range(1, 20)), list(range(1, 21)))
    assert server.run.finish["state"] == "failed" and "os._exit" in server.run.finish["error"]


UNREACHABLE = """
import fp8scope.process.open_runs
fp8scope.process.open_runs.EXIT_SECONDS = 600.0
train(fp8scope.init(name="nobody listens"), 5)
"""


def test_the_end_does_not_wait_for_a_server_that_refuses(server: WireServer, settings: Settings) -> None:
    """Nothing listens at the address: the program ends, and its rows are kept."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        env = environment(server, settings.directory, FP8SCOPE_URL=f"http://127.0.0.1:{port}")
        command = [sys.executable, "-c", BEGIN + UNREACHABLE]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "fp8scope sync" in done.stderr, done.stderr
    sync_all(settings)
    assert server.run.steps == [1, 2, 3, 4, 5] and server.run.finish["state"] == "finished"


THREADS = """
run = fp8scope.init(name="threads")
def helper():
    raise ValueError("a helper's")
def trainer():
    train(run, 3)
    {end}
for work in (helper, trainer):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
"""


@pytest.mark.parametrize(
    ("end", "state"), [("pass", "finished"), ("raise KeyError('the trainer')", "failed")]
)
def test_an_exception_in_the_training_thread_fails_the_run(
    end: str, state: str, server: WireServer, settings: Settings
) -> None:
    """Python shows it as usual; the run fails only if it is the training thread's."""
    status, _, err = run_script(THREADS.format(end=end), server, settings)
    assert status == 0 and "ValueError: a helper's" in err
    assert ("KeyError: 'the trainer'" in err) == (state == "failed")
    assert server.run.finish["state"] == state
    assert ("KeyError" in server.run.finish["error"]) == (state == "failed")


INTERRUPTED = """
run = fp8scope.init(name="interrupted")
def interrupt():
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
while True:
    train(run, 1)
"""


def test_ctrl_c_fails_the_run(server: WireServer, settings: Settings) -> None:
    status, _, err = run_script(INTERRUPTED, server, settings)
    assert status == -2 and "KeyboardInterrupt" in err
    # On a busy machine the exit may have been too short to send everything.
    assert not any(report.killed or report.problem for report in sync_all(settings))
    assert server.run.finish["state"] == "failed" and "KeyboardInterrupt" in server.run.finish["error"]
    # Wherever it struck: what was recorded before is stored, each step once.
    assert server.run.steps == list(range(1, len(server.run.steps) + 1))


SHUTDOWN = """
run = fp8scope.init(name="late")
class Late:
    def __del__(self):
        train(run, 1)
        run.finish()
late = Late()
train(run, 2)
import atexit
atexit.register(lambda: train(run, 1))
"""


def test_records_values_logged_by_exit_handlers(server: WireServer, settings: Settings) -> None:
    """Values logged by an exit handler are recorded if it runs before ours, and ignored after it."""
    status, _, err = run_script(SHUTDOWN, server, settings)
    assert status == 0 and "Traceback" not in err, err
    assert server.run.steps == [1, 2, 3] and server.run.finish["state"] == "finished"


SPAWNING = """
import multiprocessing
import fp8scope

def child(run, queue):
    with run.step() as step:
        step.log(loss=1.0)
    run.finish()
    own = fp8scope.init(name="child's own")
    with own.step() as step:
        step.log(loss=2.0)
    own.finish()
    queue.put(run.id)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    run = fp8scope.init(name="parent")
    queue = context.Queue()
    process = context.Process(target=child, args=(run, queue))
    process.start()
    assert queue.get() != run.id
    process.join()
    assert process.exitcode == 0
    with run.step() as step:
        step.log(loss=3.0)
"""


def test_a_spawned_child_does_not_join_its_parents_run(
    server: WireServer, settings: Settings, tmp_path: Path
) -> None:
    path = tmp_path / "spawning.py"
    path.write_text(SPAWNING)
    done = subprocess.run(
        [sys.executable, str(path)],
        env=environment(server, settings.directory),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    stored = {run.registration["name"]: run.scalars("loss") for run in server.runs.values()}
    assert stored == {"parent": [3.0], "child's own": [2.0]}


NOTEBOOK = """
import importlib, fp8scope
run = fp8scope.init(name="first cell")
with run.step() as step: step.log(loss=1.0)

run = fp8scope.init(name="the cell again")
with run.step() as step: step.log(loss=2.0)

1 / 0
_ = importlib.reload(fp8scope)

run = fp8scope.init(name="after a reload")
with run.step() as step: step.log(loss=3.0)

from fp8scope.process.open_runs import live_runs
print("runs", len(live_runs))
"""


def test_init_again_in_a_notebook_finishes_the_previous_run(server: WireServer, settings: Settings) -> None:
    """Each `init` finishes the run before; the package is reloaded in between."""
    done = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=NOTEBOOK,
        env={**environment(server, settings.directory), "PYTHONSTARTUP": os.devnull},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0 and "runs 1" in done.stdout, done.stderr
    ends = {run.registration["name"]: run.finish["state"] for run in server.runs.values()}
    # The exception came after the second run's last step, and before anything went on in it.
    assert ends == {"first cell": "finished", "the cell again": "failed", "after a reload": "finished"}
    assert [run.scalars("loss") for run in server.runs.values()] == [[1.0], [2.0], [3.0]]


IPYTHON = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in (
    "import fp8scope; run = fp8scope.init(name='one')",
    "with run.step() as step: step.log(loss=1.0)",
    "raise RuntimeError('in a cell')",
    "run = fp8scope.init(name='two')",
    "with run.step() as step: step.log(loss=2.0)",
):
    shell.run_cell(cell)
"""


def test_works_in_ipython(server: WireServer, settings: Settings) -> None:
    pytest.importorskip("IPython")
    status, _, err = run_script(IPYTHON, server, settings)
    assert status == 0, err
    ends = {run.registration["name"]: run.finish["state"] for run in server.runs.values()}
    assert ends == {"one": "failed", "two": "finished"}


ATTACHING = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
cell = "run = fp8scope.attach(model, optimizer, name='attached')"
for text in (
    "import fp8scope, torch",
    "model = torch.nn.Linear(4, 4); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
    cell,
    "for _ in range(3): model(torch.ones(2, 4)).sum().backward(); optimizer.step()",
    cell,
    "for _ in range(2): model(torch.ones(2, 4)).sum().backward(); optimizer.step()",
    cell,
    "before = run",
    "fp8scope.attach(model, optimizer, reduction='nonsense')",
    "assert run is before and not run.finished",
):
    done = shell.run_cell(text)
    print(type(done.error_in_exec).__name__)
"""


def test_attach_again_in_a_notebook_finishes_the_previous_run(server: WireServer, settings: Settings) -> None:
    """Running the cell again finishes the previous run with its last step and begins another."""
    pytest.importorskip("IPython")
    status, out, err = run_script(ATTACHING, server, settings)
    assert status == 0, err
    endings = [line for line in out.splitlines() if line.endswith(("NoneType", "Error"))]
    assert [line for line in endings if line.endswith("Error")] == ["ConfigurationError"], out
    assert sorted(run.steps for run in server.runs.values() if run.rows) == [[1, 2], [1, 2, 3]]
    assert [run.finish["state"] for run in server.runs.values()].count("finished") >= 2
    assert all(None not in run.scalars("loss") for run in server.runs.values())
