"""`fp8scope run` reads the configuration of an unmodified script."""

import argparse
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from agent.helpers.launching import SCRIPTS, Launch, here, own_settings
from agent.helpers.wire_server import WireServer
from torch.optim import Optimizer

from fp8scope.autolog.rebound_names import rebound_names
from fp8scope.autolog.script_config import MAX_BYTES

__all__ = ["here"]

TRAIN = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train():
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def printed(text: str) -> list[float]:
    return [float(value) for value in re.findall(r"(?m)\bloss ([\d.e+-]+)$", text)]


@pytest.fixture
def config_of(server: WireServer, here: Launch, tmp_path: Path) -> Any:
    """Runs a script of this text, which trains by `train()`, and returns the configuration stored."""

    def run(text: str, *arguments: str) -> dict[str, Any]:
        script = tmp_path / "train.py"
        script.write_text(TRAIN + text)
        assert here(script, *arguments) == 0
        assert server.run.finish["errors"] == 0
        config: dict[str, Any] = server.run.registration["config"]
        return config

    return run


def test_it_works(server: WireServer, here: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings at module level, as they are after the command line has changed some of them."""
    assert here(SCRIPTS / "nano.py", "--learning_rate=0.02", "--max_iters=4", "--api_key=abc123") == 0
    output = capsys.readouterr().out
    assert len(printed(output)) == 4 and server.run.scalars("loss") == pytest.approx(printed(output))
    config = server.run.registration["config"]
    assert config.pop("model") == {
        "block_size": 32, "vocab_size": 256, "n_layer": 2, "n_head": 2, "n_embd": 32
    }  # fmt: skip
    assert config == {
        "job": {"out_dir": "out"}, "eval_interval": 5, "eval_only": False, "dataset": "topics",
        "gradient_accumulation_steps": 1, "batch_size": 4, "block_size": 32, "n_layer": 2, "n_head": 2,
        "n_embd": 32, "dropout": 0.0, "learning_rate": 0.02, "max_iters": 4, "weight_decay": 0.1,
        "beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0, "warmup_iters": 2, "min_lr": 0.001, "device": "cpu",
        "dtype": "float32", "api_key": "[redacted]",
    }  # fmt: skip
    assert "abc123" not in json.dumps(server.run.registration)


def test_reads_a_nested_configuration_object(
    server: WireServer, here: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(SCRIPTS / "mini.py", "--trainer.max_iters=3", "--model.width=16") == 0
    output = capsys.readouterr().out
    assert len(printed(output)) == 3 and server.run.scalars("loss") == pytest.approx(printed(output))
    config = server.run.registration["config"]
    assert config["system"] == {"seed": 3407} and config["job"] == {"system.work_dir": "./out/mini"}
    assert config["data"] == {"block_size": 16} and config["model"] == {"width": 16}
    assert config["trainer"] == {"batch_size": 4, "learning_rate": 0.005, "max_iters": 3}


def test_reads_arguments_of_a_script_without_an_optimizer(
    server: WireServer, here: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without an optimizer a step is a backward pass whose gradients were used; the arguments are stored."""
    assert here(SCRIPTS / "word_lm.py", "--epochs", "3", "--lr", "4") == 0
    output = capsys.readouterr().out
    assert len(printed(output)) == 9 and server.run.scalars("loss") == pytest.approx(printed(output))
    assert server.run.steps == list(range(1, 10)) and server.run.finish["errors"] == 0
    config = server.run.registration["config"]
    arguments = {
        "emsize": 24, "nhid": 32, "nlayers": 1, "lr": 4.0, "clip": 0.25, "epochs": 3, "batch_size": 8,
        "bptt": 12, "words": 300, "seed": 1111,
    }  # fmt: skip
    assert arguments.items() <= config.items()


@pytest.mark.parametrize("zero", ["set_to_none=True", "set_to_none=False"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_accumulation_without_an_optimizer_is_one_step(
    zero: str, accumulate: int, server: WireServer, here: Launch, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"""
import torch
model = torch.nn.Linear(4, 4)
for step in range(4):
    for part in range({accumulate}):
        loss = model(torch.ones(2, 4)).square().mean() / {accumulate}
        loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    model.zero_grad({zero})
    print(loss.item() * {accumulate})
""")
    assert here(script) == 0
    assert server.run.steps == [1, 2, 3, 4] and None not in server.run.scalars("loss")
    losses = [loss or 0.0 for loss in server.run.scalars("loss")]
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 4


def test_reads_arguments_when_the_training_begins(config_of: Any) -> None:
    config = config_of(
        """
import argparse, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--out", type=pathlib.Path, default="runs")
parser.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.95))
parser.set_defaults(call=train)
commands = parser.add_subparsers(dest="command")
fit = commands.add_parser("fit")
fit.add_argument("--width", type=int)
first, rest = argparse.ArgumentParser(add_help=False).parse_known_args()
args = parser.parse_args()
args.lr *= 2
args.weights = torch.ones(3)
train()
""",
        "--lr", "0.25", "fit", "--width", "7",
    )  # fmt: skip
    assert config["lr"] == 0.5 and config["width"] == 7 and config["command"] == "fit"
    assert config["betas"] == [0.9, 0.95] and config["out"] == "runs" and config["call"] == "train"
    assert config["weights"] == "<Tensor>"


def test_ignores_arguments_that_a_library_parses(config_of: Any) -> None:
    # An installed module that parses a list other than the command line.
    config = config_of(
        """
import timeit
timeit.main(["-n", "1", "pass"])
parser = __import__("argparse").ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.parse_args(["--lr", "3"])
from unittest.main import TestProgram
class Quiet(TestProgram):
    def runTests(self): pass
Quiet(argv=["x", "--failfast"])
train()
"""
    )
    assert config["lr"] == 3.0 and "failfast" not in config


def test_more_explicit_sources_win_and_others_are_kept(config_of: Any) -> None:
    config = config_of(
        """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--width", type=int, default=8)
args = parser.parse_args()
lr = args.lr / 4
width = args.width
DEPTH = 3
train()
""",
        "--lr", "1.0",
    )  # fmt: skip
    assert config["lr"] == 1.0 and config["constants"] == {"lr": 0.25}
    assert config["width"] == 8 and config["DEPTH"] == 3


FLAT_LOOP = """
from math import tau
import time
from random import seed as set_seed
EPOCHS, BATCH_SIZE = 2, 4
lr = 0.5
warmup = 10
warmup //= 2
names = [name for name in ("a", "b")]
best = float("inf")
if __name__ == "__main__":
    device = "cpu"
    for epoch in range(EPOCHS):
        started = time.time()
        for i, (x, label) in enumerate([(1, "a"), (2, "b")]):
            step = epoch * 2 + i
            batch = [x] * 4
            train()
        else:
            epochs_done = epoch
        best = min(best, step)
"""
WHILE_LOOP = """
learning_rate, decay = 0.1, True
iteration = 0
while True:
    current_rate = learning_rate if decay else 0.0
    with open(__file__) as source:
        line = source.readline()
    train()
    iteration += 1
    if (more := iteration) >= 2:
        break
"""
GLOBALS = """
WIDTH = 8
seen = 0
def fit():
    global seen
    WIDTH = 9
    for seen in range(2):
        train()
class Trainer:
    WIDTH = 10
    def run(self):
        fit()
Trainer().run()
"""
SWEEP = """
DEPTH = 3
total = sum(value := number for number in range(4))
for seed in (0, 1):
    width = 8 * (seed + 1)
    train()
del seed
"""


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            FLAT_LOOP,
            {"EPOCHS": 2, "BATCH_SIZE": 4, "lr": 0.5, "warmup": 5, "names": ["a", "b"], "device": "cpu"},
        ),
        (WHILE_LOOP, {"learning_rate": 0.1, "decay": True}),
        (GLOBALS, {"WIDTH": 8}),
        (SWEEP, {"DEPTH": 3, "total": 6}),
    ],
)
def test_variables_of_loops_are_not_configuration(
    script: str, expected: dict[str, Any], config_of: Any
) -> None:
    assert config_of(script) == expected


