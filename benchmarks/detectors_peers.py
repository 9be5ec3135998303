"""Alarms of detectors from PyPI, for `benchmarks/detectors.py --peers`, which runs it in their environment.

    python detectors_peers.py NAME...

Reads paths of .npz files, one a line, and prints one JSON object for each of them: for each name either
`alarms`, the points of the alarms in each series, or `error`.
Only alarms of a rise count. Detectors have their default parameters, except that Page-Hinkley looks for rises
only.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

# Points from which the textbook charts take their mean and standard deviation.
REFERENCE = 100
Update = Callable[[float], bool]


def cusum(series: Any) -> Update:
    """One-sided CUSUM with k = .5 and h = 5 (Page, 1954)."""
    mean, sd = series[:REFERENCE].mean(), series[:REFERENCE].std(ddof=1)
    total = 0.0

    def update(value: float) -> bool:
        nonlocal total
        total = max(total + (value - mean) / sd - 0.5, 0.0)
        return bool(total > 5.0)

    return after(REFERENCE, update)


def ewma(series: Any) -> Update:
    """One-sided EWMA chart with weight .2 and L = 3 (Roberts, 1959)."""
    mean, sd = series[:REFERENCE].mean(), series[:REFERENCE].std(ddof=1)
    average = 0.0

    def update(value: float) -> bool:
        nonlocal average
        average += 0.2 * ((value - mean) / sd - average)
        return bool(average > 3.0 * math.sqrt(0.2 / 1.8))

    return after(REFERENCE, update)


def after(points: int, update: Update) -> Update:
    """The same without the first points."""
    left = points

    def later(value: float) -> bool:
        nonlocal left
        left -= 1
        return left < 0 and update(value)

    return later


def adwin(_: Any) -> Update:
    """river's ADWIN; alarms are changes to a higher mean."""
    from river.drift import ADWIN  # type: ignore[import-not-found,unused-ignore]

    detector = ADWIN()

    def update(value: float) -> bool:
        before = detector.estimation
        detector.update(value)
        return bool(detector.drift_detected) and detector.estimation > before

    return update


def page_hinkley(_: Any) -> Update:
    """river's Page-Hinkley test for rises."""
    from river.drift import PageHinkley  # type: ignore[import-not-found,unused-ignore]

    detector = PageHinkley(mode="up")

    def update(value: float) -> bool:
        detector.update(value)
        return bool(detector.drift_detected)

    return update


def lightning(_: Any) -> Update:
    """Lightning's SpikeDetection, without stopping the training at an alarm."""
    import torch
    from lightning.fabric import Fabric
    from lightning.fabric.utilities.spike import SpikeDetection, TrainingSpikeException

    fabric = Fabric(accelerator="cpu", devices=1)
    detector = SpikeDetection(exclude_batches_path=tempfile.mkdtemp())
    count = -1

    def update(value: float) -> bool:
        nonlocal count
        count += 1
        try:
            detector.on_train_batch_end(fabric, torch.tensor(value), None, count)
        except TrainingSpikeException:
            return True
        return False

    return update


def trainscope(_: Any) -> Update:
    """trainscope's default detector, a change-point detector."""
    from trainscope.core.detectors import changepoint  # type: ignore[import-not-found,unused-ignore]

    detector = changepoint.ChangePointDetector()

    def update(value: float) -> bool:
        score = detector.update(value)
        return score is not None and score > 0.0

    return update


DETECTORS = {
    "CUSUM": cusum,
    "EWMA": ewma,
    "ADWIN": adwin,
    "Page-Hinkley": page_hinkley,
    "Lightning SpikeDetection": lightning,
    "trainscope": trainscope,
}


def main() -> None:
    """Print a JSON object for each line of the input."""
    for line in sys.stdin:
        with np.load(line.strip()) as file:
            every = [file[name] for name in file.files]
        print(json.dumps(answers_to(every, sys.argv[1:])), flush=True)


def answers_to(every: list[Any], names: list[str]) -> dict[str, Any]:
    """The alarms of each detector in each series."""
    answers: dict[str, Any] = {}
    for name in names:
        try:
            found = []
            for series in every:
                update = DETECTORS[name](series)
                found.append([i for i, value in enumerate(series.tolist()) if update(value)])
            answers[name] = {"alarms": found}
        except ImportError as error:
            answers[name] = {"error": f"cannot be imported: {error}"}
    return answers


if __name__ == "__main__":
    main()
