"""Small real trainings with one injected fault each, for diagnosis.py.

Every training is the demo's byte-level GPT on the CPU, with fp8scope's own FP8 layers or those of torchao,
and the agent, which sends to the dashboard at FP8SCOPE_URL. A fault begins at one step. Faults of the
training itself (`learning rate`, `data`) are injected into the BF16 arm too.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

import fp8scope
from fp8scope.demo.fault import NEVER
from fp8scope.demo.model import Shape
from fp8scope.demo.train import DemoTrainer, Plan
from fp8scope_kernels import (
    MXFP8,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Linear,
    Recipe,
    RowwiseScaling,
    ScalingState,
    fp8_layers,
)

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(),
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
    "mxfp8": MXFP8(),
}
IN_BOTH_ARMS = ("learning_rate", "data", "lasting_data")
TORCHAO = "torchao"
LAG = 40
"""Steps by which stale scales lag."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training. `fault` is empty for a healthy one; `recipe` is empty for BF16.

    The recipe `torchao` is torchao's layers with dynamic scaling per tensor. Their products are emulated.
    """

    fault: str
    recipe: str = "delayed"
    seed: int = 1
    steps: int = 240
    at: int = 120
    shape: Shape = field(default_factory=lambda: Shape(layers=2, width=64, heads=4, context=32))
    batch: int = 8
    learning_rate: float = 4e-3
    strength: int = 0

    @property
    def group(self) -> str:
        """The group of the BF16 arm that this case is compared with."""
        in_bf16 = (*IN_BOTH_ARMS, "baseline")
        fault = f"{self.fault} {self.at} {self.strength}" if self.fault in in_bf16 else "healthy"
        shape = f"{self.shape.layers}x{self.shape.width}"
        return f"bf16 {fault} {shape} {self.learning_rate:g} {self.steps} {self.seed} {self.batch}"

    @property
    def bf16(self) -> Case:
        """The BF16 arm: the same training without FP8, with the fault only if it is the training's own."""
        in_bf16 = (*IN_BOTH_ARMS, "baseline")
        return replace(self, recipe="", fault=self.fault if self.fault in in_bf16 else "")


