"""Compares the loss of training in each recipe with BF16's, by the dashboard's own verdict.

    python benchmarks/recipes.py [--seeds 3] [--steps 1000] [--drift-steps 2000] [--curves DIRECTORY]

Trains small byte-level GPTs on the demo's text on the CPU, one dense and one with experts (experts_gpt.py):
`--seeds` runs in BF16, then as many with each recipe, from the same initial weights and on the same batches.
`--curves` stores the losses of each run, and trains only the runs that are not there. Prints one JSON line
per model and recipe:

    delta         relative difference to BF16's loss in the last tenth of the steps, in per cent
    interval      of delta, as on a run's page; tolerance: what it is compared with
    verdict       of `compare_losses`; within: the margin that 'equivalent' names, in per cent
    deltas        the difference of each run to the BF16 run with the same seed, in per cent
    seed_spread   standard deviation of the BF16 runs, in per cent of their mean

and one per recipe of DRIFTING, of the dense model with `--drift-steps`, on the logarithm of the ratio of an
FP8 run's loss to that of the BF16 run with the same seed:

    drift         its trend over the second half of the steps, in per cent per 1,000 steps, mean of the seeds
    interval      95 %, of the mean over the seeds, from the scatter of blocks about the trend
    seed_interval 95 %, from the spread of the trends of single seeds (Student's t)
    moves         whether the dashboard calls the mean difference one that moves (`movement`)
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from experts_gpt import experts_gpt
from numpy.typing import NDArray

from fp8scope.demo.model import ByteGpt, Shape
from fp8scope.demo.train import DemoTrainer, Plan
from fp8scope_dashboard.analysis.losses.alignment import LossCurve
from fp8scope_dashboard.analysis.losses.sample_size import movement, trend
from fp8scope_dashboard.analysis.losses.verdict import compare_losses
from fp8scope_dashboard.statistics.student import upper_quantile
from fp8scope_kernels import (
    MXFP4,
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipe,
    RowwiseScaling,
    fp8_layers,
)

Floats = NDArray[np.float64]

BF16 = "BF16"
RECIPES: dict[str, Recipe | None] = {
    BF16: None,
    "DelayedScaling": DelayedScaling(),
    "CurrentScaling": CurrentScaling(),
    "RowwiseScaling": RowwiseScaling(),
    "BlockScaling": BlockScaling(),
    "MXFP8": MXFP8(),
    "MXFP4": MXFP4(stochastic_gradients=True),
    "NVFP4": NVFP4(),
    "NVFP4 without Hadamard": NVFP4(hadamard=False),
}
DRIFTING = ("DelayedScaling", "CurrentScaling", "BlockScaling", "MXFP8")
MODELS: dict[str, Callable[[Shape], ByteGpt]] = {"dense": ByteGpt, "moe": experts_gpt}
SHAPE = Shape(width=64, layers=2, earlier=3)
BATCH = 8
ALPHA = 0.05


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Trains runs, or reads their losses where an earlier call has stored them."""

    seeds: int
    directory: Path

    def losses(self, model: str, recipe: str, steps: int) -> Floats:
        """The losses of all seeds, float64 [seeds, steps]."""
        return np.stack([self._of_seed(model, recipe, steps, seed) for seed in range(1, self.seeds + 1)])

    def _of_seed(self, model: str, recipe: str, steps: int, seed: int) -> Floats:
        name = recipe.replace(" ", "-").lower()
        file = self.directory / f"{model}-{name}-{steps}-{seed}.npy"
        if not file.exists():
            losses = train(MODELS[model], RECIPES[recipe], steps, seed)
            # A call that is interrupted leaves no half of a curve.
            part = file.with_suffix(".part.npy")
            np.save(part, losses)
            part.rename(file)
        stored: Floats = np.load(file)
        return stored