def test_a_settings_module_may_have_loops(config_of: Any, tmp_path: Path) -> None:
    (tmp_path / "my_settings.py").write_text(
        "LAYERS = 2\nlimits = []\nfor each in (1, 2):\n    limits.append(each)\n"
    )
    config = config_of("import my_settings as settings\nfrom my_settings import LAYERS\ntrain()")
    assert config == {"LAYERS": 2, "limits": [1, 2]}


@pytest.mark.parametrize("source", [None, "no python (", "# coding: unknown\n", "x = 1\0"])
def test_without_its_source_all_constants_of_a_script_count(source: str | None, tmp_path: Path) -> None:
    path = tmp_path / "gone.py"
    if source is not None:
        path.write_text(source)
    assert rebound_names(str(path)) == set()


def test_reads_configuration_objects_of_running_functions(config_of: Any) -> None:
    config = config_of(
        """
import enum
from dataclasses import dataclass, field
from types import SimpleNamespace
class Kind(enum.Enum):
    FAST = 1
@dataclass
class Optim:
    lr: float = 0.5
@dataclass
class TrainConfig:
    optim: Optim = field(default_factory=Optim)
    kind: Kind = Kind.FAST
    dtype: torch.dtype = torch.bfloat16
class Hparams:
    layers = 5
    def method(self): pass
data_config = {"name": "topics", "split": 0.9}
params = dict(model.named_parameters())
def main(setup, args):
    train()
main(TrainConfig(), SimpleNamespace(epochs=3))
"""
    )
    assert config["setup"] == {"optim": {"lr": 0.5}, "kind": "FAST", "dtype": "torch.bfloat16"}
    assert config["epochs"] == 3 and config["layers"] == 5
    assert config["data_config"] == {"name": "topics", "split": 0.9}
    # Tensors are no settings, whatever they are called.
    assert "weight" not in config and "params" not in config


