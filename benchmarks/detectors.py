"""How often the loss detectors alarm falsely, and how soon they find harm, on real and simulated curves.

    python benchmarks/detectors.py --curves DIRECTORY [--trials N] [--peers] [--groups NAME ...]

DIRECTORY contains public training-loss curves, in the form that `benchmarks/verdicts.py` explains. Prints one
JSON line per detector and group:

    detector          the kind of rule with its default parameters; or a detector from PyPI with its defaults
    group             runs or pairs of one kind; 'K=3': one run against three seeds of its configuration
    harm              what is done to the run from the middle on; '' for the line of false alarms
    default           whether fp8scope has it on by default
    pairs             runs, or runs against baselines, of the line
    false_alarm_rate  share of the healthy runs with any alarm; null in lines of a harm
    detected          share of the harmed runs with an alarm at or after the harm's beginning
    median_delay      points from the beginning to the alarm, of those that were detected
    delay_share       the same as a share of the run

Harms begin in the middle: '+1 %' and '+1 nat' at once, 'ramp to 1 %' linearly within a tenth of the run,
'NaN'. The real runs finished well, so every alarm of them is false.

`--peers` adds CUSUM and EWMA (textbook, standardised by the first 100 points), ADWIN and Page-Hinkley of
river, SpikeDetection of Lightning, and trainscope's default detector, on the same series: the loss of one
run, or the relative difference to the baselines' mean. They run in an environment of their own under build/,
on PEER_TRIALS trials, and of the simulated groups only on the shorter ones, because some take 0.2 ms a point.
Lines are printed as they are known; `--groups` runs a part: real, pairs, runs. Random choices have a fixed
seed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import venv
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter
from verdicts import read_groups

from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.detectors import above_baseline, divergence, not_finite, spike

Floats = NDArray[np.float64]
Chance = np.random.Generator

MARGIN, ALPHA, SEED = 0.0025, 0.05, 0
# Shorter curves are validation losses: too few points for any detector.
MIN_POINTS = 200
# Smaller groups in the public data are not re-runs: they contain several configurations under one name.
GROUP_RUNS = 7
ALONE = {"loss_not_finite": not_finite, "loss_spike": spike, "loss_divergence": divergence}
PEERS = ("CUSUM", "EWMA", "ADWIN", "Page-Hinkley", "Lightning SpikeDetection", "trainscope")
# Trials of one group that the detectors from PyPI see, and the most points of a simulated one.
PEER_TRIALS, PEER_POINTS = 10, 600
PARTS = ("real", "pairs", "runs")
BUILD = Path(__file__).parents[1] / "build" / "detector_peers"


@dataclass
class Trial:
    """A run, float64[n], its baselines, float64[K, n], or None, and the point at which a harm begins."""

    losses: Floats
    baselines: Floats | None = None
    at: int | None = None


@dataclass
class Group:
    """Trials of one kind, healthy or harmed."""

    name: str
    trials: list[Trial]
    harm: str = ""
    detectors: tuple[str, ...] = field(default=("above_baseline",))


def harmed(group: Group, harm: str, detectors: tuple[str, ...]) -> Group:
    """The same runs with the harm from the middle on."""
    trials = [
        Trial(_with_harm(trial.losses, harm), trial.baselines, len(trial.losses) // 2)
        for trial in group.trials
    ]
    return Group(group.name, trials, harm, detectors)


def _with_harm(losses: Floats, harm: str) -> Floats:
    points = len(losses)
    since = np.arange(points) - points // 2
    if harm == "ramp to 1 %":
        return np.asarray(losses * (1.0 + 0.01 * np.clip(since / (0.1 * points), 0.0, 1.0)))
    worse = {"+1 %": losses * 1.01, "+1 nat": losses + 1.0, "NaN": np.full(points, np.nan)}[harm]
    return np.where(since >= 0, worse, losses)


def real_groups(directory: Path, trials: int) -> Iterator[Group]:
    """Single runs, and runs against others of their own configuration."""
    everything, _ = read_groups(directory, 1)
    alone = [Trial(curve.losses) for curves in everything.values() for curve in curves]
    alone = [trial for trial in alone if len(trial.losses) >= MIN_POINTS]
    yield Group("real healthy runs", alone, detectors=tuple(ALONE))
    chance = np.random.default_rng(SEED)
    for name, curves in read_groups(directory, GROUP_RUNS)[0].items():
        points = min(map(len, curves))
        if points < MIN_POINTS:
            continue
        losses = np.stack([curve.losses[:points] for curve in curves])
        for seeds in (1, 3, 5):
            chosen = [chance.permutation(len(curves))[: seeds + 1] for _ in range(trials)]
            yield Group(f"{name}, K={seeds}", [Trial(losses[i[0]], losses[i[1:]]) for i in chosen])


def level(points: int) -> Floats:
    """The course of a simulated loss."""
    return np.asarray(2.0 + 3.0 * np.exp(-np.arange(points) / (0.1 * points)))


def autoregressive(chance: Chance, shape: tuple[int, ...], phi: float) -> Floats:
    """AR(1) noise of standard deviation 1 along the last axis."""
    noise = chance.normal(size=(*shape[:-1], shape[-1] + 500)) * np.sqrt(1.0 - phi * phi)
    return np.asarray(lfilter([1.0], [1.0, -phi], noise)[..., 500:])


def unlike_seeds(chance: Chance, seeds: int, points: int) -> dict[str, Floats]:
    """Relative noise float64[seeds + 1, points] of a run and its baselines, by the name of its kind."""
    shape, steps = (seeds + 1, points), np.arange(points)
    ar = {
        f"AR(1) {phi:g}, noise {sd:.1%}": sd * autoregressive(chance, shape, phi)
        for phi in (0.0, 0.5, 0.9, 0.99)
        for sd in (0.005, 0.03)
    }
    offsets, noise = chance.normal(size=(seeds + 1, 1)), 0.002 * chance.normal(size=shape)
    return {
        **ar,
        "heavy tails (t with 2 degrees)": 0.005 * chance.standard_t(2, shape),
        "offsets of seeds .05 %": 0.0005 * offsets + noise,
        "offsets of seeds 1 %, decay in the warm-up": 0.01 * offsets * np.exp(-steps / 60.0) + noise,
    }


def simulated_pairs(trials: int) -> Iterator[Group]:
    """Runs of one configuration whose noise is not shared."""
    chance = np.random.default_rng(SEED)
    for seeds in (1, 3, 5):
        for points in (500, 2000):
            draws = [unlike_seeds(chance, seeds, points) for _ in range(trials)]
            for name in draws[0]:
                arms = [level(points) * (1.0 + draw[name]) for draw in draws]
                yield Group(f"{name}, {points} points, K={seeds}", [Trial(arm[0], arm[1:]) for arm in arms])


def healthy_rises(chance: Chance, points: int) -> dict[str, Floats]:
    """Relative deviations float64[points] of a healthy run from its course, by the name of their kind."""
    steps = np.arange(points)
    noise = 0.01 * chance.normal(size=points)
    kinds = {
        f"AR(1) {phi:g}, noise {sd:.0%}": sd * autoregressive(chance, (points,), phi)
        for phi in (0.0, 0.5, 0.9, 0.99)
        for sd in (0.01, 0.03)
    }
    for count in (2, 4, 8):
        phase = steps % (points // count) / (points // count)
        kinds[f"{count} warm restarts"] = 0.05 * (1.0 + np.cos(np.pi * phase)) + noise
    for length in (10, 50, 200):
        kinds[f"two sources, every {length} steps"] = 0.1 * (steps // length % 2) + noise
    return {
        **kinds,
        "heavy tails (t with 2 degrees)": 0.01 * chance.standard_t(2, points),
        "mixture change of 5 %": 0.05 * (steps >= points // 2) + noise,
        "hump of the warm-up": 0.2 * np.exp(-0.5 * ((steps - 150) / 40.0) ** 2) + noise,
    }


def simulated_runs(trials: int) -> Iterator[Group]:
    """Healthy runs alone that rise for other reasons than divergence."""
    chance = np.random.default_rng(SEED)
    for points in (600, 3000):
        draws = [healthy_rises(chance, points) for _ in range(trials)]
        for name in draws[0]:
            runs = [Trial(level(points) * (1.0 + draw[name])) for draw in draws]
            yield Group(f"{name}, {points} points", runs, detectors=("loss_spike", "loss_divergence"))


def alarms(detector: str, trial: Trial) -> list[int]:
    """The points at which a detector opens."""
    steps = np.arange(len(trial.losses))
    if trial.baselines is None:
        _, findings = ALONE[detector]({}, steps, trial.losses, rules.validate(detector, {}))
    else:
        parameters = {**rules.validate(detector, {}), "margin": MARGIN, "alpha": ALPHA}
        _, findings = above_baseline({}, steps, trial.losses, trial.baselines, parameters)
    return [finding.step for finding in findings if finding.opened]


def line(detector: str, group: Group, opened: list[list[int]], *, default: bool) -> dict[str, Any]:
    """The line of a detector and a group, from the alarms of each trial."""
    of = {"detector": detector, "group": group.name, "harm": group.harm}
    figures: dict[str, Any] = {**of, "default": default, "pairs": len(opened)}
    if not group.harm:
        rate = sum(map(bool, opened)) / len(opened)
        return {**figures, "false_alarm_rate": round(rate, 4), "detected": None, "median_delay": None}
    delays, shares = [], []
    for steps, trial in zip(opened, group.trials, strict=False):
        at = trial.at or 0
        after = [step - at for step in steps if step >= at]
        delays += after[:1]
        shares += [delay / len(trial.losses) for delay in after[:1]]
    return {
        **figures,
        "false_alarm_rate": None,
        "detected": round(len(delays) / len(opened), 4),
        "median_delay": float(np.median(delays)) if delays else None,
        "delay_share": round(float(np.median(shares)), 4) if delays else None,
    }


def groups_of(directory: Path | None, trials: int, parts: Collection[str] = PARTS) -> Iterator[Group]:
    """All healthy groups, each followed by its harmed ones."""
    for group in real_groups(directory, trials) if directory and "real" in parts else ():
        yield group
        if group.detectors == ("above_baseline",):
            yield from (harmed(group, harm, group.detectors) for harm in ("+1 %", "ramp to 1 %", "+1 nat"))
        else:
            yield harmed(group, "+1 nat", ("loss_spike", "loss_divergence"))
            yield harmed(group, "NaN", ("loss_not_finite",))
    for group in simulated_pairs(trials) if "pairs" in parts else ():
        yield group
        yield harmed(group, "+1 nat", group.detectors)
        if "offsets" in group.name:
            yield harmed(group, "+1 %", group.detectors)
    for group in simulated_runs(trials) if "runs" in parts else ():
        yield group
        yield harmed(group, "+1 nat", ("loss_divergence",))


def peer_python() -> Path:
    """The interpreter of the peers' environment, which is made on the first call."""
    python = BUILD / "bin" / "python"
    if not python.exists():
        venv.create(BUILD, with_pip=True)
        # What the peers need besides themselves comes from this environment (numpy, scipy, torch, Lightning).
        site = next(BUILD.glob("lib/python*/site-packages"))
        (site / "shared.pth").write_text(f"{Path(np.__file__).parents[1]}\n")
        for package in ("river", "trainscope"):
            # No dependencies: they would bring a second torch. A peer that cannot be imported says so.
            subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", package], check=False)
        subprocess.run([python, "-m", "pip", "install", "-q", "pandas"], check=False)
    return python


