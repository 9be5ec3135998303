"""How a learning rate that is too high shows, for the limits of the diagnosis. Prints JSON lines.

    python benchmarks/learning_rate.py [--factors 1 3 10 20 40 80] [--curves DIRECTORY]

Trains the demo's byte-level GPT in BF16 with three shapes, and a multiple of a learning rate that suits it.

    factor   of the learning rate
    loss     mean of the last fifth of the steps, over the smallest of this shape
    fall     the same over the mean between a tenth and a quarter of the steps
    update   median ratio of an update to the weight, of all matrices, after the first tenth
    growth   ratio of the largest weight at the end to that at the beginning; 25 % quantile over the matrices
    first    update times growth: an update relative to the first weights

`--curves` prints the quantiles of `fall` over public curves instead; verdicts.py describes the directory.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fp8scope.demo.model import Shape
from fp8scope.demo.train import DemoTrainer, Plan

# Layers, width, learning rate and steps.
TRAININGS = ((2, 64, 4e-3, 240), (1, 48, 2e-3, 320), (3, 96, 6e-3, 160))
SAMPLED = 10
MIN_STEPS = 100


def train(layers: int, width: int, learning_rate: float, steps: int) -> dict[str, float]:
    """Train once, and measure."""
    shape = Shape(layers=layers, width=width, heads=4, context=32)
    trainer = DemoTrainer(
        Plan(name="", seed=1, steps=steps, batch=8, windows=32, shape=shape, learning_rate=learning_rate)
    )
    matrices = [each for each in trainer.model.parameters() if each.ndim == 2]
    losses, updates = [], []
    first = torch.stack([each.detach().abs().max() for each in matrices])
    for step in range(1, steps + 1):
        before = [each.detach().clone() for each in matrices] if step % SAMPLED == 0 else []
        losses.append(float(trainer.train(step)["loss"]))
        if before and step > steps // 10:
            pairs = zip(matrices, before, strict=True)
            updates.append([float((new.detach() - old).norm() / old.norm()) for new, old in pairs])
    last = torch.stack([each.detach().abs().max() for each in matrices])
    update, growth = float(np.median(updates)), float((last / first).quantile(0.25))
    values = np.array(losses)
    return {
        "loss": float(values[-steps // 5 :].mean()),
        "fall": fall(values),
        "update": update,
        "growth": growth,
        "first": update * max(1.0, growth),
    }


def fall(losses: NDArray[np.float64]) -> float:
    """The last fifth of a curve over its part from a tenth to a quarter."""
    count = len(losses)
    return float(losses[-count // 5 :].mean() / losses[count // 10 : count // 4].mean())


def of_public_curves(directory: Path) -> dict[str, Any]:
    from verdicts import read_groups

    groups, _ = read_groups(directory, 1)
    falls = [fall(each.losses) for group in groups.values() for each in group if len(each) >= MIN_STEPS]
    shares = (0.05, 0.5, 0.75, 0.95, 1.0)
    quantiles = dict(zip(map(str, shares), np.quantile(falls, shares).round(3).tolist(), strict=True))
    return {"benchmark": "learning_rate", "curves": len(falls), "fall": quantiles}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--factors", type=float, nargs="+", default=[1, 3, 10, 20, 40, 80])
    parser.add_argument("--curves", type=Path, help="of public curves")
    options = parser.parse_args()
    if options.curves is not None:
        print(json.dumps(of_public_curves(options.curves)))
        return
    torch.set_num_threads(1)
    for layers, width, rate, steps in TRAININGS:
        measured = {factor: train(layers, width, factor * rate, steps) for factor in options.factors}
        best = min(each["loss"] for each in measured.values())
        for factor, each in measured.items():
            rounded = {name: round(value, 4) for name, value in {**each, "loss": each["loss"] / best}.items()}
            model = {"model": f"{layers} x {width}", "steps": steps, "factor": factor}
            print(json.dumps({"benchmark": "learning_rate", **model, **rounded}), flush=True)


if __name__ == "__main__":
    main()
