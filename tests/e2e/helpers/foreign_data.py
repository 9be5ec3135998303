"""Data as other people have it: long names, a bad seed, gaps, and a client that sends other statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from dashboard.helpers.exponents import histogram_of, store_histograms
from dashboard.helpers.recording import Recorder, make_run
from numpy.typing import NDArray

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts.services import evaluate
from fp8scope_dashboard.analysis.loss_comparisons import compare
from fp8scope_dashboard.runs.models import Run

Floats = NDArray[np.float64]

SEEDS, BAD_SEED, BAD_FACTOR = 15, 7, 1.39
NAME_LENGTH: Final = 200
LONG_STEPS: Final = 150_000
ROWS_PER_BATCH: Final = 10_000
# Steps that the long run has not sent: a lost machine, and a log that was only kept now and then.
GAPS: Final = ((20_000, 31_000), (70_003, 70_950), (110_000, 110_001))
SAMPLED_EVERY: Final = 100
"""Steps between two with statistics of tensors."""
SATURATES_AT: Final = 90_000
FIRST_TENSOR: Final = "decoder.layers.3.mlp/w2.input"
TENSORS: Final = tuple(f"decoder.layers.{layer}.mlp/w2.input" for layer in (0, 1, 3, 7))
ERROR: Final = (
    "Traceback (most recent call last):\n"
    '  File "/srv/train/loop.py", line 812, in step\n    loss.backward()\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 3 has 79.1 GiB in total.\n"
)


@dataclass(frozen=True, kw_only=True)
class ForeignData:
    """The runs: FP8 seeds of which one is bad, their baselines, the long one, and those with a high rate."""

    baselines: list[Run]
    seeds: list[Run]
    long: Run
    hot: list[Run]

    @property
    def bad(self) -> Run:
        return self.seeds[BAD_SEED]


def foreign_data(project: Project) -> ForeignData:
    """Store the runs and have them compared and judged."""
    baselines = [_seed(project, "bf16", seed) for seed in range(3)]
    seeds = [_seed(project, "fp8", seed) for seed in range(SEEDS)]
    hot = [_hot(project, number) for number in range(3)]
    long = _long(project)
    for run in seeds:
        compare(run.id)
    evaluate(long.id)
    return ForeignData(baselines=baselines, seeds=seeds, long=long, hot=hot)


def long_name(end: str) -> str:
    """A name of 200 characters, as of a sweep that writes its configuration into it; only the end differs."""
    begin = "2026-11-26_llm-7b_mixture-v12_cosine-decay_adamw-b1-0.9-b2-0.95_wd-0.1_ctx-8192_tp-4-pp-2-dp-16_"
    return (begin * 3)[: NAME_LENGTH - len(end)] + end


def _seed(project: Project, arm: str, seed: int) -> Run:
    """A seed without tensors, 200 steps."""
    is_bad = arm == "fp8" and seed == BAD_SEED
    run = make_run(
        project,
        long_name(f"_{arm}_seed-{seed}"),
        group=f"ablation {arm}",
        baseline="ablation bf16" if arm == "fp8" else "",
        precision=arm,
        seed=seed,
        config={"optim": {"lr": 3e-4, "warmup": 100 if arm == "fp8" else 250}, "data": {"shuffle": seed}},
    )
    steps = np.arange(1, 201)
    factor = (BAD_FACTOR if is_bad else 1.0) + 0.0002 * seed
    loss = factor * (2.0 + 3.0 * np.exp(-steps / 40.0))
    recorder = Recorder(run=run)
    recorder.rows(steps, {"loss": loss}, rows_per_batch=200)
    recorder.finish()
    return run


def _hot(project: Project, number: int) -> Run:
    """A short run with a high learning rate; all but the last have failed."""
    run = make_run(project, long_name(f"_hot-{number}"), precision="bf16", config={"lr": f"{number + 2}e-3"})
    recorder = Recorder(run=run)
    recorder.rows(np.arange(5), {"loss": np.linspace(9.0, 12.0, 5)})
    recorder.finish("" if number == 2 else "FloatingPointError: the loss is not finite")
    return run


def _long(project: Project) -> Run:
    """150,000 steps with gaps, of a client that counts no elements that are not finite, and died."""
    run = make_run(
        project,
        long_name("_long"),
        precision="fp8",
        group="production",
        seed=1,
        config={"optim": {"lr": 2e-4}},
        total_steps=2 * LONG_STEPS,
    )
    steps = np.arange(LONG_STEPS)
    for first, end in GAPS:
        steps = steps[(steps < first) | (steps >= end)]
    recorder = Recorder(run=run, tensors=TENSORS)
    for begin in range(0, len(steps), ROWS_PER_BATCH):
        part = steps[begin : begin + ROWS_PER_BATCH]
        is_sampled = part % SAMPLED_EVERY == 0
        recorder.rows(part[~is_sampled], _scalars(part[~is_sampled]), rows_per_batch=ROWS_PER_BATCH)
        sampled = part[is_sampled]
        recorder.rows(sampled, _scalars(sampled), _statistics(sampled), rows_per_batch=ROWS_PER_BATCH)
    exponents = histogram_of(np.random.default_rng(0).normal(0.0, 3.0, 4_096))
    store_histograms(run, 60_000, dict.fromkeys(range(len(TENSORS)), exponents))
    recorder.finish(ERROR)
    return run


def _scalars(steps: NDArray[np.int64]) -> dict[str, Floats]:
    generator = np.random.default_rng(int(steps[0]))
    return {
        "loss": 1.9 + 6.0 * (1.0 + steps / 300.0) ** -0.6 + generator.normal(0.0, 0.03, len(steps)),
        "tokens_per_second": 41_000.0 + generator.normal(0.0, 900.0, len(steps)),
        "train/grad-norm": generator.gamma(9.0, 0.1, len(steps)),
    }


def _statistics(steps: NDArray[np.int64]) -> dict[str, Floats]:
    """Tensors that saturate one after the other, the third first."""
    generator = np.random.default_rng(int(steps[0]))
    shape = (len(steps), len(TENSORS))
    begins = np.array([SATURATES_AT + 9_000 * (index != 2) * (1 + index) for index in range(len(TENSORS))])
    over = np.clip((steps[:, None] - begins) / 8_000.0, 0.0, 1.0)
    numel = 1_000_000.0
    return {
        "numel": np.full(shape, numel),
        "amax": 3.0 * np.exp(generator.normal(0.0, 0.05, shape)) * (1.0 + 5.0 * over),
        "scale": np.full(shape, 100.0),
        "saturated": np.round(0.02 * numel * over),
        "underflow": np.round(200.0 * generator.gamma(4.0, 0.25, shape)),
    }
