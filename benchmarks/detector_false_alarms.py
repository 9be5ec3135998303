"""What the default alert rules report on real small trainings. Prints a JSON line per training.

    python benchmarks/detector_false_alarms.py [--steps N] [--seeds N] [--width N] [--recipes NAME ...]
        [--seconds S]

Trains the demo's model on its text, watched by the agent, which sends to a sink in this process. The rules of
the tensors and scalars then read the rows as the server would. The trainings with a recipe are healthy, so
that everything that is reported of them is a false alarm. `fault` is the demo's: from half of the steps on
the scales of all gradients are frozen and the gradients 1,024 times as large.

Seeds go round the recipes; no training begins once `--seconds` are over.

Fields: `recipe`, `seed`, `steps`, `tensors`; `alarms`, by rule, the onset steps of the alarms that opened;
`last_loss`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections import defaultdict
from http.server import ThreadingHTTPServer
from typing import Any

import numpy as np
from agent_sink import Handler
from detector_speed import default_rules

import fp8scope
from fp8scope.demo.model import Shape
from fp8scope.demo.train import DemoTrainer, Plan
from fp8scope_dashboard.alerts.detection import streams
from fp8scope_dashboard.alerts.detectors import State, TensorFacts
from fp8scope_dashboard.diagnosis.tensors import LARGEST
from fp8scope_dashboard.telemetry.codec import ChunkData, decode
from fp8scope_dashboard.telemetry.replay import in_order
from fp8scope_kernels import MXFP8, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling

RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    "delayed": DelayedScaling(),
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "mxfp8": MXFP8(),
    "fault": DelayedScaling(),
}


class Keeper(Handler):
    """Keeps the bodies of batches and the tensors."""

    batches: list[bytes] = []
    tensors: list[dict[str, Any]] = []

    def _body(self) -> bytes:
        body = super()._body()
        kind = self.path.partition("?")[0].rsplit("/", 1)[1]
        if kind == "batches":
            self.batches.append(body)
        elif kind == "tensors":
            self.tensors.extend(json.loads(body)["tensors"])
        return body


def train(recipe: str, seed: int, steps: int, width: int) -> tuple[ChunkData, TensorFacts]:
    """The rows of one training, in order, and what is known of its tensors."""
    Keeper.batches, Keeper.tensors = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Keeper)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    precision = "bf16" if recipe == "bf16" else "fp8"
    shape = Shape(width=width)
    plan = Plan(name=recipe, precision=precision, seed=seed, steps=steps, batch=8, shape=shape)
    if recipe == "fault":
        plan = Plan(**{**plan.__dict__, "fault_at": steps // 2})
    trainer = DemoTrainer(plan, RECIPES[recipe])
    url = f"http://127.0.0.1:{server.server_address[1]}"
    with (
        tempfile.TemporaryDirectory() as folder,
        fp8scope.init(name=recipe, url=url, token="none", directory=folder, precision=precision) as run,
    ):
        run.watch(trainer.model, trainer.optimizer)
        for number in range(1, steps + 1):
            with run.step(tokens=plan.batch * shape.context) as step:
                step.log(trainer.train(number))
        run.finish()
    server.shutdown()
    data = in_order([_with_seq(body, i) for i, body in enumerate(Keeper.batches)])
    n = len(Keeper.tensors)
    blocks = recipe in ("rowwise", "mxfp8")
    patience = 4 * 16 + 64 if recipe in ("delayed", "fault") else 1_100
    largest = np.array([LARGEST.get(tensor["format"].lower(), np.nan) for tensor in Keeper.tensors])
    names = [str(tensor["name"]) for tensor in Keeper.tensors]
    return data, TensorFacts(names, largest, np.zeros(n), np.full(n, patience), np.full(n, not blocks))


def _with_seq(body: bytes, seq: int) -> ChunkData:
    data = decode(body)
    return ChunkData(
        steps=data.steps,
        times=data.times,
        scalars=data.scalars,
        logged=data.logged,
        statistics=data.statistics,
        seqs=np.full(len(data), seq, np.int64),
    )


def judge(data: ChunkData, facts: TensorFacts) -> dict[str, list[int]]:
    """The onset steps of the alarms, by rule."""
    state: State = {}
    alarms: dict[str, list[int]] = defaultdict(list)
    for rule, finding in streams.detect(default_rules(), state, data, facts, leads=True):
        if finding.opened and not finding.update:
            alarms[rule.kind].append(finding.onset_step)
    return dict(alarms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    arguments = parser.parse_args()
    os.environ["FP8SCOPE_LOG_LEVEL"] = "error"
    began = time.monotonic()
    for seed in range(1, arguments.seeds + 1):
        for recipe in arguments.recipes:
            if time.monotonic() - began > arguments.seconds:
                return
            data, facts = train(recipe, seed, arguments.steps, arguments.width)
            line = {
                "recipe": recipe,
                "seed": seed,
                "steps": len(data),
                "tensors": len(facts.names),
                "alarms": judge(data, facts),
                "last_loss": round(float(data.scalars["loss"][-50:].mean()), 3),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
