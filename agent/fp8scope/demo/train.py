"""One training run of the demo, in a separate process: `python -m fp8scope.demo.train --help`.

Prints one JSON object per line: `started`, `progress`, `evaluated`, `alert` and `finished`.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import fp8scope
from fp8scope.demo import arithmetic, data, fault
from fp8scope.demo.model import ByteGpt, Shape
from fp8scope_kernels import DelayedScaling, Recipe, convert

MAX_STEPS = 100_000
PROGRESS_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The training of the demo. `precision` is `bf16` or `fp8`; the fault begins at step `fault_at`."""

    name: str
    precision: str = "bf16"
    group: str = ""
    baseline: str = ""
    seed: int = 1
    data_seed: int = 0
    steps: int = 600
    fault_at: int | None = None
    batch: int = 16
    learning_rate: float = 4e-3
    warm_up: int = 20
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    evaluations: int = 4
    windows: int = 256
    shape: Shape = field(default_factory=lambda: Shape(width=64, earlier=3))

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate: linear warm-up, then cosine decay to a tenth. Steps count from 1."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(step / self.steps, 1.0)))
        return self.learning_rate * min(1.0, step / self.warm_up) * (0.1 + 0.9 * cosine)

    def evaluates_after(self, step: int) -> bool:
        """Return whether to score held-out text after this step.

        True `evaluations` times, the last at the end.
        """
        return step * self.evaluations // self.steps > (step - 1) * self.evaluations // self.steps


class DemoTrainer:
    """The model, its optimizer, and one step of training at a time.

    `seed` affects only the initial weights: runs of one `data_seed` see the same batches in the same order.

    Args:
        recipe: of the FP8 layers, by default that of the plan's precision.
        make_model: makes the model from the plan's shape, for another than the demo's.
    """

    def __init__(
        self, plan: Plan, recipe: Recipe | None = None, make_model: Callable[[Shape], ByteGpt] = ByteGpt
    ) -> None:
        self.plan = plan
        self.corpus = data.load(plan.shape.context, plan.windows, plan.data_seed)
        torch.manual_seed(plan.seed)
        self.model = make_model(plan.shape)
        if recipe is None and plan.precision == "fp8":
            recipe = DelayedScaling()
        if recipe is not None:
            convert(self.model, recipe)
        # Only now: `convert` leaves the layers alone that are prepared for BF16.
        arithmetic.prepare(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=plan.betas, weight_decay=plan.weight_decay
        )
        self.loss_scale = 1.0

    def train(self, step: int) -> dict[str, Tensor | float]:
        """Make one optimizer step and return the values to log."""
        if step == self.plan.fault_at:
            fault.freeze_gradient_scales(self.model)
            self.loss_scale = fault.LOSS_SCALE
        learning_rate = self.plan.learning_rate_at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        text = self.corpus.batch(step, self.plan.batch)
        loss = functional.cross_entropy(self.logits(text).flatten(0, 1), text[:, 1:].flatten())
        self.optimizer.zero_grad()
        torch.autograd.backward(loss * self.loss_scale)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.loss_scale
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.clip)
        self.optimizer.step()
        return {"loss": loss.detach(), "grad_norm": norm, "learning_rate": learning_rate}

    @torch.no_grad()
    def evaluate(self) -> tuple[Tensor, Tensor]:
        """Score the held-out windows. Returns two tensors, float32 [windows] each.

        The first is 1 where the most likely last byte is correct, else 0. The second is the mean negative
        log-likelihood of the window's bytes, in nats.
        """
        self.model.eval()
        correct, nll = [], []
        for text in torch.split(self.corpus.windows, 64):
            logits = self.logits(text)
            correct.append((logits[:, -1].argmax(-1) == text[:, -1]).float())
            losses = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction="none")
            nll.append(losses.view(len(text), -1).mean(1))
        self.model.train()
        return torch.cat(correct), torch.cat(nll)

    def logits(self, text: Tensor) -> Tensor:
        """int64 [windows, context + 1] -> float32 [windows, context, 256], one row per next byte."""
        with arithmetic.bf16():
            logits: Tensor = self.model(text[:, :-1])
        return logits.float()


