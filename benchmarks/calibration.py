"""How often detectors and verdicts are wrong on real runs. Prints one JSON line.

    python benchmarks/calibration.py DIRECTORY [--trials N] [--block N]

DIRECTORY contains public training-loss curves. Each dataset has two files: `*_loss.csv.gz` (run_id, step,
loss) and `*_runs.csv` (run_id and `group` or `test_case`; optionally `precision_pair` and `precision_arm`,
`final_val_loss`, `index_origin`). Runs of one group have the same configuration, so every alarm or verdict of
a difference among them is wrong. The line's `answers` has one object per `question`. Random choices have a
fixed seed.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.detectors import LossDetector, above_baseline, divergence, not_finite, spike
from fp8scope_dashboard.analysis.losses.alignment import LossCurve
from fp8scope_dashboard.analysis.losses.arms import EquivalenceTest, two_one_sided_tests
from fp8scope_dashboard.analysis.losses.seeds import PUBLIC, spread_of
from fp8scope_dashboard.analysis.losses.verdict import compare_losses

Floats = NDArray[np.float64]

MARGIN, ALPHA, SEED = 0.0025, 0.05, 0
# Shorter curves are too short for streaming detectors.
CURVE_POINTS = 500
# Smaller groups in the public data are not re-runs: they contain several configurations under one name.
GROUP_RUNS = 7
# Parameters of above_baseline that replace its defaults.
Parameters = dict[str, float]
ALONE: dict[str, LossDetector] = {
    "loss_not_finite": not_finite,
    "loss_spike": spike,
    "loss_divergence": divergence,
}


@dataclass(frozen=True)
class Group:
    """Runs of one configuration."""

    name: str
    curves: list[LossCurve]


def read_groups(directory: Path) -> list[Group]:
    """All groups, with their curves of at least CURVE_POINTS points."""
    groups: dict[str, list[LossCurve]] = defaultdict(list)
    for path in sorted(directory.glob("*_loss.csv.gz")):
        dataset = next(
            p for p in directory.glob("*_runs.csv") if path.name.startswith(p.name[: -len("runs.csv")])
        )
        names = {run["run_id"]: _group_name(run) for run in _rows(dataset)}
        for run_id, curve in _curves(path).items():
            if len(curve) >= CURVE_POINTS:
                groups[names[run_id]].append(curve)
    return [Group(name, curves) for name, curves in sorted(groups.items())]


def _group_name(run: dict[str, str]) -> str:
    # Series that count from 0 and from 1 do not align, so they are different groups.
    return run.get("group") or f"{run['test_case']} {run.get('index_origin', '')}"


def _curves(path: Path) -> dict[str, LossCurve]:
    points: dict[str, list[tuple[int, float]]] = defaultdict(list)
    with gzip.open(path, "rt", newline="") as file:
        reader = csv.reader(file)
        next(reader)
        for run_id, step, loss in reader:
            points[run_id].append((int(step), float(loss)))
    return {run_id: _curve(rows) for run_id, rows in points.items()}


def _curve(rows: list[tuple[int, float]]) -> LossCurve:
    return LossCurve(steps=np.array([step for step, _ in rows]), losses=np.array([loss for _, loss in rows]))


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def alone(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Alarms of the detectors that need no baseline. All runs finished well, so each alarm is false."""
    curves = [curve for group in groups for curve in group.curves]
    for kind, detector in ALONE.items():
        opened = [_openings(detector, kind, curve) for curve in curves]
        yield {
            "question": "false alarms, one run alone",
            "detector": kind,
            "runs": len(curves),
            "points": sum(map(len, curves)),
            "runs_alarmed": sum(bool(steps) for steps in opened),
            "alarms": sum(map(len, opened)),
            "rate_per_run": round(sum(bool(steps) for steps in opened) / len(curves), 4),
        }


def _openings(detector: LossDetector, kind: str, curve: LossCurve) -> list[int]:
    _, findings = detector({}, curve.steps, curve.losses, rules.validate(kind, {}))
    return [finding.onset_step for finding in findings if finding.opened]


def against_baseline(
    groups: Sequence[Group], seeds: int, trials: int, parameters: Parameters
) -> Iterator[dict[str, Any]]:
    """One run against `seeds` others of its own group: every alarm and every 'worse' or 'better' is wrong."""
    chance = np.random.default_rng(SEED)
    for group in groups:
        if len(group.curves) < GROUP_RUNS:
            continue
        alarms, wrong, excluded, delta = 0, 0, 0, []
        for _ in range(trials):
            run, *baseline = (group.curves[i] for i in chance.permutation(len(group.curves))[: seeds + 1])
            alarms += bool(_baseline_alarms(run, baseline, parameters))
            result = compare_losses([run], baseline, margin=MARGIN, alpha=ALPHA)
            wrong += result.verdict in ("worse", "better")
            if result.noise_interval and result.delta is not None:
                excluded += not result.noise_interval[0] <= 0.0 <= result.noise_interval[1]
                delta.append(result.delta)
        yield {
            "question": "false alarms and verdicts, one run against seeds of its own configuration",
            "group": group.name,
            "runs": len(group.curves),
            "seeds": seeds,
            **parameters,
            "trials": trials,
            "above_baseline_alarm_rate": round(alarms / trials, 4),
            "bound": ALPHA,
            "wrong_rate": round(wrong / trials, 4),
            "noise_band_excludes_0_rate": round(excluded / trials, 4),
            "delta_sd": float(f"{np.std(delta):.3g}"),
        }


