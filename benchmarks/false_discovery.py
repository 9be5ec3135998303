"""False discovery rate and power of the claims about changed tensors, on AR(1) noise.

    python benchmarks/false_discovery.py [--trials 40] [--tensors 1000]

One JSON line per case. `null_any` is the share of trials in which any of the tensors is claimed although
none has changed; it is the false discovery rate of that case and has to be at most 0.05, within its error.
With 5 % of the tensors shifted by `shift` standard deviations, `fdr` is the mean share of false claims, and
`power` the share of real changes that are claimed; `power_any_dependence` is that of e-BH.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
from numpy.typing import NDArray
from scipy import signal

from fp8scope_dashboard.analysis.false_discovery import (
    benjamini_hochberg,
    change_p_values,
    e_benjamini_hochberg,
    e_values_of,
)

Floats = NDArray[np.float64]
COLUMNS = 240
CHANGED = 0.05


def noise(generator: np.random.Generator, tensors: int, columns: int, correlation: float) -> Floats:
    """Stationary AR(1) noise of standard deviation 1, float64[tensors, columns]."""
    white = generator.normal(size=(tensors, columns + 300))
    filtered = signal.lfilter([1.0], [1.0, -correlation], white, axis=1)[:, 300:]
    return np.asarray(filtered * np.sqrt(1.0 - correlation**2), np.float64)


def measure(
    trials: int, tensors: int, columns: int, correlation: float, shift: float
) -> dict[str, float | int]:
    generator = np.random.default_rng(0)
    split = 3 * columns // 4
    changed = max(1, int(CHANGED * tensors))
    any_claim, false_shares, powers, certain = [], [], [], []
    began = time.perf_counter()
    for _ in range(trials):
        values = noise(generator, tensors, columns, correlation)
        any_claim.append(benjamini_hochberg(change_p_values(values, split)).any())
        values[:changed, split:] += shift
        p_values = change_p_values(values, split)
        claims = benjamini_hochberg(p_values)
        false_shares.append(claims[changed:].sum() / max(claims.sum(), 1))
        powers.append(claims[:changed].mean())
        certain.append(e_benjamini_hochberg(e_values_of(p_values))[:changed].mean())
    return {
        "tensors": tensors,
        "columns": columns,
        "correlation": correlation,
        "shift": shift,
        "trials": trials,
        "null_any": round(float(np.mean(any_claim)), 4),
        "fdr": round(float(np.mean(false_shares)), 4),
        "power": round(float(np.mean(powers)), 4),
        "power_any_dependence": round(float(np.mean(certain)), 4),
        "seconds": round((time.perf_counter() - began) / trials / 2, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--tensors", type=int, default=1_000)
    arguments = parser.parse_args()
    for columns in (120, COLUMNS):
        for correlation, shift in ((0.0, 2.0), (0.5, 2.0), (0.5, 4.0), (0.8, 4.0), (0.95, 4.0)):
            result = measure(arguments.trials, arguments.tensors, columns, correlation, shift)
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
