"""Train the runs of `fp8scope demo` with many seeds, without servers, and judge them as the dashboard does.

    python benchmarks/demo_seeds.py [--seeds 20] [--first 0] [--processes 2] [--curves DIRECTORY]

Each trial has its own text, order of batches and initial weights: three BF16 runs, a healthy FP8 run and one
with stale scales. The losses are judged by `compare_losses` with the demo's margin, and by the detectors of
the loss with the default rules. `--curves` keeps the losses, one file per trial, and judges those that are
there without training. Prints one JSON line. Triples are the least, the median and the greatest:

    seeds                  trials
    expected               trials in which the healthy run is equivalent or better, and the faulty one worse
    healthy, faulty        verdicts, counted
    healthy_delta, healthy_low, healthy_high
                           difference of the healthy run in per cent, and the ends of its interval
    healthy_tolerance      what the interval is compared with, in per cent; margin: the project's
    seed_spread            standard deviation of the three BF16 runs in per cent of their mean
    faulty_delta           difference of the faulty run in per cent
    faulty_worse_at        first step, of those at every twentieth of the run, at which it is judged worse
    faulty_alerts          trials in which an alert about the loss opens, by kind; alert_steps: the first step
    healthy_alerts         alerts about the losses of the other runs, by kind
    final_loss             of the BF16 runs
    cpu_seconds            processor time of one trial
    torch, arithmetic      version, and how BF16 is computed; both change bits
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.detectors import State, above_baseline, divergence, not_finite, spike
from fp8scope_dashboard.analysis.losses.alignment import LossCurve
from fp8scope_dashboard.analysis.losses.result import LossComparison
from fp8scope_dashboard.analysis.losses.verdict import compare_losses
from fp8scope_dashboard.demo.outcome import GOOD_VERDICTS
from fp8scope_dashboard.demo.plan import FAULT_AFTER, STEPS
from fp8scope_dashboard.demo.project import MARGIN

Floats = NDArray[np.float64]
Curves = Mapping[str, Floats]

ALPHA = 0.05
BASELINES, HEALTHY, FAULTY = ("bf16 1", "bf16 2", "bf16 3"), "fp8", "fault"
LOOKS = 20
# Rows of one message, about, as the agent sends them.
ROWS = 16
LOSS_DETECTORS = {"loss_not_finite": not_finite, "loss_divergence": divergence, "loss_spike": spike}


def train(trial: int, steps: int, file: Path) -> float:
    """Train the five runs of a trial and write their losses. Returns the processor seconds."""
    import torch

    from fp8scope.demo.train import Plan

    torch.set_num_threads(1)
    began = time.process_time()
    plan = Plan(name="bf16", seed=0, data_seed=trial, steps=steps)
    curves = {name: _losses(replace(plan, seed=3 * trial + i)) for i, name in enumerate(BASELINES, 1)}
    fault_at = round(steps * FAULT_AFTER)
    fp8 = replace(plan, precision="fp8", seed=3 * trial + 1, fault_at=fault_at)
    curves |= _with_and_without_fault(fp8, fault_at)
    np.savez(file.with_suffix(".part.npz"), allow_pickle=False, **curves)
    file.with_suffix(".part.npz").rename(file)
    return time.process_time() - began


def _losses(plan: Any) -> Floats:
    from fp8scope.demo.train import DemoTrainer

    trainer = DemoTrainer(plan)
    return np.array([float(trainer.train(step)["loss"]) for step in range(1, plan.steps + 1)])


def _with_and_without_fault(plan: Any, fault_at: int) -> dict[str, Floats]:
    """The losses of the faulty run and of the same without the fault; their beginning is trained once."""
    from fp8scope.demo.train import DemoTrainer

    trainer = DemoTrainer(plan)
    common = [float(trainer.train(step)["loss"]) for step in range(1, fault_at)]
    healthy = deepcopy(trainer)
    healthy.plan = replace(plan, fault_at=None)
    rest = range(fault_at, plan.steps + 1)
    return {
        name: np.array([*common, *(float(each.train(step)["loss"]) for step in rest)])
        for name, each in ((HEALTHY, healthy), (FAULTY, trainer))
    }


def judge(curves: Curves) -> dict[str, Any]:
    """The verdicts and alerts of a trial."""
    healthy, faulty = (_compared(curves, name) for name in (HEALTHY, FAULTY))
    steps = len(curves[FAULTY])
    looks = [steps * look // LOOKS for look in range(1, LOOKS + 1)]
    worse = [look for look in looks if _compared(curves, FAULTY, look).verdict == "worse"]
    spread = np.std(healthy.baseline_losses, ddof=1) / np.mean(healthy.baseline_losses)
    return {
        "healthy": healthy.verdict,
        "faulty": faulty.verdict,
        "healthy_delta": healthy.delta,
        "healthy_low": (healthy.interval or (np.nan,))[0],
        "healthy_high": (healthy.interval or (np.nan,))[-1],
        "healthy_tolerance": healthy.tolerance,
        "seed_spread": spread,
        "faulty_delta": faulty.delta,
        "faulty_worse_at": worse[0] if worse else None,
        "faulty_alerts": _alerts(curves, FAULTY),
        "healthy_alerts": {
            **_alerts(curves, HEALTHY),
            **{kind: step for name in BASELINES for kind, step in _alerts(curves, name).items()},
        },
        "final_loss": float(np.mean(healthy.baseline_losses)),
    }


def _compared(curves: Curves, name: str, until: int | None = None) -> LossComparison:
    steps = len(curves[name])

    def curve(each: str, end: int | None = None) -> LossCurve:
        return LossCurve(
            steps=np.arange(1, steps + 1)[:end], losses=curves[each][:end], planned=steps, name=each
        )

    baselines = [curve(each) for each in BASELINES]
    return compare_losses([curve(name, until)], baselines, margin=MARGIN, alpha=ALPHA)


def _alerts(curves: Curves, name: str) -> dict[str, int]:
    """The first step at which each rule about the loss opens an alert."""
    losses = curves[name]
    steps = np.arange(1, len(losses) + 1)
    opened: dict[str, int] = {}
    baselines = np.stack([curves[each] for each in BASELINES])
    kinds = [*LOSS_DETECTORS, *(["above_baseline"] if name not in BASELINES else [])]
    for kind in kinds:
        state: State = {}
        parameters = rules.validate(kind, {})
        for begin in range(0, len(steps), ROWS):
            part = slice(begin, begin + ROWS)
            if kind in LOSS_DETECTORS:
                state, findings = LOSS_DETECTORS[kind](state, steps[part], losses[part], parameters)
            else:
                limits = {**parameters, "margin": MARGIN, "alpha": ALPHA}
                state, findings = above_baseline(state, steps[part], losses[part], baselines[:, part], limits)
            for finding in findings:
                if finding.opened and kind not in opened:
                    opened[kind] = finding.step
    return opened


def summary(trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of all trials."""

    def three(name: str, factor: float = 100.0) -> list[float] | None:
        values = [factor * each[name] for each in trials if each[name] is not None]
        return [round(float(np.quantile(values, q)), 3) for q in (0.0, 0.5, 1.0)] if values else None

    expected = [each["healthy"] in GOOD_VERDICTS and each["faulty"] == "worse" for each in trials]
    steps = [min(each["faulty_alerts"].values()) for each in trials if each["faulty_alerts"]]
    return {
        "seeds": len(trials),
        "expected": sum(expected),
        "healthy": Counter(each["healthy"] for each in trials),
        "faulty": Counter(each["faulty"] for each in trials),
        "margin": 100.0 * MARGIN,
        **{
            name: three(name)
            for name in (
                *("healthy_delta", "healthy_low", "healthy_high", "healthy_tolerance"),
                *("seed_spread", "faulty_delta"),
            )
        },
        "faulty_worse_at": three("faulty_worse_at", 1.0),
        "faulty_alerts": Counter(kind for each in trials for kind in each["faulty_alerts"]),
        "alert_steps": [int(np.quantile(steps, q)) for q in (0.0, 0.5, 1.0)] if steps else None,
        "healthy_alerts": Counter(kind for each in trials for kind in each["healthy_alerts"]),
        "final_loss": three("final_loss", 1.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first trial's seed")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--curves", type=Path, help="directory for the losses, of another run or for the next"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.curves or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        numbers = range(options.first, options.first + options.seeds)
        files = {trial: directory / f"trial-{trial}.npz" for trial in numbers}
        # Children read it when they import torch.
        os.environ["OMP_NUM_THREADS"] = "1"
        missing = [(trial, options.steps, file) for trial, file in files.items() if not file.exists()]
        with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=1) as pool:
            seconds = pool.starmap(train, missing, chunksize=1)
        trials = [judge(dict(np.load(file))) for file in files.values()]
    import torch

    from fp8scope.demo import arithmetic

    figures = {
        **summary(trials),
        "cpu_seconds": round(float(np.median(seconds)), 1) if seconds else None,
        "torch": torch.__version__,
        "arithmetic": arithmetic.describe(),
    }
    print(json.dumps({"benchmark": "demo_seeds", **figures}), flush=True)


if __name__ == "__main__":
    main()
