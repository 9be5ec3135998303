"""Seeding a project: BF16 seeds, a healthy FP8 run and a diverging one, with evaluations and alerts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from dashboard.helpers.recording import Recorder, make_run
from numpy.typing import NDArray

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts.services import evaluate
from fp8scope_dashboard.analysis.loss_comparisons import compare
from fp8scope_dashboard.analysis.score_comparisons import compare_evaluations
from fp8scope_dashboard.runs.models import Run, RunState

Floats = NDArray[np.float64]

BLOCKS = 6
LAYERS = ("attention.query_key_value", "attention.out", "mlp.up", "mlp.down")
ROLES = ("input", "grad_output")
TENSORS = [f"blocks.{block}.{layer}.{role}" for block in range(BLOCKS) for layer in LAYERS for role in ROLES]
STEP_TIMES = {
    "step": 40,
    "device": "accelerator",
    "layers": [
        {"path": path, "module": module, "count": count, "launches": 31 * count, "recomputed": 0.0}
        | dict(zip(("forward", "backward", "products", "attention", "casts", "other"), seconds, strict=True))
        for path, module, count, seconds in (
            ("blocks.*.mlp.up", "Fp8Linear", 4, (4.1e-3, 8.3e-3, 9.2e-3, 0.0, 3.1e-3, 1e-4)),
            (
                "blocks.*.attention.qkv_projection_with_a_long_name",
                "Fp8Linear",
                4,
                (3e-3, 6e-3, 7e-3, 0, 2e-3, 0),
            ),
            ("blocks.*.attention", "CausalSelfAttention", 4, (2e-3, 5e-3, 0.0, 6.5e-3, 0.0, 5e-4)),
            ("optimizer", "", 1, (1.4e-3, 0.0, 0.0, 0.0, 0.0, 1.4e-3)),
            ("", "", 1, (2e-4, 3e-4, 0.0, 0.0, 0.0, 5e-4)),
        )
    ],
    "held": {"float8_e4m3fn": 48 << 20, "float32": 4096, "input": 64 << 20},
}

ADVICE = {
    "steps": 145,
    "step_seconds": 0.04,
    "findings": [
        {
            "practice": "loader",
            "title": "The training waits for its data loader",
            "evidence": "34 % of the steps' time (13.6 ms of 40.0 ms) is spent in a DataLoader with 4 "
            "workers, on 8 CPUs.",
            "gain": {
                "low": 0.17,
                "high": 0.34,
                "formula": "(d - max(0, b/8 - r)) / t, and half of it: d the wait of a step, r its remaining "
                "time, t both, b the time of a batch",
            },
            "change": "DataLoader(..., num_workers=8, persistent_workers=True, pin_memory=True)",
        }
    ],
}
"""What the agent says of the FP8 runs."""
LARGEST, NUMEL = 448.0, 262_144.0
TOKENS_A_STEP = 2_048


@dataclass(frozen=True)
class Seeded:
    """The runs of a seeded project."""

    baselines: list[Run]
    healthy: Run
    faulty: Run


def seed_project(project: Project, steps: int = 500, *, live: bool = False) -> Seeded:
    """Store the runs and have them judged. `live`: the healthy FP8 run is still running."""
    baselines = [_bf16(project, seed, steps) for seed in (1, 2, 3)]
    healthy = _fp8(project, "gpt fp8 delayed", "fp8-delayed", steps, live=live)
    faulty = _fp8(project, "gpt fp8 frozen scale", "fp8-frozen-scale", steps, diverges_at=int(0.6 * steps))
    for run in (healthy, faulty):
        compare(run.id)
        compare_evaluations(run.id)
        evaluate(run.id)
        run.refresh_from_db()
    return Seeded(baselines, healthy, faulty)


def losses(steps: int, seed: int) -> Floats:
    """A training loss: from ln 256 down a power law, with noise, mostly that of the shared batches."""
    noise = np.random.default_rng(0).normal(0.0, 0.035, steps)
    noise += np.random.default_rng(seed).normal(0.0, 0.004, steps)
    return 1.9 + 3.64 * (1.0 + np.arange(steps) / 18.0) ** -0.75 + noise + 0.002 * seed


def _scalars(loss: Floats, seed: int) -> dict[str, Floats]:
    steps = len(loss)
    generator = np.random.default_rng(100 + seed)
    rate = 21_000.0 * (1.0 + generator.normal(0.0, 0.03, steps))
    rate[::97] *= 0.4
    return {
        "loss": loss,
        "tokens": TOKENS_A_STEP * np.arange(1.0, steps + 1),
        "tokens_per_second": rate,
        "step_seconds": TOKENS_A_STEP / rate,
        "grad_norm": 0.8 + 2.0 / np.sqrt(1.0 + np.arange(steps)) + generator.gamma(2.0, 0.05, steps),
        "learning_rate": 3e-4
        * np.minimum(1.0, np.arange(steps) / 40.0)
        * np.cos(np.arange(steps) / steps * 1.5),
    }


def _bf16(project: Project, seed: int, steps: int) -> Run:
    run = make_run(
        project, f"gpt bf16 seed {seed}", precision="bf16", group="bf16", seed=seed, total_steps=steps
    )
    writer = Recorder(run=run)
    writer.rows(np.arange(steps), _scalars(losses(steps, seed), seed), rows_per_batch=50)
    _evaluate(writer, steps, 0.605, seed)
    writer.finish()
    return run


def _fp8(
    project: Project, name: str, group: str, steps: int, *, diverges_at: int | None = None, live: bool = False
) -> Run:
    recipe = {"name": "delayed", "history": 16, "margin": 0}
    run = make_run(
        project,
        name,
        precision="fp8",
        group=group,
        baseline="bf16",
        seed=1,
        recipe=recipe,
        total_steps=steps,
        config={"layers": BLOCKS, "width": 256, "batch": 16},
        environment={"python": "3.11", "gpu": None, "advice": ADVICE, "step_times": STEP_TIMES},
        tags=["nightly"],
    )
    loss = losses(steps, 1) + np.random.default_rng(9).normal(0.0, 0.004, steps)
    if diverges_at is not None:
        rise = np.maximum(0.0, np.arange(steps) - diverges_at) / 25.0
        loss = loss + np.expm1(np.minimum(rise, 12.0))
        loss[diverges_at + int(0.25 * steps) :] = np.nan
    writer = Recorder(run=run, tensors=TENSORS)
    done = steps - steps // 5 if live else steps
    scalars = {key: values[:done] for key, values in _scalars(loss, 7).items()}
    statistics = {key: values[:done] for key, values in _statistics(steps, diverges_at).items()}
    writer.rows(np.arange(done), scalars, statistics, rows_per_batch=50)
    _evaluate(writer, done, 0.601 if diverges_at is None else 0.41, 11)
    if not live:
        writer.finish()
    Run.objects.filter(pk=run.pk).update(state=RunState.RUNNING if live else RunState.FINISHED)
    run.refresh_from_db()
    return run


def _statistics(steps: int, diverges_at: int | None) -> dict[str, Floats]:
    generator = np.random.default_rng(5)
    shape = (steps, len(TENSORS))
    depth = np.repeat(np.arange(BLOCKS), len(LAYERS) * len(ROLES))
    is_gradient = np.array(["grad" in name for name in TENSORS])
    level = np.where(is_gradient, 2e-4, 3.0) * (1.0 + 0.35 * depth)
    drift = 1.0 + np.arange(steps)[:, None] / steps
    amax = level * drift * np.exp(generator.normal(0.0, 0.12, shape))
    history = np.maximum.accumulate(amax, axis=0)
    scale = LARGEST / np.roll(history, 1, axis=0)
    scale[0] = 1.0
    if diverges_at is not None:
        worst = np.array(["mlp.down.input" in name for name in TENSORS])
        growth = np.exp(np.clip((np.arange(steps) - 0.8 * diverges_at) / 40.0, 0.0, 6.0))[:, None]
        amax = np.where(worst, amax * growth, amax)
        scale[diverges_at // 2 :, worst] = scale[diverges_at // 2, worst]
    over = np.maximum(0.0, np.log(np.maximum(amax * scale / LARGEST, 1e-9)))
    return {
        "numel": np.full(shape, NUMEL),
        "amax": amax,
        "scale": scale,
        "saturated": np.round(NUMEL * np.minimum(0.6, 4e-6 * (np.exp(3.0 * over) - 1.0))),
        "underflow": np.round(NUMEL * np.where(is_gradient, 0.02, 1e-4) * generator.gamma(4.0, 0.25, shape)),
        "subnormal": np.round(NUMEL * np.where(is_gradient, 0.06, 4e-3) * generator.gamma(4.0, 0.25, shape)),
        "nonfinite": np.zeros(shape),
    }


def _evaluate(writer: Recorder, steps: int, accuracy: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    names = [f"item {i}" for i in range(600)]
    hardness = np.random.default_rng(0).uniform(size=600)
    for step in range(100, steps + 1, 100):
        chance = accuracy * step / (step + 40.0)
        right = hardness + generator.normal(0.0, 0.08, 600) < chance
        writer.evaluation(
            step, right.astype(float).tolist(), name="heldout", metric="accuracy", item_ids=names
        )
        nll = np.exp(generator.normal(1.0 - chance, 0.3, 600))
        writer.evaluation(
            step,
            nll.tolist(),
            name="heldout",
            metric="nll",
            kind="mean",
            item_ids=names,
            higher_is_better=False,
        )
