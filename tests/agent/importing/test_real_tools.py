"""Files that W&B and MLflow themselves write, read to the last value.

The layouts of the other tools were checked by hand with their own writers; see docs/importing.md.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from agent.helpers.imported import read

WANDB = """
import wandb

config = {"lr": 1e-3, "seed": 7, "model": {"depth": 2}}
where = {"project": "p", "entity": "e", "mode": "offline", "dir": "."}
run = wandb.init(**where, name="gpt fp8", config=config, tags=["a"], group="g")
for step in range(40):
    values = {"train/loss": 3 / (step + 1), "nested": {"a": step, "b": {"c": 0.5}}, "text": "hello"}
    values["odd"] = float("nan") if step == 3 else float("-inf") if step == 4 else 10.0**-step
    if step % 10 == 0:
        values["histogram"] = wandb.Histogram([1, 2, 3])
    run.log(values, step=3 * step)
run.config.update({"late": [1, 2]})
run.summary["best"] = 0.25
run.finish(exit_code=EXIT)
"""
MLFLOW = """
import os

os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
import mlflow

mlflow.set_tracking_uri("file:./mlruns")
mlflow.set_experiment("exp")
with mlflow.start_run(run_name="gpt bf16"):
    mlflow.log_params({"lr": 1e-3, "seed": 4, "name": "adam"})
    mlflow.set_tag("team", "x")
    for step in range(40):
        odd = float("nan") if step == 3 else float("-inf") if step == 4 else 10.0**-step
        mlflow.log_metrics({"train/loss": 3 / (step + 1), "odd": odd}, step=3 * step)
"""
ODD = {3 * step: 10.0**-step for step in range(40)} | {9: math.nan, 12: -math.inf}


def run_script(text: str, folder: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", text], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("code", [0, 3])
def test_it_works(code: int, tmp_path: Path) -> None:
    run_script(WANDB.replace("EXIT", str(code)), tmp_path)
    (run,) = read(tmp_path)
    assert run.series("train/loss") == run.series("loss") == {3 * step: 3 / (step + 1) for step in range(40)}
    assert repr(run.series("odd")) == repr(ODD)
    assert run.series("nested.a") == {3 * step: step for step in range(40)}
    assert set(run.series("nested.b.c").values()) == {0.5}
    assert not any(name.startswith(("histogram", "text", "_")) for name in run.names)
    described = run.run
    assert (described.name, described.group, described.seed, described.tags) == ("gpt fp8", "g", 7, ["a"])
    assert described.config["model"] == {"depth": 2} and described.config["late"] == [1, 2]
    assert described.summary["best"] == 0.25 and "train/loss" not in described.summary
    assert described.state == ("failed" if code else "finished") and bool(described.failure) == bool(code)
    assert json.loads(described.key)[:2] == ["e", "p"] and described.created_at


def test_a_run_that_was_killed_is_read_to_its_last_record(tmp_path: Path) -> None:
    run_script(WANDB.replace("EXIT", "0"), tmp_path)
    (path,) = tmp_path.rglob("*.wandb")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    (run,) = read(path)
    assert run.run.state == "running" and 5 < len(run.series("train/loss")) < 40
    assert any("ends inside of a record" in note for note in run.run.notes)


def test_the_file_store_of_mlflow(tmp_path: Path) -> None:
    run_script(MLFLOW, tmp_path)
    (run,) = read(tmp_path)
    assert run.series("train/loss") == run.series("loss") == {3 * step: 3 / (step + 1) for step in range(40)}
    assert repr(run.series("odd")) == repr(ODD)
    described = run.run
    assert (described.name, described.state, described.seed) == ("gpt bf16", "finished", 4)
    assert described.config == {"lr": 1e-3, "seed": 4, "name": "adam"} and described.tags == ["team=x"]
    assert described.environment["experiment"] == "exp"
    assert described.created_at and described.finished_at and described.created_at <= described.finished_at
