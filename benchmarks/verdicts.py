"""How often verdicts on losses are wrong, and what harm they see, on real and simulated curves.

    python benchmarks/verdicts.py --curves DIRECTORY [--trials N] [--looks N] [--seconds S] [--prior]

DIRECTORY contains public training-loss curves. Each dataset has two files: `*_loss.csv.gz` (run_id, step,
loss) and `*_runs.csv` (run_id and `group` or `test_case`; optionally `precision_pair` and `precision_arm`,
`index_origin`). Runs of one group have the same configuration, so every 'worse' or 'better' among them is
wrong. Simulated groups need no directory. Prints one JSON line per group and mode:

    group        name of the group, and the column of the loss
    verdict      mode: 1v1 is one run against one baseline run, 3v3 three seeds against three
    null_wrong   share of comparisons of equal configurations that are 'worse' or 'better' at any of the looks
    power_H      share of comparisons that are 'worse' after the loss of the run is raised by H per cent
    cannot_tell  share of comparisons of equal configurations that are undecided at the end
    looks        comparisons during a run, at equal distances, the last at its end
    equivalent   share of comparisons of equal configurations that are equivalent at the end, by the margin
                 that the badge names, in margins; equivalent_wrong_M is the share that is equivalent within M
                 margins or less under a harm of M margins
    trials       comparisons of the line: as many as its share of `--seconds` allows

Groups of seeds that wander lastingly come first, and have more time: their shares are the hardest.
Then one line per group, mode, harm and onset, of a harm that begins at this share of the run:

    said               median share of the run at which 'worse' is said, at one of 20 looks from the onset on;
                       null if never
    onset_said_above   median of how far the run is above by then, in per cent
    missed             share of the trials in which it is not said

These are on the real groups and on ONSET_GROUPS. `--seconds` bounds all parts, so that each of them prints
what it has.

Lines of real FP8-BF16 pairs have the shares of all verdicts instead. `--prior` prints the spread between
seeds, as estimated with each group left out, and nothing else. Random choices have a fixed seed.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import digamma, polygamma
from verdict_curves import HARMS as ONSET_HARMS
from verdict_curves import harmed, simulated

from fp8scope_dashboard.analysis.losses.alignment import LossCurve
from fp8scope_dashboard.analysis.losses.result import LossComparison
from fp8scope_dashboard.analysis.losses.sequence import COMMON_POINTS
from fp8scope_dashboard.analysis.losses.verdict import compare_losses

MARGIN, ALPHA, SEED = 0.0025, 0.05, 0
HARMS = {"power_0.25": 0.0025, "power_0.5": 0.005, "power_1": 0.01}
MODES = ((1, 1), (1, 3), (3, 3))
# Smaller groups in the public data are not re-runs: they contain several configurations under one name.
GROUP_RUNS = 7
# Harms, in margins, under which a claim of equivalence within so many margins is wrong.
WRONG_MARGINS = (1.0, 1.5, 2.0, 3.0)
# Harms that begin, and the looks at a run until they are said.
ONSETS, ONSET_LOOKS = tuple(i / 10 for i in range(1, 10)), 20
# The share of the time for harms that begin, and the groups with too few points for them.
ONSET_SHARE, ONSET_POINTS = 0.45, 200
# Simulated groups with harms that begin, and groups that count for so many others in the time of null trials.
ONSET_GROUPS = ("simulated: 1500 points, seeds wander by .1 %",)
HARD_GROUPS, HARD_SHARE = ("wander by .3 %", "wander by .5 %"), 6
# Runs of one group whose lengths differ by less than this share have one schedule.
SAME_LENGTH = 0.02
Draw = Callable[[np.random.Generator, int], list[LossCurve]]


def read_groups(
    directory: Path, least: int
) -> tuple[dict[str, list[LossCurve]], dict[str, list[list[LossCurve]]]]:
    """Groups of equal runs, and pairs of arms (FP8, BF16), by name."""
    groups: dict[str, list[LossCurve]] = defaultdict(list)
    pairs: dict[str, dict[str, list[LossCurve]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(directory.glob("*_loss.csv.gz")):
        dataset = max(
            (p for p in directory.glob("*_runs.csv") if path.name.startswith(p.name[: -len("runs.csv")])),
            key=lambda p: len(p.name),
        )
        with dataset.open(newline="") as file:
            runs = {run["run_id"]: run for run in csv.DictReader(file)}
        kind, curves = _curves(path)
        for run_id, curve in curves.items():
            run = runs[run_id]
            # Series that count from 0 and from 1 do not align, so they are different groups.
            name = run.get("group") or f"{run['test_case']} {run.get('index_origin', '')}".strip()
            if len(curve) >= COMMON_POINTS:
                groups[f"{name} ({kind})"].append(curve)
            if run.get("precision_pair"):
                pairs[f"{run['precision_pair']} ({kind})"][run["precision_arm"]].append(curve)
    alike = {name: _of_one_length(curves) for name, curves in groups.items()}
    large = {name: curves for name, curves in sorted(alike.items()) if len(curves) >= least}
    arms = {name: [pair["fp8"], pair["bf16"]] for name, pair in sorted(pairs.items()) if len(pair) == 2}
    return large, arms


def _curves(path: Path) -> tuple[str, dict[str, LossCurve]]:
    points: dict[str, list[tuple[int, float]]] = defaultdict(list)
    with gzip.open(path, "rt", newline="") as file:
        reader = csv.reader(file)
        kind = next(reader)[2]
        for run_id, step, loss in reader:
            points[run_id].append((int(step), float(loss)))
    columns = {run_id: np.array(rows) for run_id, rows in points.items()}
    return kind, {
        run_id: LossCurve(steps=rows[:, 0].astype(np.int64), losses=rows[:, 1], planned=int(rows[:, 0].max()))
        for run_id, rows in columns.items()
    }


def _of_one_length(curves: Sequence[LossCurve]) -> list[LossCurve]:
    """The curves that end near the most common end."""
    ends = Counter(int(curve.steps[-1]) for curve in curves)
    end = max(ends, key=lambda each: sum(n for e, n in ends.items() if abs(e - each) <= SAME_LENGTH * each))
    return [curve for curve in curves if abs(int(curve.steps[-1]) - end) <= SAME_LENGTH * end]


def null_line(
    name: str, draw: Draw, mode: tuple[int, int], most: int, looks: int, seconds: float
) -> dict[str, Any]:
    """The error rates and the power of one mode on one group, from at most `most` trials."""
    chance = np.random.default_rng(SEED)
    wrong, at_end, undecided, trials = 0, 0, 0, 0
    power: Counter[str] = Counter()
    within: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    began = time.perf_counter()
    while trials < most and (not trials or time.perf_counter() - began < seconds):
        trials += 1
        curves = draw(chance, sum(mode))
        arms = curves[: mode[0]], curves[mode[0] :]
        seen = [_verdict(*(_first(arm, look / looks) for arm in arms)) for look in range(1, looks + 1)]
        mistaken = [verdict in ("worse", "better") for verdict in seen]
        wrong, at_end = wrong + any(mistaken), at_end + mistaken[-1]
        undecided += seen[-1] == "cannot_tell"
        within[_within(*arms)] += 1
        for margins in WRONG_MARGINS:
            raised = [replace(curve, losses=curve.losses * (1.0 + margins * MARGIN)) for curve in arms[0]]
            named = _compared(raised, arms[1]).judged_margin
            passed[f"equivalent_wrong_{margins:g}"] += named is not None and named <= margins * MARGIN
        for label, harm in HARMS.items():
            raised = [replace(curve, losses=curve.losses * (1.0 + harm)) for curve in arms[0]]
            power[label] += _verdict(raised, arms[1]) == "worse"
    return {
        "group": name,
        "verdict": f"{mode[0]}v{mode[1]}",
        "null_wrong": round(wrong / trials, 4),
        "null_wrong_at_end": round(at_end / trials, 4),
        **{label: round(power[label] / trials, 4) for label in HARMS},
        "cannot_tell": round(undecided / trials, 4),
        "equivalent": {name: round(number / trials, 4) for name, number in sorted(within.items()) if name},
        **{name: round(number / trials, 4) for name, number in passed.items()},
        "looks": looks,
        "trials": trials,
    }


def _first(curves: Sequence[LossCurve], share: float) -> list[LossCurve]:
    """The curves up to a share of their length."""
    parts = []
    for curve in curves:
        kept = int(np.searchsorted(curve.steps, share * curve.steps[-1], side="right"))
        parts.append(replace(curve, steps=curve.steps[:kept], losses=curve.losses[:kept]))
    return parts


def _compared(runs: Sequence[LossCurve], baselines: Sequence[LossCurve]) -> LossComparison:
    return compare_losses(runs, baselines, margin=MARGIN, alpha=ALPHA)


def _verdict(runs: Sequence[LossCurve], baselines: Sequence[LossCurve]) -> str:
    return _compared(runs, baselines).verdict


def _within(runs: Sequence[LossCurve], baselines: Sequence[LossCurve]) -> str:
    """The margins within which two arms are equivalent; empty if they are not."""
    named = _compared(runs, baselines).judged_margin
    return "" if named is None else f"{named / MARGIN:g}"


def onset_line(
    name: str, draw: Draw, mode: tuple[int, int], harm: str, onset: float, most: int, seconds: float
) -> dict[str, Any]:
    """When a harm that begins at a share of the run is said to be worse."""
    chance = np.random.default_rng(SEED)
    said: list[float] = []
    above: list[float] = []
    trials, began = 0, time.perf_counter()
    while trials < most and (not trials or time.perf_counter() - began < seconds):
        trials += 1
        curves = draw(chance, sum(mode))
        arm = [harmed(curve, harm, onset) for curve in curves[: mode[0]]]
        for look in range(1, ONSET_LOOKS + 1):
            # As many looks as the rest of the run has, closer after the onset.
            share = onset + (1.0 - onset) * (look / ONSET_LOOKS) ** 2
            runs = _first([curve for curve, _ in arm], share)
            if _verdict(runs, _first(curves[mode[0] :], share)) == "worse":
                said.append(share)
                above.append(100.0 * float(arm[0][1][len(runs[0]) - 1]))
                break
    return {
        "group": name,
        "verdict": f"{mode[0]}v{mode[1]}",
        "harm": harm,
        "onset": onset,
        "said": round(float(np.median(said)), 2) if said else None,
        "onset_said_above": round(float(np.median(above)), 2) if above else None,
        "missed": round(1.0 - len(said) / trials, 4),
        "trials": trials,
    }


def onset_lines(draws: dict[str, Draw], most: int, seconds: float) -> Iterator[dict[str, Any]]:
    """The lines of harms that begin, in random order, each with its share of the time that is left."""
    chance, began = np.random.default_rng(SEED), time.perf_counter()
    cases = [
        (harm, onset, mode, name)
        for onset in ONSETS
        for harm in ONSET_HARMS
        for mode in MODES
        for name in draws
    ]
    for i, place in enumerate(chance.permutation(len(cases))):
        harm, onset, mode, name = cases[place]
        left = seconds - (time.perf_counter() - began)
        if left <= 0.0:
            return
        yield onset_line(name, draws[name], mode, harm, onset, most, left / (len(cases) - i))


def pair_lines(name: str, arms: Sequence[list[LossCurve]]) -> Iterator[dict[str, Any]]:
    """The verdicts on real FP8 runs: each alone, and all of them."""
    fp8, bf16 = arms
    for mode, verdicts in (
        (f"1v{len(bf16)}", [_verdict([run], bf16) for run in fp8]),
        (f"{len(fp8)}v{len(bf16)}", [_verdict(fp8, bf16)]),
    ):
        counts = Counter(verdicts)
        yield {"group": name, "verdict": mode, "looks": 1, "verdicts": dict(sorted(counts.items()))}


def prior_lines(groups: dict[str, list[LossCurve]]) -> Iterator[dict[str, Any]]:
    """s0 and d0 of the spread between seeds (Smyth, 2004, moments of log variances), leaving groups out."""
    estimates = {name: _log_variance(curves) for name, curves in groups.items()}
    for left_out in (None, *groups):
        kept = [estimate for name, estimate in estimates.items() if name != left_out]
        if len(kept) < 3:
            continue
        logs, excess = np.array([log for log, _ in kept]), np.mean([noise for _, noise in kept])
        between = max(float(logs.var(ddof=1)) - float(excess), 1e-3)
        half = _inverse_trigamma(between)
        spread = float(np.exp((logs.mean() + digamma(half) - np.log(half)) / 2.0))
        yield {"left_out": left_out or "", "s0": round(spread, 6), "d0": round(2.0 * half, 2)}


def _log_variance(curves: Sequence[LossCurve]) -> tuple[float, float]:
    """The bias-corrected logarithm of the relative variance of final losses, and its sampling variance."""
    finals = np.array([curve.losses[-max(5, len(curve) // 10) :].mean() for curve in curves])
    half = (len(finals) - 1) / 2.0
    variance = float(finals.var(ddof=1)) / float(finals.mean()) ** 2
    return float(np.log(variance) - digamma(half) + np.log(half)), float(polygamma(1, half))


def _inverse_trigamma(value: float) -> float:
    """x with trigamma(x) = value, by Newton's method."""
    x = 0.5 + 1.0 / value
    for _ in range(50):
        step = polygamma(1, x) * (1.0 - polygamma(1, x) / value) / polygamma(2, x)
        x += float(step)
        if abs(step) < 1e-9 * x:
            break
    return x


