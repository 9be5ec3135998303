"""Every example runs, a few steps of it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState
from agent.helpers.launching import Launch, here, own_settings
from agent.helpers.stored_run import StoredRun
from agent.helpers.wire_server import WireServer
from helpers.examples_folder import EXAMPLES, example

__all__ = ["here"]

STEPS = 4


def run_example(
    name: str, server: WireServer, monkeypatch: pytest.MonkeyPatch, *arguments: str, steps: int = STEPS
) -> StoredRun:
    for key, value in own_settings(server).items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--steps", str(steps), *arguments])
    example(name).main()
    from fp8scope.process.open_runs import live_runs

    for run in list(live_runs):
        run.finish()
    stored = server.run
    assert stored.steps == list(range(1, steps + 1)) and stored.finish["state"] == "finished"
    assert stored.finish["errors"] == 0 and None not in stored.scalars("loss")
    return stored


def test_it_works(server: WireServer, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = run_example("attach_two_lines", server, monkeypatch, steps=10)
    assert stored.registration["precision"] == "fp8"
    assert [value is not None for value in stored.scalars("eval/loss")] == [False] * 9 + [True]
    losses = [value for value in stored.scalars("loss") if value is not None]
    # Not halved by the two passes of a step.
    assert losses[0] > 5 > losses[-1]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_the_explicit_api(precision: str, server: WireServer, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = run_example("train_byte_gpt", server, monkeypatch, "--precision", precision)
    assert stored.registration["precision"] == precision and len(stored.evaluations) == 1


def test_filters_and_a_loss_in_blocks(server: WireServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained in FP8, with statistics of the filters' convolutions."""
    stored = run_example("localized_filtering", server, monkeypatch, steps=20)
    losses = [value for value in stored.scalars("loss") if value is not None]
    assert losses[0] > 5 > losses[-1]
    catalogue = {tensor["name"]: tensor for tensor in next(iter(stored.catalogues.values()))}
    narrow = catalogue["blocks.0.attention.filter.narrow.pair.input"]
    assert narrow["format"] == "E4M3" and narrow["shape"] == [-1, 192]


@pytest.mark.parametrize("name", ["transformers_trainer", "lightning_module"])
def test_the_callbacks(name: str, server: WireServer, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = run_example(name, server, monkeypatch, "--fp8")
    assert stored.registration["precision"] == "fp8" and stored.scalars("tokens")[0]


def test_accelerate(server: WireServer, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        stored = run_example("accelerate_loop", server, monkeypatch)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()
    assert None not in stored.scalars("largest_error")


def test_a_script_without_a_line(server: WireServer, here: Launch) -> None:
    assert here("--convert", "delayed", EXAMPLES / "unmodified.py", "--steps", str(STEPS)) == 0
    assert server.run.steps == [1, 2, 3, 4] and server.run.registration["precision"] == "fp8"
    assert server.run.scalars("tokens") == [8 * 32 * step for step in range(1, 5)]


def test_jax_needs_only_what_fp8scope_has_without_torch() -> None:
    """The tests do not install JAX, with which `jax_loop` trains."""
    text = (EXAMPLES / "jax_loop.py").read_text()
    names = {
        node.attr
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "fp8scope"
    }
    assert names == {"init"} and len(text.splitlines()) <= 150
    script = (
        "import sys, fp8scope\n"
        "sys.modules['torch'] = None\n"
        "run = fp8scope.init(name='no torch', mode='offline', seed=0, total_steps=1, precision='fp32')\n"
        "with run.step(tokens=2) as step:\n"
        "    step.log({'amax/a.weight': 1.0}, loss=2.0)\n"
        "report = run.finish()\n"
        "print(report.errors, report.rows_dropped)\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["0", "0"], done.stderr


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text()
    assert all(path.stem in text for path in EXAMPLES.glob("*.py"))