def start_peers() -> subprocess.Popen[str]:
    """The process of the detectors from PyPI: imports once, then answers one path at a time."""
    command = [str(peer_python()), str(Path(__file__).with_name("detectors_peers.py")), *PEERS]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


def peer_lines(group: Group, peers: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """The lines of the detectors from PyPI."""
    assert peers.stdin is not None and peers.stdout is not None
    trials = group.trials[:PEER_TRIALS]
    series = []
    for trial in trials:
        if trial.baselines is None:
            series.append(trial.losses)
            continue
        mean = trial.baselines.mean(axis=0)
        series.append((trial.losses - mean) / np.abs(mean))
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "series.npz"
        np.savez(path, *series)
        print(path, file=peers.stdin, flush=True)
        answers = json.loads(peers.stdout.readline())
    for peer in PEERS:
        if "error" in answers[peer]:
            yield {"detector": peer, "group": group.name, "harm": group.harm, "error": answers[peer]["error"]}
        else:
            yield line(peer, group, answers[peer]["alarms"], default=False)


def main() -> None:
    """Print the JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--curves", type=Path, help="without it only simulated groups")
    parser.add_argument("--trials", type=int, default=40, help="pairs or simulated runs of one line")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--groups", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    peers = start_peers() if arguments.peers else None
    for group in groups_of(arguments.curves, arguments.trials, arguments.groups):
        for detector in group.detectors:
            opened = [alarms(detector, trial) for trial in group.trials]
            answer = line(detector, group, opened, default=True)
            print(json.dumps({"benchmark": "detectors", **answer}), flush=True)
        is_long = "points" in group.name and len(group.trials[0].losses) > PEER_POINTS
        if peers is not None and group.harm != "NaN" and not is_long:
            for answer in peer_lines(group, peers):
                print(json.dumps({"benchmark": "detectors", **answer}), flush=True)
    if peers is not None:
        peers.communicate()


if __name__ == "__main__":
    main()
