"""`fp8scope run` records an unmodified script without changing its behaviour."""

import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from agent.helpers.launching import SCRIPTS, Launch, here, own_settings
from agent.helpers.stored_run import StoredRun
from agent.helpers.wire_server import WireServer

from fp8scope.cli import main as cli

__all__ = ["here"]


def environment(server: WireServer) -> dict[str, str]:
    return {**os.environ, **own_settings(server), "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}


def launch(
    server: WireServer, *arguments: str | Path, command: tuple[str, ...] = ("-m", "fp8scope", "run")
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command, *map(str, arguments)],
        env=environment(server),
        capture_output=True,
        text=True,
        check=False,
    )


def names_of(run: StoredRun) -> list[str]:
    return [tensor["name"] for tensor in next(iter(run.catalogues.values()))]


def test_it_works(server: WireServer) -> None:
    done = launch(
        server, "--convert", "delayed", "--name", "unmodified", SCRIPTS / "plain.py", "--steps", "6"
    )
    assert done.returncode == 0, done.stderr
    stored = server.run
    assert stored.registration["name"] == "unmodified" and stored.registration["precision"] == "fp8"
    assert stored.registration["recipe"]["recipe"] == "DelayedScaling"
    assert stored.steps == [1, 2, 3, 4, 5, 6] and stored.finish["state"] == "finished"
    assert stored.scalars("loss") == pytest.approx([float(line) for line in done.stdout.split()])
    assert stored.scalars("tokens") == [32.0 * step for step in range(1, 7)]
    # The last layer is the output head, which is not converted.
    in_fp8 = {f"{layer}.{role}" for layer in (1, 3) for role in ("input", "weight", "grad_output")}
    tensors = next(iter(stored.catalogues.values()))
    assert {tensor["name"] for tensor in tensors if tensor["format"]} == in_fp8
    assert "2 layers compute in FP8 now (DelayedScaling)" in done.stderr
    assert all(
        row["tensors"]["amax"][names_of(stored).index(name)] > 0 for row in stored.rows for name in in_fp8
    )


def test_without_conversion_it_trains_exactly_as_alone(
    server: WireServer, here: Launch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["plain.py"])
    runpy.run_path(str(SCRIPTS / "plain.py"), run_name="__main__")
    alone = capsys.readouterr().out
    assert here(SCRIPTS / "plain.py") == 0
    assert capsys.readouterr().out == alone and len(alone.split()) == 5
    assert server.run.registration["name"].startswith("plain ")
    assert {"1.input", "3.weight"} <= set(names_of(server.run))


def test_records_a_compiled_model(server: WireServer, here: Launch) -> None:
    assert here(SCRIPTS / "plain.py", "--compile") == 0
    assert server.run.steps == [1, 2, 3, 4, 5] and None not in server.run.scalars("loss")
    assert server.run.scalars("tokens") == [32.0 * step for step in range(1, 6)]


