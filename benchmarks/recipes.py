"""Compares the loss of training in FP8 with BF16's, for each recipe.

    python benchmarks/recipes.py [--steps 300] [--seeds 3] [--margin 0.01]

Trains the demo's byte-level GPT on the CPU: `--seeds` runs in BF16, then as many with each recipe, from the
same initial weights and on the same batches. Prints one JSON line per recipe:

    delta        relative difference of the mean loss of the last tenth of the steps to that of the BF16 run
                 with the same seed; mean over the seeds
    delta_range  the smallest and the largest of these differences
    tolerance    the larger of the margin and the difference that two seeds rarely exceed, as on a run's page
    within       how many runs are within the tolerance of the BF16 runs' mean
"""

import argparse
import json
import statistics

import numpy as np
import torch

from fp8scope.demo.train import DemoTrainer, Plan
from fp8scope_dashboard.analysis.losses.seeds import PUBLIC, spread_of
from fp8scope_kernels import (
    MXFP8,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipe,
    RowwiseScaling,
    fp8_layers,
)

RECIPES: tuple[Recipe, ...] = (
    DelayedScaling(),
    CurrentScaling(),
    RowwiseScaling(),
    BlockScaling(),
    MXFP8(),
)


def final_loss(recipe: Recipe | None, seed: int, steps: int) -> float:
    """Train once and return the mean loss of the last tenth of the steps. `recipe=None` is BF16."""
    trainer = DemoTrainer(Plan(name="recipes", seed=seed, steps=steps), recipe)
    if recipe is not None and not list(fp8_layers(trainer.model)):
        raise RuntimeError(f"No layer was converted to {type(recipe).__name__}.")
    losses = [float(trainer.train(step)["loss"]) for step in range(1, steps + 1)]
    return statistics.fmean(losses[-max(1, steps // 10) :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--margin", type=float, default=0.01)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(1, arguments.seeds + 1)
    baseline = np.array([final_loss(None, seed, arguments.steps) for seed in seeds])
    for recipe in RECIPES:
        losses = np.array([final_loss(recipe, seed, arguments.steps) for seed in seeds])
        spread = spread_of([baseline / baseline.mean()], PUBLIC, seeds=len(baseline))
        tolerance = max(arguments.margin, spread.quantile(0.05) * spread.error(1, len(baseline)))
        deltas = losses / baseline - 1
        line = {
            "benchmark": "recipes",
            "recipe": type(recipe).__name__,
            "steps": arguments.steps,
            "runs": len(losses),
            "loss": round(float(losses.mean()), 4),
            "bf16_loss": round(float(baseline.mean()), 4),
            "delta": round(float(deltas.mean()), 5),
            "delta_range": [round(float(deltas.min()), 5), round(float(deltas.max()), 5)],
            "tolerance": round(tolerance, 5),
            "within": int((abs(losses / baseline.mean() - 1) <= tolerance).sum()),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
