"""How many series-steps a second the default alert rules judge on one core. Prints a JSON line per case.

    python benchmarks/detector_speed.py [--series N] [--steps N] [--rows N] [--cases NAME ...]

A series is one statistic of one tensor. The detectors read six statistics of each tensor, so that N series
are N / 6 tensors. A pass runs every default rule over the rows, in chunks of `--rows`; after each chunk the
states become JSON and are read back, as they are stored. Neither the database nor decoding is part of it.

Cases: `healthy`, where delayed scales work; `alarming`, where every tensor overflows, underflows, has NaN and
a frozen scale for 100 steps of every 200, so that all of them open and close alarms again and again.

Fields: `series_steps_per_second`, from the CPU time of the process, all chunks together; `over_the_goal`, the
same over 5 million; `seconds_per_step`, for all series; `findings`; `state_bytes`, the stored state; `share`,
of the time, by rule.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict

import django
import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "fp8scope_dashboard.settings.test")
django.setup()

from fp8scope_dashboard.alerts import rules  # noqa: E402
from fp8scope_dashboard.alerts.detection import streams  # noqa: E402
from fp8scope_dashboard.alerts.detectors import State, TensorFacts  # noqa: E402
from fp8scope_dashboard.alerts.models import Rule  # noqa: E402
from fp8scope_dashboard.telemetry.codec import ChunkData  # noqa: E402

GOAL = 5e6
CASES = ("healthy", "alarming")
# Rows that are made; longer replays repeat them, with steps that go on.
MADE = 2_000
HISTORY = 16
Floats = NDArray[np.float64]


def default_rules() -> list[Rule]:
    """The rules of a new project that read rows, unsaved."""
    kinds = [kind for kind in rules.KINDS.values() if kind.is_default]
    return [Rule(pk=i, kind=kind.name, parameters={}) for i, kind in enumerate(kinds)]


def healthy(tensors: int, seed: int = 0) -> dict[str, Floats]:
    """MADE rows of tensors with working delayed scales, float64[MADE, tensors] each."""
    random = np.random.default_rng(seed)
    amax = 10.0 * np.exp(random.normal(0.0, 0.3, (MADE + HISTORY, tensors)))
    windows = np.lib.stride_tricks.sliding_window_view(amax[:-1], HISTORY, axis=0)
    scale = (448.0 / windows.max(axis=-1)).astype(np.float32).astype(np.float64)
    amax = amax[HISTORY:]
    return {
        "numel": np.full((MADE, tensors), 1e6),
        "amax": amax,
        "scale": scale,
        "saturated": np.where(amax * scale > 448.0, 3.0, 0.0),
        "underflow": random.poisson(3e4, (MADE, tensors)).astype(np.float64),
        "nonfinite": np.zeros((MADE, tensors)),
    }


def alarming(tensors: int) -> dict[str, Floats]:
    """The same, at fault for 100 rows of every 200."""
    made = healthy(tensors)
    faulty = (np.arange(MADE) % 200 >= 100)[:, None] & np.ones(tensors, bool)
    made["saturated"] = np.where(faulty, 2e5, made["saturated"])
    made["underflow"] = np.where(faulty, 7e5, made["underflow"])
    made["nonfinite"] = np.where(faulty, 10.0, 0.0)
    made["amax"] = np.where(faulty, made["amax"] * 1e3, made["amax"])
    made["scale"] = np.where(faulty, 20.0, made["scale"])
    return made


def scalars(rows: int, seed: int) -> dict[str, Floats]:
    """Scalars of healthy steps."""
    random = np.random.default_rng(seed)
    names = ("time_data", "time_forward", "time_backward", "time_optimizer", "time_other")
    return {
        "loss": 2.0 + random.normal(0.0, 0.02, rows),
        "grad_norm": np.exp(random.normal(0.0, 0.2, rows)),
        "step_seconds": 0.1 * np.exp(random.normal(0.0, 0.05, rows)),
        "memory_rss": np.full(rows, 2.0**32),
        **{name: np.full(rows, 0.02) for name in names},
    }


def replay(case: str, series: int, steps: int, rows: int) -> dict[str, object]:
    tensors = series // len(streams.STATISTICS_READ)
    statistics = healthy(tensors) if case == "healthy" else alarming(tensors)
    facts = TensorFacts.unknown([f"blocks.{i // 8}.layer{i % 8}.input" for i in range(tensors)])
    enabled = default_rules()
    state: State = {}
    seconds = 0.0
    findings = 0
    size = 0
    for first in range(0, steps, rows):
        at = (first + np.arange(min(rows, steps - first))) % MADE
        values = scalars(len(at), first)
        data = ChunkData(
            steps=first + np.arange(len(at)),
            times=np.zeros(len(at), "datetime64[us]"),
            scalars=values,
            logged={name: np.ones(len(at), bool) for name in values},
            statistics={name: matrix[at] for name, matrix in statistics.items()},
        )
        began = time.process_time()
        findings += len(streams.detect(enabled, state, data, facts, leads=True))
        text = json.dumps(state)
        state = json.loads(text)
        seconds += time.process_time() - began
        size = len(text)
    per_step = seconds / steps
    speed = len(streams.STATISTICS_READ) * tensors / per_step
    return {
        "case": case,
        "series": len(streams.STATISTICS_READ) * tensors,
        "tensors": tensors,
        "steps": steps,
        "rules": len(enabled),
        "series_steps_per_second": round(speed),
        "over_the_goal": round(speed / GOAL, 2),
        "seconds_per_step": round(per_step, 6),
        "findings": findings,
        "state_bytes": size,
        "share": shares(enabled, statistics, facts, rows),
    }


def shares(
    enabled: list[Rule], statistics: dict[str, Floats], facts: TensorFacts, rows: int
) -> dict[str, float]:
    """The share of each rule in the time of some chunks."""
    spent: dict[str, float] = defaultdict(float)
    for rule in enabled:
        state: State = {}
        for first in range(0, 5 * rows, rows):
            at = (first + np.arange(rows)) % MADE
            values = scalars(rows, first)
            logged = {name: np.ones(rows, bool) for name in values}
            part = {name: matrix[at] for name, matrix in statistics.items()}
            times = np.zeros(rows, "datetime64[us]")
            data = ChunkData(
                steps=first + np.arange(rows), times=times, scalars=values, logged=logged, statistics=part
            )
            began = time.process_time()
            streams.detect([rule], state, data, facts, leads=True)
            spent[rule.kind] += time.process_time() - began
    total = sum(spent.values())
    return {kind: round(value / total, 3) for kind, value in sorted(spent.items(), key=lambda x: -x[1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--series", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=200, help="steps of a chunk")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    arguments = parser.parse_args()
    for case in arguments.cases:
        print(json.dumps(replay(case, arguments.series, arguments.steps, arguments.rows)), flush=True)


if __name__ == "__main__":
    main()
