"""False alarms of the rules of rates, and delays of injected faults, on simulated tensors.

    python benchmarks/rate_noise.py [--tensors N] [--rows N] [--groups NAME ...]

Prints a JSON line per rule, group, level and spread. The rate of a healthy tensor is its level times noise
whose logarithm has the standard deviation `spread`; the groups are in HEALTHY. In the groups of FAULTS every
tensor is at fault from the middle of the rows on.

Fields: `rule`, `group`, `level`, `spread`, `tensors`, `rows`; for healthy groups `alarms`, the alarms that
opened; for faults `found`, the share of tensors that an alarm names, and `delay`, the observations from the
beginning of the fault to the first alarm.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping

import django
import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "fp8scope_dashboard.settings.test")
django.setup()

from fp8scope_dashboard.alerts import rules  # noqa: E402
from fp8scope_dashboard.alerts.detection.streams import TENSOR_DETECTORS  # noqa: E402
from fp8scope_dashboard.alerts.detectors import ConditionChange, TensorFacts, tensor_rows  # noqa: E402

Floats = NDArray[np.float64]
Noise = Callable[[np.random.Generator, int, int, float], Floats]

NUMEL = 1e6
SPREADS = (0.3, 0.6)
STATISTICS = {"saturation_rise": "saturated", "underflow_rise": "underflow", "saturation_rate": "saturated"}
LEVELS = {"saturation_rise": (3e-5, 3e-3), "underflow_rise": (0.02, 0.2)}


def correlated(phi: float) -> Noise:
    """The exponential of AR(1) noise."""

    def noise(random: np.random.Generator, rows: int, n: int, spread: float) -> Floats:
        innovations = random.standard_normal((rows, n)) * np.sqrt(1.0 - phi * phi)
        innovations[0] = random.standard_normal(n)
        values: Floats = np.exp(spread * lfilter([1.0], [1.0, -phi], innovations, axis=0))
        return values

    return noise


def about(curve: Callable[[Floats], Floats]) -> Noise:
    """White noise about a curve of the row, which begins anywhere in the first 2,000 rows of the curve."""

    def noise(random: np.random.Generator, rows: int, n: int, spread: float) -> Floats:
        shifted = np.arange(rows)[:, np.newaxis] + random.integers(0, 2_000, n)
        return curve(shifted.astype(float)) * correlated(0.0)(random, rows, n, spread)

    return noise


def heavy_tails(random: np.random.Generator, rows: int, n: int, spread: float) -> Floats:
    return 1.0 + spread * np.abs(random.standard_t(2.0, (rows, n)))


HEALTHY: Mapping[str, Noise] = {
    "white": correlated(0.0),
    "ar .9": correlated(0.9),
    "ar .99": correlated(0.99),
    "heavy tails": heavy_tails,
    "recalibrated every 500": about(lambda row: 1.0 + 3.0 * (row % 500) / 500),
    "recalibrated every 2000": about(lambda row: 1.0 + 3.0 * (row % 2_000) / 2_000),
    "warm-up": about(lambda row: 1.0 + np.clip((row - 1_000) / 1_000, 0.0, 1.0)),
    "grows by 75 %": about(lambda row: 1.0 + 3.0 * (row - 2_000).clip(0) / 20_000),
    "settles": about(lambda row: 1.0 + 9.0 * np.exp(-row / 300)),
}
# By group: the rule, and the rate since the beginning of the fault.
FAULTS: Mapping[str, tuple[str, Callable[[Floats], Floats]]] = {
    "0 to .09 % in 1000": ("saturation_rise", lambda since: 9e-4 * np.clip(since / 1_000, 0.0, 1.0)),
    "2 to 45 % in 2000": ("underflow_rise", lambda since: 0.02 + 0.43 * np.clip(since / 2_000, 0.0, 1.0)),
    "5 % every 2": ("saturation_rate", lambda since: 0.05 * ((since >= 0) & (since % 2 == 0))),
    "5 % every 10": ("saturation_rate", lambda since: 0.05 * ((since >= 0) & (since % 10 == 0))),
}


def findings(rule: str, rates: Floats) -> list[ConditionChange]:
    """What a rule with its defaults finds in rates, float64[R, n]."""
    rows, n = rates.shape
    facts = TensorFacts.unknown([f"blocks.{i}.mlp.input" for i in range(n)])
    counts = np.round(np.clip(rates, 0.0, 1.0) * NUMEL)
    statistics = {"numel": np.full(rates.shape, NUMEL), STATISTICS[rule]: counts}
    _, chunk = tensor_rows({}, np.arange(rows), statistics, facts)
    return TENSOR_DETECTORS[rule].detect({}, chunk, rules.validate(rule, {}))[1]


def print_healthy(group: str, n: int, rows: int) -> None:
    for rule, levels in LEVELS.items():
        for level in levels:
            for spread in SPREADS:
                rates = level * HEALTHY[group](np.random.default_rng(1), rows, n, spread)
                opened = [each for each in findings(rule, rates) if each.opened and not each.update]
                line = {"rule": rule, "group": group, "level": level, "spread": spread}
                print(json.dumps({**line, "tensors": n, "rows": rows, "alarms": len(opened)}), flush=True)


def print_fault(group: str, n: int, rows: int) -> None:
    rule, rate = FAULTS[group]
    for spread in SPREADS:
        noise = correlated(0.0)(np.random.default_rng(1), rows, n, spread)
        since = np.arange(rows, dtype=float)[:, np.newaxis] - rows // 2
        opened = [each for each in findings(rule, rate(since) * noise) if each.opened]
        delays = [each.step - rows // 2 for each in opened]
        tensors = max((each.evidence["tensors_over"] for each in opened), default=0)
        line = {"rule": rule, "group": group, "spread": spread, "tensors": n, "rows": rows}
        print(json.dumps({**line, "found": tensors / n, "delay": min(delays, default=None)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--rows", type=int, default=5_000)
    parser.add_argument("--groups", nargs="+", choices=[*HEALTHY, *FAULTS], default=[*HEALTHY, *FAULTS])
    arguments = parser.parse_args()
    for group in arguments.groups:
        run = print_healthy if group in HEALTHY else print_fault
        run(group, arguments.tensors, arguments.rows)


if __name__ == "__main__":
    main()