def test_advises_at_the_end(server: WireServer, here: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("--advise", SCRIPTS / "plain.py", "--steps", "30") == 0
    assert re.search(r"fp8scope advises:\n\d\d steps of \d+\.\d ms on 1 of 1 ranks", capsys.readouterr().err)
    training = server.run.registration["environment"]["training"]
    assert training["products"][0]["precision"] == "fp32" and server.run.finish["errors"] == 0
    # The embedding, three layers with biases, and for each of the seven parameters the state of AdamW.
    whole = 4 * (96 * 32 + (32 + 1) * 64 + (64 + 1) * 32 + (32 + 1) * 96)
    account = training["memory_account"]
    assert account["weights"] == account["gradients"] == account["optimizer"]["exp_avg"] == {"float32": whole}
    assert account["optimizer"]["step"] == {"float32": 7 * 4}


def test_records_two_models(server: WireServer, here: Launch) -> None:
    assert here(SCRIPTS / "gan.py") == 0
    names = names_of(server.run)
    # Names of the first model have no prefix; names of the second begin with its class.
    assert "0.weight" in names and "Generator.0.weight" in names
    assert server.run.finish["errors"] == 0
    assert len(server.run.steps) in (4, 5) and None not in server.run.scalars("loss")
    assert [value is None for value in server.run.scalars("loss/Generator")].count(True) <= 1


def test_records_every_rank_of_data_parallel_training(server: WireServer) -> None:
    command = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fp8scope", "run")
    done = launch(server, "--convert", "current", "--name", "ranks", SCRIPTS / "ddp.py", command=command)
    assert done.returncode == 0, done.stderr
    for stored in server.runs.values():
        by_writer: dict[str, list[int]] = {row["writer"]: [] for row in stored.rows}
        for row in stored.rows:
            by_writer[row["writer"]].append(row["step"])
        assert all(steps == [1, 2, 3, 4] for steps in by_writer.values())
        assert {"0.input", "2.grad_output"} <= set(names_of(stored))
    assert sum(len(stored.rows) for stored in server.runs.values()) == 8
    # One run of two writers.
    assert len(server.runs) == 1


def write(tmp_path: Path, text: str, name: str = "train.py") -> Path:
    script = tmp_path / name
    script.write_text(text)
    return script


TRAIN = """
import torch
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
"""

SURROUNDINGS = """
import __main__, atexit, os, pickle, sys
class Mine: pass
assert __name__ == "__main__" and __main__.Mine is Mine
assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
print(sys.argv, os.path.basename(sys.path[0]), os.path.basename(__file__), os.path.isabs(__file__))
print(__spec__ and __spec__.name, __package__, "torch" in sys.modules, sorted(vars()))
atexit.register(lambda: print("at exit", Mine))
"""


@pytest.mark.parametrize("how", ["script", "link", "module", "package"])
def test_the_script_sees_its_usual_environment(how: str, server: WireServer, tmp_path: Path) -> None:
    (tmp_path / "work" / "code").mkdir(parents=True)
    write(tmp_path / "work" / "code", SURROUNDINGS, "__main__.py" if how == "package" else "train.py")
    write(tmp_path / "work" / "code", "", "__init__.py")
    (tmp_path / "work" / "link.py").symlink_to("code/train.py")
    target = {
        "script": ("code/train.py",),
        "link": ("link.py",),
        "module": ("-m", "code.train"),
        "package": ("-m", "code"),
    }[how]
    os.chdir(tmp_path / "work")
    alone = launch(server, *target, "--mode", "x", "-m", command=())
    watched = launch(server, "--seed", "3", *target, "--mode", "x", "-m")
    assert alone.returncode == 0 and "at exit" in alone.stdout, alone.stderr
    assert watched.stdout == alone.stdout
    assert "nothing was recorded: no training step was found" in watched.stderr and server.runs == {}


BY_ITSELF = """
import sys
import fp8scope
run = fp8scope.init(name="crash test")
with run.step() as step:
    step.log(loss=1.0)
def inner():
    {ending}
inner()
"""


@pytest.mark.parametrize(
    ("ending", "status", "state"),
    [
        ("raise ValueError('not today')", 1, "failed"),
        ("sys.exit(3)", 3, "failed"),
        ("sys.exit('a message')", 1, "failed"),
        ("sys.exit()", 0, "finished"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "failed"),
        ("1 +", 1, None),
    ],
)
def test_the_run_ends_as_the_script_does(
    ending: str, status: int, state: str | None, server: WireServer, tmp_path: Path
) -> None:
    script = write(tmp_path, BY_ITSELF.format(ending=ending))
    alone = launch(server, script, command=())
    server.runs.clear()
    watched = launch(server, script)
    assert watched.returncode == alone.returncode == status
    # To the letter.
    assert without_our_lines(watched.stderr) == without_our_lines(alone.stderr)
    if state is not None:
        assert server.run.steps == [1] and server.run.finish["state"] == state
        assert ("inner()" in server.run.finish["error"]) == (state == "failed")


def without_our_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("fp8scope: ")]


def test_tracebacks_do_not_show_our_patches(server: WireServer, tmp_path: Path) -> None:
    script = write(tmp_path, f"{TRAIN}\ntrain(2)\nmodel(torch.ones(2, 16)).backward()\n")
    lines = without_our_lines(launch(server, script).stderr)
    assert lines[0].startswith("Traceback") and lines[-1].startswith(
        "RuntimeError: grad can be implicitly created"
    )
    places = [line.split('"')[1] for line in lines if line.startswith("  File ")]
    assert places[0] == str(script) and all("torch" in place for place in places[1:])
    # That a step before was recorded well does not make it a success.
    assert server.run.steps == [1, 2] and server.run.finish["state"] == "failed"
    assert "grad can be implicitly created" in server.run.finish["error"]


def test_os_exit_leaves_the_run_in_the_spool(server: WireServer, tmp_path: Path) -> None:
    """`os._exit` skips all exit handlers: the spool holds every step except the last."""
    script = write(tmp_path, f"import os\n{TRAIN}\ntrain(20)\nos._exit(5)\n")
    done = launch(server, "--mode", "offline", script)
    assert done.returncode == 5
    assert launch(server, tmp_path, command=("-m", "fp8scope", "sync")).returncode == 0
    assert server.run.steps in (list(range(1, 20)), list(range(1, 21)))