def test_reads_click_parameters(config_of: Any) -> None:
    config = config_of(
        """
import click
@click.group()
@click.option("--debug/--no-debug", default=False)
def cli(debug): pass
@cli.command()
@click.option("--lr", type=float, default=0.1)
@click.option("--secret-key", default="")
@click.argument("name")
def fit(**values): train()
cli(standalone_mode=False)
""",
        "--debug", "fit", "--lr", "0.5", "--secret-key", "hidden value", "topics",
    )  # fmt: skip
    assert config["debug"] is True and config["lr"] == 0.5 and config["name"] == "topics"
    assert config["secret_key"] == "[redacted]"


def test_reads_a_hydra_configuration(config_of: Any, tmp_path: Path) -> None:
    pytest.importorskip("hydra")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "main.yaml").write_text(
        "optim: {lr: 0.1, betas: [0.9, 0.95]}\nwidth: 8\nhidden: ${width}\nmissing: ???\n"
    )
    config = config_of(
        """
import hydra
@hydra.main(version_base=None, config_path="conf", config_name="main")
def main(anything):
    train()
main()
""",
        "optim.lr=0.5", "hydra.run.dir=out",
    )  # fmt: skip
    assert config["optim"] == {"lr": 0.5, "betas": [0.9, 0.95]}
    assert config["width"] == config["hidden"] == 8 and config["missing"] == "???"


SECRETS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("-p", "--password")
parser.add_argument("--wandb-key")
parser.add_argument("--hub_token")
parser.add_argument("--max_tokens", type=int)
parser.add_argument("user")
args = parser.parse_args()
DB_PASS = "bottom secret"
secrets = ["one thing", "another"]
auth = {"credentials": {"user": "ada", "word": "open sesame"}}
sort_key, tokenizer = 7, "bytes"
train()
"""


def test_secrets_are_never_sent(server: WireServer, here: Launch, tmp_path: Path, config_of: Any) -> None:
    arguments = (
        "-p",
        "hunter2",
        "--wandb-key",
        "wandb-9f3e",
        "--hub_token=hub-77ab",
        "--max_tokens",
        "9",
        "ada",
    )
    config = config_of(SECRETS, *arguments)
    sent = json.dumps(server.run.registration)
    for secret in (
        "hunter2",
        "wandb-9f3e",
        "hub-77ab",
        "bottom secret",
        "one thing",
        "another",
        "open sesame",
    ):
        assert secret not in sent, secret
    assert config["password"] == config["wandb_key"] == config["hub_token"] == "[redacted]"
    assert config["max_tokens"] == 9 and config["sort_key"] == 7 and config["tokenizer"] == "bytes"
    assert config["user"] == "ada"
    assert "-p [redacted]" in server.run.registration["environment"]["command"]


def test_bounds_the_size_of_the_configuration(config_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(
        """
