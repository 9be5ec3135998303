"""Tensors of healthy trainings, element statistics included, raise no alarm of any default rule."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.signal import lfilter
from scipy.special import erf, erfc

from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.detection import streams
from fp8scope_dashboard.alerts.detectors import State, TensorFacts
from fp8scope_dashboard.alerts.models import Rule
from fp8scope_dashboard.telemetry.codec import ChunkData

Floats = NDArray[np.float64]
Statistics = dict[str, Floats]

ROWS, TENSORS, NUMEL = 1_500, 12, 1e6
LARGEST, SMALLEST = 448.0, 2.0**-10
ROLES = ("input", "weight", "grad_output")
STEPS = np.arange(ROWS)[:, np.newaxis]
GRADIENT = np.arange(TENSORS) % 3 == 2


def tensors(
    level: Floats | float = 1.0, *, history: int = 16, spread: float = 0.15, phi: float = 0.9
) -> Statistics:
    """Normal elements of a standard deviation that varies about `level`, and the scales of their amaxes.

    `history` is that of a delayed scale; 0 is the scale of the current amax.
    """
    random = np.random.default_rng(3)
    noise = lfilter([1.0], [1.0, -phi], random.standard_normal((ROWS, TENSORS)), axis=0)
    deviation = level * np.exp(spread * np.sqrt(1.0 - phi**2) * noise) * np.exp(random.normal(-2, 1, TENSORS))
    amax = deviation * (4.9 + 0.25 * random.gumbel(size=deviation.shape))
    known = amax
    if history:
        padded = np.concatenate([np.repeat(amax[:1], history, axis=0), amax[:-1]])
        known = np.lib.stride_tricks.sliding_window_view(padded, history, axis=0).max(axis=-1)
    scale = (LARGEST / known).astype(np.float32).astype(float)
    clipped = random.poisson(NUMEL * erfc(LARGEST / scale / deviation / np.sqrt(2.0)))
    lost = random.poisson(NUMEL * erf(SMALLEST / scale / deviation / np.sqrt(2.0)))
    return {
        "numel": np.full(amax.shape, NUMEL),
        "amax": amax,
        "scale": scale,
        "saturated": np.where(amax * scale > LARGEST * 1.000001, np.maximum(clipped, 1), 0).astype(float),
        "underflow": lost.astype(float),
        "nonfinite": np.zeros(amax.shape),
    }


def changed(statistics: Statistics, name: str, rows: slice | list[int], value: float) -> Statistics:
    """The same with another value of half of the tensors; `every`: of all statistics."""
    for each in statistics if name == "every" else (name,):
        statistics[each][rows, : TENSORS // 2] = value
    return statistics


def late_layer() -> Statistics:
    return changed(changed(tensors(), "every", slice(700), np.nan), "scale", [700], 1.0)


def fallback() -> Statistics:
    begun = changed(tensors(), "every", slice(700, 800), np.nan)
    return changed(changed(begun, "scale", [800], 1e-4), "saturated", [800], 2e5)


HEALTHY: Mapping[str, Callable[[], Statistics]] = {
    "delayed": tensors,
    "long history": lambda: tensors(history=1_024),
    "most recent": lambda: tensors(history=1, spread=0.25, phi=0.0),
    "current": lambda: tensors(history=0),
    "settles": lambda: tensors(1.0 + 9.0 * np.exp(-STEPS / 300)),
    "loss scale": lambda: tensors(np.where(GRADIENT, 2.0 ** (STEPS // 300), 1.0)),
    "restarts": lambda: tensors(np.where(GRADIENT & (STEPS % 500 < 50), 4.0, 1.0)),
    "loud batches": lambda: tensors(np.where(STEPS % 8 == 0, 4.0, 1.0)),
    "two sources": lambda: tensors(np.where(STEPS // 100 % 2 == 0, 3.0, 1.0)),
    "GradScaler": lambda: changed(tensors(), "nonfinite", [0, 1, 2, 3, 600, 1_400, 1_401], 100.0),
    "late layer": late_layer,
    "fallback": fallback,
}


def opened(statistics: Statistics) -> dict[str, int]:
    """The alarms of all default rules, in chunks of 250 rows: the first onset, by kind."""
    kinds = [kind for kind in rules.KINDS.values() if kind.is_default]
    enabled = [Rule(pk=i, kind=kind.name, parameters={}) for i, kind in enumerate(kinds)]
    names = [f"blocks.{i // 3}.mlp.{ROLES[i % 3]}" for i in range(TENSORS)]
    facts = TensorFacts.unknown(names, LARGEST)
    state: State = {}
    alarms: dict[str, int] = {}
    for first in range(0, ROWS, 250):
        rows = slice(first, first + 250)
        part = {name: matrix[rows] for name, matrix in statistics.items()}
        steps = 1 + STEPS[rows, 0]
        data = ChunkData(
            steps=steps, times=np.zeros(len(steps), "datetime64[us]"), scalars={}, logged={}, statistics=part
        )
        for rule, finding in streams.detect(enabled, state, data, facts, leads=True):
            if finding.opened:
                alarms.setdefault(rule.kind, finding.onset_step)
        state = json.loads(json.dumps(state))
    return alarms


@pytest.mark.parametrize("training", HEALTHY)
def test_a_healthy_training_raises_no_alarm(training: str) -> None:
    assert opened(HEALTHY[training]()) == {}


@pytest.mark.parametrize("period", [1, 2, 10])
@pytest.mark.parametrize(
    ("name", "kind"), [("saturated", "saturation_rate"), ("nonfinite", "tensor_not_finite")]
)
def test_a_fault_in_some_steps_of_the_same_training_is_found(name: str, kind: str, period: int) -> None:
    faulty = changed(tensors(), name, list(range(700, ROWS, period)), 5e4)
    assert opened(faulty)[kind] == 701


def test_a_scale_that_jumps_long_after_a_fallback_is_found() -> None:
    faulty = fallback()
    faulty["scale"][1_200, 2] *= 2.0**12
    assert opened(faulty)["scale_jump"] == 1_201
