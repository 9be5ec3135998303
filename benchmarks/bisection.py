"""Whether bisection finds a broken matrix product. Prints one JSON line.

    python benchmarks/bisection.py [--placements 20] [--steps 12] [--seed 0]

Trains the demo's byte-level GPT in FP8 (delayed scaling) on the CPU for a few steps. Then each trial
multiplies the gradient scale of one random layer by a random power of two: too large, so that gradients
saturate, or too small, so that they vanish. `run.bisect` ranks all products of the model on one batch.

    found          trials whose rank 1 is a product that uses the wrong scale (the layer's dgrad or wgrad)
    of             trials
    margin         smallest ratio of rank 1's error to the worst error of any other layer
    healthy        relative error of the worst product without a fault
    healthy_total  relative error of all products together without a fault
    products       products ranked, of `layers` layers
    seconds        of one ranking, the median
"""

import argparse
import json
import random
import statistics
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

import fp8scope
from fp8scope.control.bisection import Bisection
from fp8scope.demo.fault import NEVER
from fp8scope.demo.train import DemoTrainer, Plan
from fp8scope_kernels import DelayedScaling, Fp8Linear, fp8_layers

SATURATING = (6, 20)
"""Powers of two by which a scale is made too large."""
VANISHING = (28, 40)
"""Powers of two by which a scale is made too small. E5M2 spans 2^31, so smaller ones would do no harm."""


def force(layer: Fp8Linear, factor: float) -> None:
    """Multiply the scale of the layer's gradient by `factor` and stop its updates."""
    state = layer.state_of("grad_output")
    assert isinstance(state.recipe, DelayedScaling)
    state.recipe = replace(state.recipe, interval=NEVER)
    state.scale.mul_(factor)


def release(layer: Fp8Linear, recipe: DelayedScaling, scale: Tensor) -> None:
    """Undo `force`."""
    state = layer.state_of("grad_output")
    state.recipe = recipe
    state.scale.copy_(scale)


def ranking(run: fp8scope.Run, trainer: DemoTrainer, step: int) -> Bisection:
    """Bisect one batch."""

    def loss(text: Tensor) -> Tensor:
        logits = trainer.logits(text)
        return functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    return run.bisect(trainer.corpus.batch(step, trainer.plan.batch), loss, trainer.model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--placements", type=int, default=20)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chance = random.Random(arguments.seed)
    trainer = DemoTrainer(Plan(name="bisect", precision="fp8", steps=600))
    for step in range(1, arguments.steps + 1):
        trainer.train(step)
    run = fp8scope.init(name="bisect", mode="disabled")
    layers = dict(fp8_layers(trainer.model))
    healthy = ranking(run, trainer, arguments.steps + 1)
    hits, margins, seconds = 0, [], [healthy.seconds]
    for placement in range(arguments.placements):
        path = chance.choice(sorted(layers))
        saturates = chance.random() < 0.5
        power = chance.randint(*SATURATING) if saturates else -chance.randint(*VANISHING)
        state = layers[path].state_of("grad_output")
        recipe, scale = state.recipe, state.scale.clone()
        assert isinstance(recipe, DelayedScaling)
        force(layers[path], 2.0**power)
        ranked = ranking(run, trainer, arguments.steps + 1 + placement)
        release(layers[path], recipe, scale)
        hits += ranked.worst.layer == path and ranked.worst.product in ("dgrad", "wgrad")
        others = max(product.relative_error for product in ranked.products if product.layer != path)
        margins.append(ranked.worst.relative_error / others if ranked.worst.layer == path else 0.0)
        seconds.append(ranked.seconds)
    line = {
        "benchmark": "bisect",
        "found": hits,
        "of": arguments.placements,
        "margin": round(min(margins), 2),
        "healthy": round(healthy.worst.relative_error, 5),
        "healthy_total": round(healthy.total.relative_error, 5),
        "products": len(healthy.products),
        "layers": len(layers),
        "seconds": round(statistics.median(seconds), 2),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