def _draw_from(curves: Sequence[LossCurve]) -> Draw:
    return lambda chance, count: [curves[i] for i in chance.permutation(len(curves))[:count]]


def main() -> None:
    """Print the JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--curves", type=Path)
    parser.add_argument("--trials", type=int, default=200, help="most trials of one line")
    parser.add_argument("--seconds", type=float, default=240.0, help="time for all lines together")
    parser.add_argument("--looks", type=int, default=20)
    parser.add_argument("--least-runs", type=int, default=GROUP_RUNS, help="runs of the smallest real group")
    parser.add_argument("--prior", action="store_true")
    arguments = parser.parse_args()
    groups, pairs = read_groups(arguments.curves, arguments.least_runs) if arguments.curves else ({}, {})
    if arguments.prior:
        for line in prior_lines(groups):
            print(json.dumps(line), flush=True)
        return
    draws = {**{name: _draw_from(curves) for name, curves in groups.items()}, **simulated()}
    for name, arms in pairs.items():
        for line in pair_lines(name, arms):
            print(json.dumps({"benchmark": "verdicts", **line}), flush=True)
    lines = [
        (name, mode, HARD_SHARE if name.endswith(HARD_GROUPS) else 1)
        for name in sorted(draws, key=lambda name: not name.endswith(HARD_GROUPS))
        for mode in MODES
        if sum(mode) <= len(groups.get(name, range(sum(mode))))
    ]
    left, began = (1.0 - ONSET_SHARE) * arguments.seconds, time.perf_counter()
    for i, (name, mode, weight) in enumerate(lines):
        rest = left - (time.perf_counter() - began)
        share = rest * weight / sum(each for _, _, each in lines[i:])
        line = null_line(name, draws[name], mode, arguments.trials, arguments.looks, share)
        print(json.dumps({"benchmark": "verdicts", **line}), flush=True)
    long = {
        name: draw
        for name, draw in draws.items()
        if (name in ONSET_GROUPS or name in groups)
        and len(draw(np.random.default_rng(SEED), 1)[0]) >= ONSET_POINTS
    }
    for line in onset_lines(long, arguments.trials, ONSET_SHARE * arguments.seconds):
        print(json.dumps({"benchmark": "verdicts", **line}), flush=True)


if __name__ == "__main__":
    main()