class Faulty(DemoTrainer):
    """A trainer that injects the fault of its case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        learning_rate = case.learning_rate
        super().__init__(
            Plan(
                name=case.fault or "healthy",
                seed=case.seed,
                steps=case.steps,
                batch=case.batch,
                windows=128,
                shape=case.shape,
                learning_rate=learning_rate,
            ),
            self._recipe() if case.recipe in RECIPES else None,
        )
        if case.recipe == TORCHAO:
            convert_to_float8_training(self.model, config=Float8LinearConfig(emulate=True))
        self.past: dict[str, list[Tensor]] = {}

    def _recipe(self) -> Recipe:
        recipe = RECIPES[self.case.recipe]
        if self.case.fault == "margin":
            assert isinstance(recipe, DelayedScaling | CurrentScaling)
            return replace(recipe, margin=-(self.case.strength or 3))
        if self.case.fault == "twin":
            # From the first step on, without harm: what breaks is the optimizer's state, later.
            assert isinstance(recipe, DelayedScaling | CurrentScaling)
            return replace(recipe, margin=-1)
        if self.case.fault == "underflow" and isinstance(recipe, DelayedScaling | CurrentScaling):
            return replace(recipe, fp8_format="E4M3")
        return recipe

    def train(self, step: int) -> dict[str, Tensor | float]:
        begun = step >= self.case.at
        if begun and self.case.recipe:
            self._inject(step)
        if self.case.fault == "stale" and self.case.recipe:
            self._remember()
        return self._train_step(step, begun)

    def _train_step(self, step: int, begun: bool) -> dict[str, Tensor | float]:
        case = self.case
        rate = self.plan.learning_rate_at(step)
        if case.fault == "learning_rate":
            rate = rate * (case.strength or 40)
        if case.fault == "baseline" and not case.recipe and begun:
            # The BF16 arm alone diverges.
            rate = 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        text = self.corpus.batch(step, case.batch)
        if case.fault == "data" and case.at <= step < case.at + (case.strength or 6):
            text = torch.randint(0, 256, text.shape, generator=torch.Generator().manual_seed(step))
        if case.fault == "lasting_data" and begun:
            text = torch.randint(0, 256, text.shape, generator=torch.Generator().manual_seed(step))
        loss = functional.cross_entropy(self.logits(text).flatten(0, 1), text[:, 1:].flatten())
        if case.fault == "loss_code" and begun:
            loss = loss + (loss.detach() - loss.detach()).log().abs() * 0.0
        factor = 1.0
        if case.fault == "loss_scale" and begun and case.recipe:
            factor = 2.0 ** (case.strength or 12)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss * factor)
        # The wrong loss scale is not divided out of the gradients again.
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.plan.clip if factor == 1.0 else 1e9
        )
        self.optimizer.step()
        return {"loss": loss.detach(), "grad_norm": norm, "learning_rate": rate}

    def _inject(self, step: int) -> None:
        case, layers = self.case, dict(fp8_layers(self.model))
        states = [
            layer.state_of(role) for layer in layers.values() for role in ("input", "weight", "grad_output")
        ]
        if case.fault in ("optimizer", "twin") and step == case.at:
            for moments in self.optimizer.state.values():
                moments["exp_avg_sq"].mul_(1e-6)
        elif case.fault == "weights":
            with torch.no_grad():
                for layer in layers.values():
                    layer.weight.mul_(1.05)
        elif case.fault == "frozen" and step == case.at:
            for state in states:
                _freeze(state)
        elif case.fault == "stale":
            for name, layer in layers.items():
                for role in ("input", "weight", "grad_output"):
                    state = layer.state_of(role)
                    past = self.past.get(f"{name}.{role}", [])
                    if isinstance(state.recipe, DelayedScaling) and len(past) >= LAG:
                        state.recipe = replace(state.recipe, interval=NEVER)
                        state.scale.copy_(past[-LAG])
        elif case.fault == "bad_layer":
            theirs = {name: m for name, m in self.model.named_modules() if isinstance(m, Float8Linear)}
            known: dict[str, nn.Module] = {**layers, **theirs}
            path = sorted(known)[case.seed % len(known)]
            if step == case.at:
                _force(known[path], case.strength or 8)
        elif case.fault == "underflow" and step == case.at:
            for layer in layers.values():
                state = layer.state_of("grad_output")
                if isinstance(state.recipe, DelayedScaling | CurrentScaling):
                    state.recipe = replace(state.recipe, margin=case.strength or 14)

    def _remember(self) -> None:
        """Keep the scales that each tensor should have had, from its amax of each step."""
        for name, layer in fp8_layers(self.model):
            for role in ("input", "weight", "grad_output"):
                state = layer.state_of(role)
                if isinstance(state.recipe, DelayedScaling):
                    amax = state.amax_history.amax()
                    top = state.format.max
                    self.past.setdefault(f"{name}.{role}", []).append((top / amax.clamp_min(1e-30)).clone())


def _freeze(state: ScalingState) -> None:
    """Keep the present scale for good."""
    if isinstance(state.recipe, DelayedScaling):
        state.recipe = replace(state.recipe, interval=NEVER)
    elif isinstance(state.recipe, CurrentScaling):
        scale = state.scale.clone()

        def frozen(amax: Tensor, *, update: bool = True) -> Tensor:
            return scale

        state.next_scale = frozen  # type: ignore[method-assign]


def _force(layer: nn.Module, power: int) -> None:
    """Spoil one layer by a power of two: the scales of its input and gradient, or else its weight."""
    states: tuple[ScalingState, ...] = ()
    if isinstance(layer, Fp8Linear):
        states = (layer.state_of("input"), layer.state_of("grad_output"))
    has_margin = False
    for state in states:
        if isinstance(state.recipe, DelayedScaling | CurrentScaling):
            state.recipe = replace(state.recipe, margin=-power)
            has_margin = True
    if not has_margin:
        with torch.no_grad():
            layer.get_parameter("weight").mul_(2.0**power)


def train(case: Case, run_name: str = "") -> str:
    """Train one case, recorded; returns the run's id."""
    trainer = Faulty(case)
    options: dict[str, Any] = {
        "name": run_name or f"{case.fault or 'healthy'} {case.recipe or 'bf16'} {case.seed}",
        "group": case.group if not case.recipe else "",
        "baseline": case.group if case.recipe else "",
        "seed": case.seed,
        "precision": "fp8" if case.recipe else "bf16",
        "total_steps": case.steps,
    }
    run = fp8scope.init(**options)
    if case.fault != "unwatched":
        run.watch(trainer.model, trainer.optimizer, overhead=None, every=50)
    begin = 1
    if case.fault == "reset" and case.recipe:
        _steps(run, trainer, 1, case.at)
        state = run.state_dict()
        run.finish()
        for layer_name, layer in fp8_layers(trainer.model):
            for role in ("input", "weight", "grad_output"):
                layer.state_of(role).amax_history.zero_()
            del layer_name
        run = fp8scope.init(**options, resume=state)
        run.watch(trainer.model, trainer.optimizer, overhead=None, every=50)
        begin = case.at
    _steps(run, trainer, begin, case.steps + 1)
    _evaluate(run, trainer, case)
    report = run.finish()
    if not report.complete:
        logging.getLogger("fp8scope").warning("run %s is incomplete", run.id)
    return run.id


def _steps(run: fp8scope.Run, trainer: Faulty, begin: int, end: int) -> None:
    for number in range(begin, end):
        with run.step(tokens=trainer.case.batch * trainer.case.shape.context) as step:
            step.log(trainer.train(number))


def _evaluate(run: fp8scope.Run, trainer: Faulty, case: Case) -> None:
    correct, nll = trainer.evaluate()
    precision = "fp8" if case.recipe else "bf16"
    if case.fault == "evaluation" and case.recipe:
        precision = "fp16"
    labels: dict[str, Any] = {"item_ids": trainer.corpus.items, "precision": precision}
    run.log_eval("held-out text", "accuracy", correct, kind="proportion", **labels)
    run.log_eval("held-out text", "nll", nll, kind="mean", higher_is_better=False, **labels)