def run(plan: Plan) -> int:
    """Train as planned and record to the dashboard given by FP8SCOPE_URL and FP8SCOPE_TOKEN.

    Returns the exit status: 0 if the server has received everything.
    """
    trainer = DemoTrainer(plan)
    config = {**asdict(plan), "parameters": sum(p.numel() for p in trainer.model.parameters())}
    with fp8scope.init(
        name=plan.name,
        config={**config, "arithmetic": arithmetic.describe()},
        group=plan.group,
        baseline=plan.baseline,
        seed=plan.seed,
        precision=plan.precision,
        total_steps=plan.steps,
        tags=["demo"],
    ) as recorded:
        recorded.watch(trainer.model)
        recorded.on_alert(lambda alert: emit("alert", **asdict(alert)))
        emit("started", run=recorded.id, steps=plan.steps)
        losses, step_times = _train(plan, trainer, recorded)
    report = recorded.finish()
    last = losses[-max(1, plan.steps // 10) :]
    emit(
        "finished",
        complete=report.complete,
        rows_sent=report.rows_sent,
        points_sent=report.points_sent,
        rows_dropped=report.rows_dropped,
        final_loss=sum(last) / len(last),
        seconds=step_times[-1] - step_times[0],
        step_times=step_times,
    )
    return 0 if report.complete else 1


def _train(plan: Plan, trainer: DemoTrainer, recorded: fp8scope.Run) -> tuple[list[float], list[float]]:
    """Train all steps. Returns the loss of each and the time when it ended, in seconds since 1970."""
    losses, step_times = [], []
    emitted_at = 0.0
    for number in range(1, plan.steps + 1):
        began = time.perf_counter()
        with recorded.step(tokens=plan.batch * plan.shape.context) as step:
            logged = trainer.train(number)
            step.log(logged)
        now = time.perf_counter()
        losses.append(float(logged["loss"]))
        step_times.append(round(time.time(), 3))
        if plan.evaluates_after(number):
            _evaluate(trainer, recorded)
            emit("evaluated", step=number)
        if now - emitted_at > PROGRESS_SECONDS or number == plan.steps:
            emitted_at = now
            speed = plan.batch * plan.shape.context / (now - began)
            emit("progress", step=number, loss=losses[-1], tokens_per_second=speed)
    return losses, step_times


def _evaluate(trainer: DemoTrainer, recorded: fp8scope.Run) -> None:
    correct, nll = trainer.evaluate()
    labels: dict[str, Any] = {"item_ids": trainer.corpus.items, "clusters": trainer.corpus.clusters}
    recorded.log_eval("held-out text", "next-byte accuracy", correct, kind="proportion", **labels)
    recorded.log_eval("held-out text", "nll", nll, kind="mean", higher_is_better=False, **labels)


def emit(event: str, **values: Any) -> None:
    """Print one line of JSON. NaN and infinities become null, since JSON has neither."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    print(json.dumps({"event": event, **plain}), flush=True)


def parse(argv: Sequence[str]) -> Plan:
    """Parse a command line to a plan. Exits with a message if an argument is invalid."""
    parser = argparse.ArgumentParser(prog="python -m fp8scope.demo.train", description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--group", default="")
    parser.add_argument("--baseline", default="")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--fault-at", type=int, help="the step at which the gradients' scales go stale")
    options = parser.parse_args(argv)
    if not 8 <= options.steps <= MAX_STEPS:
        parser.error(f"--steps must be from 8 to {MAX_STEPS}, got {options.steps}")
    if options.fault_at is not None and options.precision != "fp8":
        parser.error("--fault-at needs --precision fp8: BF16 has no scales")
    if options.fault_at is not None and not 2 <= options.fault_at <= options.steps:
        parser.error(f"--fault-at must be from 2 to {options.steps}, got {options.fault_at}")
    return Plan(**vars(options))


def main(argv: Sequence[str]) -> int:
    """Train one run on OMP_NUM_THREADS threads, by default one."""
    plan = parse(argv)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    return run(plan)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