def test_ctrl_c_fails_the_run(server: WireServer, tmp_path: Path) -> None:
    script = write(tmp_path, f"{TRAIN}\ntrain(3)\nprint('trained', flush=True)\nwhile True: train(1)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "fp8scope", "run", script],
        env=environment(server),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "trained\n"
        process.send_signal(signal.SIGINT)
        err = process.stderr.read()
    assert process.returncode == -signal.SIGINT
    assert without_our_lines(err)[-1] == "KeyboardInterrupt"
    assert re.fullmatch(rf"fp8scope: run train .* has failed: {server.url}/runs/\S+", err.splitlines()[-1])
    # The signal may have come while the last completed step was being recorded.
    assert server.run.finish["state"] == "failed" and len(server.run.steps) >= 2


def test_does_not_touch_a_script_that_records_itself(
    server: WireServer, here: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = f"{TRAIN}\nimport fp8scope\nrun = fp8scope.attach(model, optimizer, name='its own')\ntrain(2)\n"
    caplog.set_level("INFO", "fp8scope")
    assert here("--name", "ours", write(tmp_path, text)) == 0
    assert "records a run itself" in caplog.text
    assert server.run.registration["name"] == "its own" and server.run.steps == [1, 2]


IN_TURN = """
import torch
for layer in (torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)):
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    kept = globals().setdefault("kept", []); kept.append((layer, optimizer))
    for _ in range(6):
        optimizer.zero_grad()
        layer(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
"""


def test_steps_that_are_left_out_are_told(server: WireServer, tmp_path: Path) -> None:
    """Of models that are trained one after the other, the second waits for steps of the first."""
    script = tmp_path / "in_turn.py"
    script.write_text(IN_TURN)
    done = launch(server, script)
    assert done.returncode == 0 and server.run.steps == list(range(1, 7))
    assert "the last 6 steps of an optimizer are not recorded" in done.stderr


UNSEEN = """
import sys, torch
from torch.nn import functional
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
inputs, targets = torch.randn(16, 4), torch.randn(16, 1)
hooked = []

def loss_of(forward):
    optimizer.zero_grad()
    loss = (forward(inputs) - targets).square().mean()
    loss.backward()
    return loss

if sys.argv[1] == "closure":
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    steps = [lambda: optimizer.step(lambda: loss_of(model))] * 3
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        loss = loss_of(lambda x: functional.linear(x, model.weight, model.bias))
        optimizer.step()
        return loss
    steps = [step] * 3
optimizer.register_step_pre_hook(lambda *args: hooked.append(args))
for step in steps:
    print(step().item())
assert len(hooked) == 3
"""


@pytest.mark.parametrize("way", ["closure", "functional"])
def test_a_run_that_begins_in_an_optimizer_step(
    way: str, server: WireServer, here: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No call of the model is seen before it, and the script has a hook of its own on the optimizer."""
    script = tmp_path / "unseen.py"
    script.write_text(UNSEEN)
    assert here(script, way) == 0
    losses = [float(line) for line in capsys.readouterr().out.split()]
    assert server.run.steps == [1, 2, 3] and server.run.scalars("loss") == pytest.approx(losses, rel=1e-6)


def test_a_second_optimizer_replaces_the_first(server: WireServer, here: Launch, tmp_path: Path) -> None:
    text = f"{TRAIN}\ntrain(5)\nkept = optimizer\n"
    text += "optimizer = torch.optim.Adam(model.parameters(), lr=0.5)\ntrain(5)\n"
    assert here(write(tmp_path, text)) == 0
    assert server.run.steps == list(range(1, 11)) and None not in server.run.scalars("loss")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ((), 2, "no script given"),
        (("missing.py",), 2, "there is no script missing.py"),
        (("-m", "missing.module"), 2, "there is no module missing.module"),
        (("-m",), 2, "no script given"),
        (("/tmp",), 2, "is a directory"),
        (("--convert", "fp7", "x.py"), 2, "invalid choice: 'fp7'"),
        (("--name", "", "x.py"), 2, "name must not be empty"),
        (("--tokens-per-step", "-3", "x.py"), 2, "must not be negative"),
        (("--nmae", "x", "x.py"), 2, "unrecognized arguments: --nmae"),
    ],
)
def test_refuses_bad_input(
    arguments: tuple[str, ...], status: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = (list(sys.argv), list(sys.path))
    try:
        found = cli.main(["run", *arguments])
    except SystemExit as error:
        found = int(str(error.code))
    assert found == status and message in capfd.readouterr().err
    assert (sys.argv, sys.path) == before


def test_help_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    shown = capsys.readouterr().out
    assert set(re.findall(r"--[a-z-]+", shown)) >= {"--convert", "--project", "--name", "--mode", "--help"}