def train(make_model: Callable[[Shape], ByteGpt], recipe: Recipe | None, steps: int, seed: int) -> Floats:
    """Train once and return the loss of each step."""
    plan = Plan(name="recipes", seed=seed, steps=steps, batch=BATCH, shape=SHAPE)
    trainer = DemoTrainer(plan, recipe, make_model)
    if recipe is not None and not list(fp8_layers(trainer.model)):
        raise RuntimeError(f"No layer was converted to {type(recipe).__name__}.")
    return np.array([float(trainer.train(step)["loss"]) for step in range(1, steps + 1)])


def verdicts(runs: Runs, model: str, steps: int, margin: float) -> Iterator[dict[str, object]]:
    """The difference of each recipe to BF16, and the verdict on it."""
    baseline = runs.losses(model, BF16, steps)
    for recipe in RECIPES:
        if recipe == BF16:
            continue
        losses = runs.losses(model, recipe, steps)
        arms = [
            [
                LossCurve(steps=np.arange(1, steps + 1), losses=row, planned=steps, name=f"{name} {seed}")
                for seed, row in enumerate(arm, 1)
            ]
            for name, arm in ((recipe, losses), (BF16, baseline))
        ]
        judged = compare_losses(*arms, margin=margin, alpha=ALPHA)
        last = slice(-max(1, steps // 10), None)
        ours, theirs = (arm[:, last].mean(axis=1) for arm in (losses, baseline))
        yield {
            "recipe": recipe,
            "model": model,
            "seeds": runs.seeds,
            "steps": steps,
            "margin": percent(margin),
            "bf16_loss": round(float(theirs.mean()), 4),
            "seed_spread": percent(float(theirs.std(ddof=1) / theirs.mean())),
            "delta": percent(judged.delta),
            "interval": [percent(end) for end in judged.interval or ()],
            "tolerance": percent(judged.tolerance),
            "verdict": judged.verdict,
            "within": percent(judged.judged_margin),
            "deltas": [percent(value) for value in ours / theirs - 1],
        }


def drift(runs: Runs, recipe: str, steps: int) -> dict[str, object]:
    """The trend of the difference of a recipe to BF16 over the second half of the steps."""
    ratios = np.log(runs.losses("dense", recipe, steps) / runs.losses("dense", BF16, steps))
    half = ratios[:, steps // 2 :]
    per_thousand = 1000.0 / half.shape[1]
    mean = trend(half.mean(axis=0))
    reach = upper_quantile(ALPHA / 2, mean.freedom) * mean.error
    single = [trend(row).change * per_thousand for row in half]
    of_seeds = upper_quantile(ALPHA / 2, len(single) - 1) * statistics.stdev(single) / math.sqrt(len(single))
    moved = movement(np.arange(1.0, steps + 1.0), ratios.mean(axis=0))
    centre = statistics.fmean(single)
    return {
        "recipe": recipe,
        "model": "dense",
        "seeds": runs.seeds,
        "steps": steps,
        "level": percent(float(half.mean())),
        "drift": percent(mean.change * per_thousand),
        "interval": [percent((mean.change + side * reach) * per_thousand) for side in (-1, 1)],
        "drift_of_seeds": [percent(value) for value in single],
        "seed_interval": [percent(centre + side * of_seeds) for side in (-1, 1)],
        "moves": moved is not None,
    }


def percent(value: float | None) -> float | None:
    return None if value is None else round(100.0 * float(value), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--drift-steps", type=int, default=2000, help="0 for none")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--margin", type=float, default=0.01)
    parser.add_argument("--models", nargs="*", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--curves", type=Path, help="directory of the runs' losses")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("--seeds must be at least 2, to measure the spread over seeds.")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        runs = Runs(seeds=arguments.seeds, directory=arguments.curves or Path(temporary))
        runs.directory.mkdir(parents=True, exist_ok=True)
        for model in arguments.models:
            for line in verdicts(runs, model, arguments.steps, arguments.margin):
                print(json.dumps({"benchmark": "recipes", **line}), flush=True)
        for recipe in DRIFTING if arguments.drift_steps else ():
            line = drift(runs, recipe, arguments.drift_steps)
            print(json.dumps({"benchmark": "recipes", **line}), flush=True)


if __name__ == "__main__":
    main()
