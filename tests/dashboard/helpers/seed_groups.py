"""A group of FP8 runs that differ in their seed, of which one broke down, and its baselines."""

from __future__ import annotations

import numpy as np
from dashboard.helpers.recording import Recorder, make_run

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.runs.models import Run

STEPS = np.arange(1, 201)


def a_group_with_a_bad_seed(project: Project, seeds: int = 15, bad: int = 7) -> list[Run]:
    """Three BF16 runs, and FP8 runs of which one is 39 % above them, all with scores of two tasks."""
    runs = []
    for arm, count in (("bf16", 3), ("fp8", seeds)):
        for seed in range(count):
            baseline = "bf16" if arm == "fp8" else ""
            run = make_run(project, f"{arm} {seed}", group=arm, seed=seed, baseline=baseline, precision=arm)
            is_bad = arm == "fp8" and seed == bad
            factor = (1.394 if is_bad else 1.0) + 0.0002 * seed
            recorder = Recorder(run=run)
            recorder.rows(STEPS, {"loss": factor * (2.0 + 3.0 * np.exp(-STEPS / 40.0))}, rows_per_batch=50)
            chances = np.random.default_rng(0).random(200) < (0.2 if is_bad else 0.7)
            flips = np.random.default_rng(seed + 1).integers(0, 200, 3)
            items = chances.astype(float)
            items[flips] = 1.0 - items[flips]
            recorder.evaluation(200, items.tolist(), name="gsm8k")
            recorder.evaluation(200, (3.0 + items).tolist(), name="held out", metric="score", kind="mean")
            recorder.finish()
            if arm == "fp8":
                runs.append(run)
    return runs
