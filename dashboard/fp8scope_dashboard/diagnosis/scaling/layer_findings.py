"""Findings about one layer that stands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from fp8scope_dashboard.analysis.onset_search import TensorOnset
from fp8scope_dashboard.analysis.tensor_onsets import first_sustained
from fp8scope_dashboard.diagnosis.findings import Finding
from fp8scope_dashboard.diagnosis.scaling.affected import (
    MIN_MODULES,
    bad_layer,
    layers,
    observed_before,
    only_module,
)
from fp8scope_dashboard.diagnosis.scaling.loss_scale import amax_ratios
from fp8scope_dashboard.diagnosis.scaling.range_use import LARGE_ERROR
from fp8scope_dashboard.diagnosis.tensors import TensorSeries
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.text.numbers import as_factor
from fp8scope_dashboard.text.onsets import steps_in_words

# Powers of two by which the amax of one layer's weight differs from BF16's, and no other layer's.
WEIGHT_APART: Final = 3.0
WEIGHT_ALIKE: Final = 1.0
# The quantisation error of one layer against the median of its role.
ERROR_APART: Final = 10.0


def of_one_layer(
    rows: TensorSeries, reference: TensorSeries | None, grown: Mapping[str, TensorOnset]
) -> Finding | None:
    """A layer whose weights are not BF16's, or whose error stands out."""
    apart = _apart_weights(rows, reference) if reference is not None else []
    if len(apart) == 1 and layers(rows) >= MIN_MODULES:
        position, bits, onset = apart[0]
        size = "larger" if bits > 0 else "smaller"
        # An alert may have told since when it grows.
        since = grown.get(rows.tensors[position].name, TensorOnset(onset, onset - 1))
        what = f"its weight is {as_factor(abs(bits))} times {size} than in BF16, since step {since.in_words}"
        bad = bad_layer(rows.tensors[position].module, since.step, what, [position], rows, "amax")
        return replace(bad, earliest=since.earliest)
    noisy = _apart_errors(rows)
    module = only_module([position for position, _, _ in noisy], rows)
    if not module:
        return None
    position, error, onset = max(noisy, key=lambda item: item[1])
    after = observed_before(rows.error[position], onset, rows)
    what = (
        f"the quantisation error of {rows.tensors[position].name} is {error:.0%} of the signal, more than "
        f"{ERROR_APART:.0f} times that of the other layers, since step {steps_in_words(onset, after)}"
    )
    bad = bad_layer(module, onset, what, [position for position, _, _ in noisy], rows, "noise_to_signal")
    return replace(bad, earliest=after + 1)


def _apart_weights(rows: TensorSeries, reference: TensorSeries) -> list[tuple[int, float, int]]:
    """Weights whose amax is not BF16's, if the other weights' are: position, log2 of the ratio, onset."""
    ratios, steps = amax_ratios(rows, reference)
    weights = np.flatnonzero((rows.roles == "weight") & ~np.isnan(ratios).all(axis=1))
    if len(weights) < MIN_MODULES or not len(steps):
        return []
    last = ratios[weights, -max(1, len(steps) // 4) :]
    levels = np.array([np.nanmedian(row) if np.isfinite(row).any() else 0.0 for row in last])
    if float(np.median(np.abs(levels))) > WEIGHT_ALIKE:
        return []
    apart = []
    for position, level in zip(weights.tolist(), levels.tolist(), strict=True):
        if abs(level) >= WEIGHT_APART:
            onset = int(steps[_begin_of(np.abs(ratios[position]), WEIGHT_APART / 2)])
            apart.append((position, level, onset))
    return apart


def _apart_errors(rows: TensorSeries) -> list[tuple[int, float, int]]:
    """Tensors with a large error that their role does not have: position, error, first step with it."""
    noisy = []
    for role in sorted(set(rows.roles.tolist())):
        positions = np.flatnonzero((rows.roles == role) & ~np.isnan(rows.error).all(axis=1))
        if len(positions) < MIN_MODULES:
            continue
        worst = np.nanmax(rows.error[positions], axis=1)
        limit = max(LARGE_ERROR, ERROR_APART * float(np.median(worst)))
        for position in positions[worst > limit].tolist():
            onset = int(rows.steps[_begin_of(rows.error[position], limit)])
            noisy.append((position, float(np.nanmax(rows.error[position])), onset))
    return noisy


def _begin_of(values: Floats, limit: float) -> int:
    """The row of the first sustained value above a limit, as in the ranking; without one, of the first."""
    with np.errstate(invalid="ignore"):
        over = (values > limit)[None, :]
    first = int(first_sustained(over, np.isfinite(values)[None, :])[0])
    return first if first >= 0 else int(np.argmax(over[0]))