import argparse
text = "a" * 2_000_000
numbers = list(range(100_000))
losses = []
config = {f"many_{i}": "word " * 90 for i in range(1500)}
args = argparse.ArgumentParser().parse_args([])
args.lr = 0.1
loop = {}
loop["again"] = loop
options = loop
train()
"""
    )
    assert config["lr"] == 0.1 and len(json.dumps(config)) <= MAX_BYTES + 10_000
    assert not {"text", "numbers", "losses", "options", "again"} & config.keys()
    assert "many_0" in config and "many_1499" not in config and "many_1499" not in caplog.text
    assert "left out" in caplog.text


BROKEN = """
from collections.abc import Mapping
class Broken(Mapping):
    def __getitem__(self, name): raise RuntimeError("planned")
    def __iter__(self): return iter(["lr"])
    def __len__(self): return 1
class Config:
    def to_dict(self): raise RuntimeError("planned")
"""


@pytest.mark.parametrize(
    ("held", "what"),
    [
        ("config = Broken()", "reading `config`"),
        ("import argparse\nargparse.ArgumentParser().parse_args().__dict__['inner'] = Broken()", "arguments"),
        ("model.config = Config()", "the model's configuration"),
    ],
)
def test_unreadable_settings_are_counted_and_others_are_kept(
    held: str, what: str, server: WireServer, here: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{TRAIN}{BROKEN}batch_size = 8\n{held}\ntrain()\n")
    assert here(script) == 0
    assert f"{what} failed (RuntimeError: planned)" in caplog.text
    assert server.run.finish["errors"] == 1 and server.run.registration["config"]["batch_size"] == 8


def test_restores_everything_it_patched(server: WireServer, tmp_path: Path) -> None:
    """In the process that has called it: a script's end puts everything back, also one that fails."""
    script = tmp_path / "train.py"
    script.write_text(
        f"{TRAIN}\nimport argparse\nargparse.ArgumentParser().parse_args()\ntrain()\nraise SystemExit(3)"
    )
    program = f"""
import argparse, sys, torch
from fp8scope.cli import main as cli
def replaced():
    parser = argparse.ArgumentParser
    return (parser.parse_known_args, parser.parse_known_intermixed_args, torch.optim.Optimizer.__init__,
        torch.compile, torch.autograd.backward, list(sys.meta_path))
before = replaced()
for script in ({str(script)!r}, {str(script)!r}):
    try:
        cli.main(["run", script])
    except SystemExit as error:
        print(error.code)
    from fp8scope.process.open_runs import live_runs
    for run in list(live_runs): run.finish()
    print(replaced() == before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **own_settings(server)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["3", "True", "3", "True"], done.stderr


def test_restores_everything_if_the_script_imports_no_torch(here: Launch, tmp_path: Path) -> None:
    parse, make, finders = argparse.ArgumentParser.parse_known_args, Optimizer.__init__, list(sys.meta_path)
    script = tmp_path / "train.py"
    script.write_text("print('no training')")
    assert here(script) == 0
    assert argparse.ArgumentParser.parse_known_args is parse and list(sys.meta_path) == finders
    assert Optimizer.__init__ is make and torch.compile.__module__ == "torch"


def test_restores_everything_beside_a_thread_that_is_not_the_scripts(here: Launch, tmp_path: Path) -> None:
    parse, over = argparse.ArgumentParser.parse_known_args, threading.Event()
    thread = threading.Thread(target=over.wait, args=(60,), daemon=False)
    thread.start()
    script = tmp_path / "train.py"
    script.write_text("print('no training')")
    try:
        assert here(script) == 0
        assert argparse.ArgumentParser.parse_known_args is parse
    finally:
        over.set()
        thread.join()