def _baseline_alarms(run: LossCurve, baseline: Sequence[LossCurve], parameters: Parameters) -> list[int]:
    steps = run.steps
    for curve in baseline:
        steps = np.intersect1d(steps, curve.steps)
    losses = [curve.losses[np.searchsorted(curve.steps, steps)] for curve in (run, *baseline)]
    validated = {**rules.validate("above_baseline", parameters), "margin": MARGIN, "alpha": ALPHA}
    _, findings = above_baseline({}, steps, losses[0], np.stack(losses[1:]), validated)
    return [finding.step for finding in findings if finding.opened]


def detection(
    groups: Sequence[Group], seeds: int, trials: int, parameters: Parameters
) -> Iterator[dict[str, Any]]:
    """Delay of `above_baseline` after a known rise of the loss at the middle of a run."""
    chance = np.random.default_rng(SEED)
    group = max(groups, key=lambda group: len(group.curves))
    for raised in (0.005, 0.01, 0.02, 0.05):
        delays, early = [], 0
        for _ in range(trials):
            run, *baseline = (group.curves[i] for i in chance.permutation(len(group.curves))[: seeds + 1])
            change = int(run.steps[len(run) // 2])
            worse = LossCurve(
                steps=run.steps, losses=np.where(run.steps >= change, run.losses * (1.0 + raised), run.losses)
            )
            alarms = _baseline_alarms(worse, baseline, parameters)
            early += any(step < change for step in alarms)
            delays.append(next((step - change for step in alarms if step >= change), None))
        detected = [delay for delay in delays if delay is not None]
        yield {
            "question": "delay of above_baseline after a known rise at the middle of the run",
            "group": group.name,
            "seeds": seeds,
            **parameters,
            "rise": raised,
            "found": len(detected),
            "alarmed_before": early,
            "of": trials,
            "median_delay_steps": float(np.median(detected)) if detected else None,
        }


def finals(directory: Path, seeds: int, trials: int) -> Iterator[dict[str, Any]]:
    """Verdicts on final validation losses: a group against itself, and FP8 against BF16."""
    runs = [
        run
        for path in sorted(directory.glob("*_runs.csv"))
        for run in _rows(path)
        if run.get("final_val_loss")
    ]
    groups: dict[str, list[float]] = defaultdict(list)
    pairs: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in runs:
        groups[run["group"]].append(float(run["final_val_loss"]))
        if run.get("precision_pair"):
            pairs[run["precision_pair"], run["precision_arm"]].append(float(run["final_val_loss"]))
    chance = np.random.default_rng(SEED)
    large = [np.array(values) for values in groups.values() if len(values) >= max(GROUP_RUNS, 2 * seeds)]
    verdicts: dict[str, int] = defaultdict(int)
    for _ in range(trials):
        values = chance.permutation(large[chance.integers(len(large))])
        verdicts[_test(values[:seeds], values[seeds : 2 * seeds]).verdict] += 1
    yield {
        "question": "verdicts on final validation losses, the same configuration in both arms",
        "groups": len(large),
        "seeds_per_arm": seeds,
        "trials": trials,
        **{name: round(n / trials, 4) for name, n in sorted(verdicts.items())},
    }
    for pair in sorted({name for name, _ in pairs}):
        fp8, bf16 = np.array(pairs[pair, "fp8"]), np.array(pairs[pair, "bf16"])
        test = _test(fp8, bf16)
        yield {
            "question": "verdict on FP8 against BF16, final validation losses",
            "pair": pair,
            "fp8_runs": len(fp8),
            "bf16_runs": len(bf16),
            "verdict": test.verdict,
            "delta": float(f"{test.delta:.3g}"),
            "interval": [float(f"{bound:.3g}") for bound in test.interval],
        }


def _test(run: Floats, baseline: Floats) -> EquivalenceTest:
    scale = float(baseline.mean())
    spread = spread_of([run / scale, baseline / scale], PUBLIC, seeds=len(baseline))
    return two_one_sided_tests(run, baseline, MARGIN, ALPHA, spread, scale=scale)


def main() -> None:
    """Print the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--block", type=int, help="points in a block of above_baseline, else its default")
    arguments = parser.parse_args()
    if arguments.directory is None:
        print(json.dumps({"benchmark": "calibration", "skipped": "pass the directory of the loss curves"}))
        return
    parameters: Parameters = {} if arguments.block is None else {"block": arguments.block}
    groups = read_groups(arguments.directory)
    answers = [alone(groups), detection(groups, 3, min(arguments.trials, 50), parameters)]
    answers += [against_baseline(groups, seeds, arguments.trials, parameters) for seeds in (1, 3, 5)]
    answers += [finals(arguments.directory, seeds, 10 * arguments.trials) for seeds in (3, 4)]
    print(
        json.dumps({"benchmark": "calibration", "answers": [line for answer in answers for line in answer]})
    )


if __name__ == "__main__":
    main()
