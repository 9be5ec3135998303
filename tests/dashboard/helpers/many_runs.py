"""Thousands of runs without telemetry, as a project has them after a year: for the list and its benchmark."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import numpy as np
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts.models import Alert
from fp8scope_dashboard.analysis.models import Comparison
from fp8scope_dashboard.runs.configuration import config_digest
from fp8scope_dashboard.runs.models import Run

RECIPES = ("DelayedScaling", "CurrentScaling", "BlockScaling", "MXFP8")
VERDICTS = ("equivalent", "worse", "cannot_tell", "better")
SEEDS = 5
SCALARS = ("tokens", "tokens_per_second", "step_seconds", "grad_norm", "learning_rate", "memory_allocated")


def fill_project(project: Project, count: int, *, entries: int = 60) -> None:
    """Store `count` runs in groups of SEEDS seeds, a fifth of them BF16, with comparisons and some alerts.

    Args:
        entries: of each configuration, beside the few that differ between groups.
    """
    generator = np.random.default_rng(0)
    now = timezone.now()
    common = {f"section_{i // 10}": {f"setting_{j}": j * i for j in range(10)} for i in range(0, entries, 10)}
    runs = []
    for number in range(count):
        runs.append(_run(project, number, now - timedelta(minutes=11 * number), generator, common))
    Run.objects.bulk_create(runs, batch_size=1_000)
    compared = [run for run in runs if run.baseline]
    Comparison.objects.bulk_create(
        [
            Comparison(
                run=run,
                baseline=run.baseline,
                to_step=run.last_step or 0,
                verdict=VERDICTS[number % len(VERDICTS)],
                result={"delta": float(generator.normal(0, 0.004)), "tolerance": 0.0025, "unit": "relative"},
            )
            for number, run in enumerate(compared)
        ],
        batch_size=1_000,
    )
    Alert.objects.bulk_create(
        [
            Alert(run=run, kind="loss_spike", severity="warning", onset_step=1, step=2, message="Up.")
            for run in runs[:: max(1, count // 300)]
        ]
    )


def _run(
    project: Project, number: int, begun: Any, generator: np.random.Generator, common: dict[str, Any]
) -> Run:
    group = number // SEEDS
    is_bf16 = group % 5 == 0
    recipe = {} if is_bf16 else {"recipe": RECIPES[group % 4], "margin": group % 3, "fp8_format": "HYBRID"}
    config = {
        **common,
        "lr": [1e-4, 3e-4, 6e-4][group % 3],
        "model": {"depth": 12 + 12 * (group % 4), "width": 768, "name": f"gpt-{group % 4}"},
        "data": {"path": f"/data/mix-{group % 7}", "seed": number},
    }
    loss = float(2.2 + generator.gamma(2.0, 0.2))
    scalars: dict[str, Any] = {name: float(generator.uniform(0.1, 1e4)) for name in SCALARS}
    state = ("finished", "finished", "finished", "failed", "silent", "running")[number % 6]
    return Run(
        id=uuid.UUID(int=int(generator.integers(2**62)) << 64 | number),
        project=project,
        name=f"gpt-{group % 4} {'bf16' if is_bf16 else RECIPES[group % 4]} #{number}",
        state=state,
        precision="bf16" if is_bf16 else "fp8",
        recipe=recipe,
        recipe_name=str(recipe.get("recipe", "")),
        config=config,
        config_digest=config_digest(config),
        environment={"torch": "2.9.1", "gpu": "H100", "hostname": f"node{number % 16}"},
        tags=["prod"] * (number % 10 == 0) + [f"sweep-{group % 40}"],
        group=f"{'bf16' if is_bf16 else 'fp8'}-{group}",
        baseline="" if is_bf16 else f"bf16-{group // 5 * 5}",
        seed=number % SEEDS,
        total_steps=10_000,
        last_step=10_000 if state == "finished" else int(generator.integers(10_000)),
        rows_stored=10_000,
        points_stored=3_000_000,
        last_scalars={"loss": "NaN" if number % 50 == 7 else loss, **scalars},
        statistics=["amax", "scale", "saturated"],
        created_at=begun,
        heartbeat_at=begun + timedelta(hours=2),
        finished_at=None if state == "running" else begun + timedelta(hours=2),
    )
