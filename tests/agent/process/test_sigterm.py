"""SIGTERM from a scheduler fails and flushes the run, and the process still dies by the signal."""

import signal
import time

import pytest
from agent.helpers.faulty_http import Fault
from agent.helpers.scripts import run_script, said, script, sync_all
from agent.helpers.wire_server import WireServer

from fp8scope.config import Settings

TRAINING = """
run = fp8scope.init(name="preempted")
train(run, 50)
print("ready", flush=True)
wait()
"""


def test_it_works(server: WireServer, settings: Settings) -> None:
    with script(TRAINING, server, settings) as process:
        said(process)
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    assert server.run.steps == list(range(1, 51))
    assert server.run.finish["state"] == "failed"
    # Why, and where the training was.
    assert "SIGTERM" in server.run.finish["error"] and 'File "<string>"' in server.run.finish["error"]
    assert sync_all(settings) == []


def test_an_unresponsive_server_does_not_delay_the_exit(server: WireServer, settings: Settings) -> None:
    server.plan = lambda method, path: Fault(hang=True)
    with script(TRAINING, server, settings) as process:
        said(process)
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    server.released.set()
    server.plan = lambda method, path: None
    assert [report.problem for report in sync_all(settings)] == [""]
    assert server.run.steps == list(range(1, 51)) and "SIGTERM" in server.run.finish["error"]


STUCK = """
import hashlib
run = fp8scope.init(name="stuck")
train(run, 5)
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2_000_000_000)
"""


def test_fails_the_run_while_the_main_thread_is_blocked_in_c(server: WireServer, settings: Settings) -> None:
    """For example in a collective that waits for a rank that is gone."""
    with script(STUCK, server, settings) as process:
        said(process)
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    assert server.run.steps == [1, 2, 3, 4, 5] and server.run.finish["state"] == "failed"
    assert 'File "<string>"' in server.run.finish["error"]


IN_THE_MIDDLE = """
run = fp8scope.init(name="busy")
train(run, 10)
print("ready", flush=True)
number = 10
while True:
    train(run, 1)
    number += 1
    os.write(1, b"%d\\n" % number)
"""


def test_a_signal_inside_the_agents_code_does_not_deadlock(server: WireServer, settings: Settings) -> None:
    with script(IN_THE_MIDDLE, server, settings) as process:
        said(process)
        for _ in range(100):
            said(process)
        process.terminate()
        out, _ = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGTERM
    assert server.run.steps == list(range(1, len(server.run.steps) + 1))
    assert len(server.run.steps) >= 109 and server.run.finish["state"] == "failed"
    # The training went on while its run was written out; that is not recorded, and not lost by a queue.
    assert out == "" or int(out.split()[-1]) >= len(server.run.steps) - 1


OWN_HANDLER = """
def mine(number, frame):
    print("mine", flush=True)
    {action}
{before}
run = fp8scope.init(name="has its own")
{after}
train(run, 5)
print("ready", flush=True)
while "asked" not in globals():
    time.sleep(0.01)
run.finish()
"""
INSTALL = "signal.signal(signal.SIGTERM, mine)"


@pytest.mark.parametrize(
    ("action", "before", "after", "status", "state"),
    [
        ("globals()['asked'] = True", INSTALL, "", 0, "finished"),
        ("globals()['asked'] = True", "", INSTALL, 0, "finished"),
        ("sys.exit(143)", INSTALL, "", 143, "failed"),
        ("raise InterruptedError('planned')", INSTALL, "", 1, "failed"),
    ],
)
def test_the_programs_own_handler_takes_precedence(
    action: str, before: str, after: str, status: int, state: str, server: WireServer, settings: Settings
) -> None:
    text = OWN_HANDLER.format(action=action, before=before, after=after)
    with script(text, server, settings) as process:
        assert said(process) == "ready"
        process.terminate()
        assert said(process) == "mine"
        assert process.wait(60) == status
    assert server.run.steps == [1, 2, 3, 4, 5] and server.run.finish["state"] == state


OTHERS = """
seen = []
signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
before = [signal.getsignal(n) for n in signal.valid_signals() if n not in (signal.SIGTERM,)]
run = fp8scope.init(name="others")
assert before == [signal.getsignal(n) for n in signal.valid_signals() if n not in (signal.SIGTERM,)]
os.kill(os.getpid(), signal.SIGUSR1)
train(run, 3)
assert seen == [signal.SIGUSR1]
run.finish()
"""


def test_other_signals_are_not_handled(server: WireServer, settings: Settings) -> None:
    status, _, err = run_script(OTHERS, server, settings)
    assert status == 0, err
    assert server.run.finish["state"] == "finished"


IGNORING = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
run = fp8scope.init(name="deaf")
os.kill(os.getpid(), signal.SIGTERM)
train(run, 3)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
"""

IN_A_THREAD = """
def main():
    run = fp8scope.init(name="in a thread")
    train(run, 3)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    run.finish()
thread = threading.Thread(target=main)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("text", [IGNORING, IN_A_THREAD])
def test_installs_no_handler_if_sigterm_is_ignored_or_from_a_thread(
    text: str, server: WireServer, settings: Settings
) -> None:
    status, _, err = run_script(text, server, settings)
    assert status == 0, err
    assert server.run.steps == [1, 2, 3] and server.run.finish["state"] == "finished"


FORKING = """
run = fp8scope.init(name="parent")
train(run, 2)
child = os.fork()
if child == 0:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    print("ready", flush=True)
    wait()
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
train(run, 2)
"""


def test_sigterm_in_a_forked_child_does_not_affect_the_parent(server: WireServer, settings: Settings) -> None:
    status, _, err = run_script(FORKING, server, settings)
    assert status == 0, err
    assert server.run.steps == [1, 2, 3, 4] and server.run.finish["state"] == "finished"


TWICE = """
first = fp8scope.init(name="one")
train(first, 2)
for name in [name for name in sys.modules if name.startswith("fp8scope")]:
    del sys.modules[name]
import fp8scope as second_import
second = second_import.init(name="two")
train(second, 3)
print("ready", flush=True)
wait()
"""


def test_works_after_the_package_is_imported_again(server: WireServer, settings: Settings) -> None:
    with script(TWICE, server, settings) as process:
        said(process)
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    ends = {run.registration["name"]: (run.steps, run.finish["state"]) for run in server.runs.values()}
    assert ends == {"one": ([1, 2], "failed"), "two": ([1, 2, 3], "failed")}


def test_two_signals_end_the_run_once(server: WireServer, settings: Settings) -> None:
    with script(TRAINING, server, settings) as process:
        said(process)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            process.terminate()
            time.sleep(0.001)
        assert process.returncode == -signal.SIGTERM
    assert server.run.finish["state"] == "failed"
