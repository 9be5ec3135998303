"""Step (c): the scaling. Decides which fault of the scales or ranges explains the tensors, if any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from fp8scope_dashboard.analysis.onset_search import TensorOnset
from fp8scope_dashboard.analysis.tensor_onsets import first_sustained
from fp8scope_dashboard.diagnosis.findings import EvidenceLink, Finding
from fp8scope_dashboard.diagnosis.scaling.loss_scale import CommonFactor, amax_ratios, common_factor
from fp8scope_dashboard.diagnosis.scaling.range_use import LARGE_ERROR, Leaving, flushing, saturating
from fp8scope_dashboard.diagnosis.scaling.scale_faults import (
    MIN_ROWS,
    SEVERAL,
    FaultKind,
    ScaleFault,
    scale_fault,
)
from fp8scope_dashboard.diagnosis.tensors import Scaling, TensorSeries, scaling_of
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.text.numbers import as_factor, count
from fp8scope_dashboard.text.onsets import steps_in_words

# A fault is one layer's if the model has at least so many layers, and no other layer has it.
MIN_MODULES: Final = 4
# A reset history concerns all tensors at one step: at least so many, that agree within two steps.
MIN_RESETS: Final = 3
# Share of the gradients that underflow, or of all tensors that saturate, from which it is not a few layers.
MOST: Final = 0.5
# Powers of two by which the amax of one layer's weight differs from BF16's, and no other layer's.
WEIGHT_APART: Final = 3.0
WEIGHT_ALIKE: Final = 1.0
# The quantisation error of one layer against the median of its role.
ERROR_APART: Final = 10.0
# Scales that follow a margin of 0 or more clamp some elements: below this share only if the run is worse.
HARMFUL_SHARE: Final = 0.05
NAMED: Final = 10
SHOWN: Final = 3


@dataclass(frozen=True, kw_only=True)
class Training:
    """The other steps' knowledge about the training, which some rules need.

    Attributes:
        norm_bits: log2 of the gradient norm over BF16's at each step of both; empty if unknown.
        norm_steps: these steps.
        is_worse: whether the loss is worse than BF16's at the end, or in trouble that BF16 does not show.
        last_step: of the run.
        grown: by name, since when tensors have grown, as the run's alerts say.
    """

    norm_bits: Floats
    norm_steps: np.ndarray[tuple[int], np.dtype[np.int64]]
    is_worse: bool = False
    trouble_at: int | None = None
    last_step: int | None = None
    grown: Mapping[str, TensorOnset] = field(default_factory=dict)


def examine(
    rows: TensorSeries, recipe: Mapping[str, Any], reference: TensorSeries | None, training: Training
) -> Finding:
    """The finding of this step.

    Args:
        rows: the run's FP8 tensors.
        reference: the tensors of a BF16 run of the same model; None if there is none.
    """
    if not len(rows.steps) or not np.isfinite(rows.scale).any():
        return Finding(
            step="scaling", outcome="unknown", sentence="The run has no FP8 tensor telemetry to look at."
        )
    scalings = {role: scaling_of(recipe, role) for role in set(rows.roles.tolist())}
    faults = scale_faults(rows, scalings)
    saturated, flushed = saturating(rows), flushing(rows)
    factor = common_factor(rows, reference)
    harmful = factor is not None and _harms(factor, rows, saturated, flushed, training)
    if factor is not None and harmful and not _moves_first(faults, rows):
        return _loss_scale(factor, rows, saturated, flushed)
    return (
        _of_static_gradients(faults, flushed, rows)
        or _of_scales(faults, rows, scalings)
        or _of_ranges(saturated, flushed, rows, scalings, training)
        or _of_one_layer(rows, reference, training.grown)
        or _clear(rows, scalings, factor, saturated, training)
    )


def scale_faults(rows: TensorSeries, scalings: Mapping[str, Scaling]) -> dict[int, ScaleFault]:
    """By tensor position, the scales that do not follow."""
    faults = {}
    calls = rows.calls
    for position, tensor in enumerate(rows.tensors):
        fault = scale_fault(
            rows.amax[position],
            rows.scale[position],
            tensor.largest,
            scalings[tensor.role],
            begins=rows.begins,
            calls=float(calls[position]),
        )
        if fault is not None and not _is_configured(fault, scalings[tensor.role]):
            faults[position] = fault
    return faults


def _is_configured(fault: ScaleFault, scaling: Scaling) -> bool:
    """Return whether the recipe itself updates scales rarely, which makes less than a factor of two."""
    waits = fault.last - fault.first + 1 if fault.kind == "frozen" else fault.every
    return scaling.interval > 1 and waits <= 2 * scaling.interval and abs(fault.bits) < 1.0


def _moves_first(faults: Mapping[int, ScaleFault], rows: TensorSeries) -> bool:
    """Return whether gradients' scales followed and then stopped: the loss scale only made it visible."""
    gradients = [fault for position, fault in faults.items() if rows.tensors[position].role == "grad_output"]
    return any(fault.kind in ("frozen", "stale") and fault.first > SHOWN for fault in gradients)


def _of_scales(
    faults: Mapping[int, ScaleFault], rows: TensorSeries, scalings: Mapping[str, Scaling]
) -> Finding | None:
    resets = {p: fault for p, fault in faults.items() if fault.kind == "reset"}
    counted = {p: fault for p, fault in faults.items() if fault.kind != "reset"}
    if len(resets) >= MIN_RESETS and len(resets) >= len(counted):
        step, agreeing = _common_step(resets, rows)
        if len(agreeing) >= MIN_RESETS:
            return _reset(step, agreeing, rows)
    if not counted:
        return None
    kinds = Counter(fault.kind for fault in counted.values())
    kind = max(kinds, key=lambda name: (kinds[name], name))
    chosen = {p: fault for p, fault in counted.items() if fault.kind == kind}
    module = _only_module(list(counted), rows)
    if kind == "offset":
        return _offset(chosen, rows, scalings, module)
    return _not_matching(kind, chosen, rows, module)


def _of_static_gradients(
    faults: Mapping[int, ScaleFault], flushed: Sequence[Leaving], rows: TensorSeries
) -> Finding | None:
    """Gradients whose scale never moved in the whole run, and which underflow: no scaling at all."""
    static = [p for p, fault in faults.items() if fault.kind == "frozen" and fault.first <= SHOWN]
    if len(static) < len(faults) or any(rows.tensors[p].role != "grad_output" for p in static):
        return None
    vanishing = [leaving for leaving in flushed if leaving.tensor in static]
    return _underflow(vanishing, len(static), rows) if vanishing else None


def _common_step(faults: Mapping[int, ScaleFault], rows: TensorSeries) -> tuple[int, list[int]]:
    """The step at which most faults begin, within two rows, and these tensors."""
    first = Counter(fault.first for fault in faults.values())
    start = max(
        first, key=lambda row: sum(number for other, number in first.items() if 0 <= other - row <= 8)
    )
    agreeing = [p for p, fault in faults.items() if 0 <= fault.first - start <= 8]
    return int(rows.steps[start]), agreeing


def _reset(step: int, positions: Sequence[int], rows: TensorSeries) -> Finding:
    return Finding(
        step="scaling",
        outcome="cause",
        sentence=f"The amax histories were reset at step {step:,}: the scales of "
        f"{count(len(positions), 'tensor')} were made only from the steps after it, not from their "
        "whole history.",
        cause="history_reset",
        onset=step,
        tensors=_names(positions, rows),
        suggestion="Save and load the scaling state (scale, amax history, number of calls) with the "
        "checkpoint.",
        links=_tensor_links(positions, rows, "scale"),
        is_proven=True,
    )


def _not_matching(
    kind: FaultKind, faults: Mapping[int, ScaleFault], rows: TensorSeries, module: str
) -> Finding:
    order = sorted(faults, key=lambda p: (faults[p].first, -abs(faults[p].bits)))
    worst = max(faults, key=lambda p: abs(faults[p].bits))
    fault, onset = faults[worst], int(rows.steps[faults[order[0]].first])
    after = _observed_before(rows.scale[order[0]], onset, rows)
    since = steps_in_words(onset, after)
    whose = f"{_counted(order, rows)}, first {rows.tensors[order[0]].name},"
    if kind == "frozen":
        until = "" if fault.lasts else f" until step {int(rows.steps[fault.last]):,}"
        what = (
            f"The scales of {whose} are frozen: constant from step {since} on{until}, stale while the amax "
            f"moved by a factor of up to {as_factor(abs(fault.bits))}"
        )
        cause, suggestion = (
            "frozen_scale",
            "Find what stops the update of the scales, for example at a resume.",
        )
    else:
        how = f"they lag by {fault.lag} steps" if fault.lag else "they do not fit the amax of the last steps"
        if fault.every:
            how = f"they change only every {fault.every} steps"
        what = (
            f"The scales of {whose} are stale since step {since}: {how}, and are off by a factor of up to "
            f"{as_factor(abs(fault.bits))}"
        )
        cause, suggestion = (
            "stale_scale",
            "Update the scales in every step, and load the state of the same checkpoint.",
        )
    if module:
        bad = _bad_layer(module, onset, f"{what[0].lower()}{what[1:]}", order, rows, "scale")
        return replace(bad, is_proven=True, earliest=after + 1)
    return Finding(
        step="scaling",
        outcome="cause",
        sentence=f"{what}.",
        cause=cause,
        onset=onset,
        tensors=_names(order, rows),
        suggestion=suggestion,
        links=_tensor_links(order, rows, "scale"),
        is_proven=True,
        earliest=after + 1,
    )


def _offset(
    faults: Mapping[int, ScaleFault], rows: TensorSeries, scalings: Mapping[str, Scaling], module: str
) -> Finding:
    order = sorted(faults, key=lambda p: (faults[p].first, -abs(faults[p].bits)))
    bits = float(np.median([faults[p].bits for p in order]))
    onset = int(rows.steps[faults[order[0]].first])
    after = _observed_before(rows.scale[order[0]], onset, rows)
    side = (
        "too large, so that large values saturate" if bits < 0 else "too small, so that small values vanish"
    )
    what = (
        f"the scales of {_counted(order, rows)} are {as_factor(abs(bits))} times {side}, since step "
        f"{steps_in_words(onset, after)}"
    )
    if module:
        bad = _bad_layer(module, onset, what, order, rows, "scale")
        return replace(bad, is_proven=True, earliest=after + 1)
    gradients = all(rows.tensors[p].role == "grad_output" for p in order)
    margin = scalings[rows.tensors[order[0]].role].margin + bits
    cause = "margin" if bits < 0 else "underflow" if gradients else "margin_too_large"
    if cause == "underflow":
        what = f"the gradients underflow: {what}"
    else:
        what = f"the margin is too {'small' if bits < 0 else 'large'} (effectively {margin:.0f}): {what}"
    return Finding(
        step="scaling",
        outcome="cause",
        sentence=f"{what[0].upper()}{what[1:]}.",
        cause=cause,
        onset=onset,
        tensors=_names(order, rows),
        suggestion="Set the margin to 0 or more, or use current scaling."
        if bits < 0
        else "Set the margin to 0.",
        links=_tensor_links(order, rows, "scale"),
        is_proven=True,
        earliest=after + 1,
    )


def _of_ranges(
    saturated: Sequence[Leaving],
    flushed: Sequence[Leaving],
    rows: TensorSeries,
    scalings: Mapping[str, Scaling],
    training: Training,
) -> Finding | None:
    gradients = int((rows.roles == "grad_output").sum())
    # A head's gradients have tiny probabilities that may vanish without harm: one such tensor is no cause.
    vanishing = [leaving for leaving in flushed if rows.tensors[leaving.tensor].role == "grad_output"]
    if gradients >= 1 and len(vanishing) >= max(2, MOST * gradients):
        return _underflow(vanishing, gradients, rows)
    forward = [leaving for leaving in flushed if rows.tensors[leaving.tensor].role != "grad_output"]
    if forward:
        return _of_forward(forward, rows, scalings)
    if not saturated:
        return None
    positions = [leaving.tensor for leaving in saturated]
    share = max(leaving.share for leaving in saturated)
    margins = {scalings[rows.tensors[p].role].margin for p in positions}
    in_trouble = training.is_worse or training.trouble_at is not None
    if min(margins) >= 0 and share < HARMFUL_SHARE and not in_trouble:
        return None
    module = _only_module(positions, rows)
    if module:
        what = (
            f"up to {share:.1%} of {rows.tensors[positions[0]].name} saturates, {_first(saturated[0], rows)}"
        )
        bad = _bad_layer(module, saturated[0].onset, what, positions, rows, "saturation_rate")
        return replace(bad, earliest=saturated[0].after + 1)
    return Finding(
        step="scaling", outcome="cause",
        sentence=f"The margin is too small ({min(margins):.0f}): up to {share:.1%} of the elements of "
        f"{_counted(positions, rows)} saturate, {_first(saturated[0], rows)}, though the scales follow "
        "the recipe.",
        cause="margin", onset=saturated[0].onset, tensors=_names(positions, rows),
        suggestion="Use a margin of 1 or more, or current scaling, which needs no head room.",
        links=_tensor_links(positions, rows, "saturation_rate"), earliest=saturated[0].after + 1,
    )  # fmt: skip


def _underflow(vanishing: Sequence[Leaving], gradients: int, rows: TensorSeries) -> Finding:
    positions = [leaving.tensor for leaving in vanishing]
    share = float(np.median([leaving.share for leaving in vanishing]))
    return Finding(
        step="scaling", outcome="cause",
        sentence=f"The gradients underflow: {share:.0%} of the elements of {len(positions)} of {gradients} "
        f"grad_output tensors become zero, {_first(vanishing[0], rows)}.",
        cause="underflow", onset=vanishing[0].onset, tensors=_names(positions, rows),
        suggestion="Use E5M2 or block scaling for the gradients, or a larger loss scale.",
        links=_tensor_links(positions, rows, "underflow_rate"), earliest=vanishing[0].after + 1,
    )  # fmt: skip


def _of_forward(
    forward: Sequence[Leaving], rows: TensorSeries, scalings: Mapping[str, Scaling]
) -> Finding | None:
    """Inputs and weights that become zero: one layer's, or under a margin that is too large."""
    positions = [leaving.tensor for leaving in forward]
    share = max(leaving.share for leaving in forward)
    module = _only_module(positions, rows)
    if module:
        name = rows.tensors[positions[0]].name
        what = f"{share:.0%} of the elements of {name} become zero, {_first(forward[0], rows)}"
        bad = _bad_layer(module, forward[0].onset, what, positions, rows, "underflow_rate")
        return replace(bad, earliest=forward[0].after + 1)
    margin = max(scalings[rows.tensors[p].role].margin for p in positions)
    if margin <= 0:
        return None
    return Finding(
        step="scaling", outcome="cause",
        sentence=f"The margin is too large ({margin:.0f}): up to {share:.0%} of the elements of "
        f"{_counted(positions, rows)} become zero, {_first(forward[0], rows)}.",
        cause="margin_too_large", onset=forward[0].onset, tensors=_names(positions, rows),
        suggestion="Set the margin to 0.",
        links=_tensor_links(positions, rows, "underflow_rate"), earliest=forward[0].after + 1,
    )  # fmt: skip


def _of_one_layer(
    rows: TensorSeries, reference: TensorSeries | None, grown: Mapping[str, TensorOnset]
) -> Finding | None:
    """A layer whose weights are not BF16's, or whose error stands out."""
    apart = _apart_weights(rows, reference) if reference is not None else []
    if len(apart) == 1 and _modules(rows) >= MIN_MODULES:
        position, bits, onset = apart[0]
        size = "larger" if bits > 0 else "smaller"
        # An alert may have told since when it grows.
        since = grown.get(rows.tensors[position].name, TensorOnset(onset, onset - 1))
        what = f"its weight is {as_factor(abs(bits))} times {size} than in BF16, since step {since.in_words}"
        bad = _bad_layer(rows.tensors[position].module, since.step, what, [position], rows, "amax")
        return replace(bad, earliest=since.earliest)
    noisy = _apart_errors(rows)
    module = _only_module([position for position, _, _ in noisy], rows)
    if not module:
        return None
    position, error, onset = max(noisy, key=lambda item: item[1])
    after = _observed_before(rows.error[position], onset, rows)
    what = (
        f"the quantisation error of {rows.tensors[position].name} is {error:.0%} of the signal, more than "
        f"{ERROR_APART:.0f} times that of the other layers, since step {steps_in_words(onset, after)}"
    )
    bad = _bad_layer(module, onset, what, [position for position, _, _ in noisy], rows, "noise_to_signal")
    return replace(bad, earliest=after + 1)


def _observed_before(values: Floats, step: int, rows: TensorSeries) -> int:
    """The last step before `step` with an observation; without one, the step before it, when it began."""
    earlier = rows.steps[np.isfinite(values) & (rows.steps < step)]
    return int(earlier[-1]) if len(earlier) else step - 1


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


def _harms(
    factor: CommonFactor,
    rows: TensorSeries,
    saturated: Sequence[Leaving],
    flushed: Sequence[Leaving],
    training: Training,
) -> bool:
    """Return whether the loss scale does harm.

    It jumps, gradients leave their range, it is not divided out again, or the run is worse than BF16.
    """
    gradients = int((rows.roles == "grad_output").sum())
    leaving = {item.tensor for item in (*saturated, *flushed)}
    outside = sum(rows.tensors[position].role == "grad_output" for position in leaving)
    since = training.norm_bits[training.norm_steps >= factor.onset]
    undivided = bool(len(since)) and float(np.median(since)) * np.sign(factor.bits) >= 0.5 * abs(factor.bits)
    return factor.jumps or undivided or outside >= MOST * gradients or training.is_worse


def _loss_scale(
    factor: CommonFactor, rows: TensorSeries, saturated: Sequence[Leaving], flushed: Sequence[Leaving]
) -> Finding:
    positions = np.flatnonzero(rows.roles == "grad_output").tolist()
    size = f"2^{abs(factor.bits):.0f} times {'larger' if factor.bits > 0 else 'smaller'}"
    leaving = [item for item in (*saturated, *flushed) if rows.tensors[item.tensor].role == "grad_output"]
    then = ""
    if leaving:
        verb = "saturate" if leaving[0].kind == "saturation" else "underflow"
        then = f", and {count(len(leaving), 'gradient')} {verb} together"
    return Finding(
        step="scaling",
        outcome="cause",
        sentence=f"The loss scale is wrong: since step {factor.onset:,} all gradients are {size} than in "
        f"{factor.against}, "
        f"while inputs and weights are not{then}.",
        cause="loss_scale",
        onset=factor.onset,
        tensors=_names(positions, rows),
        suggestion="Use the loss scale of the BF16 run, and divide it out of the gradients before the "
        "optimizer's step.",
        links=_tensor_links(positions, rows, "amax"),
    )


def _bad_layer(
    module: str, onset: int, what: str, positions: Sequence[int], rows: TensorSeries, statistic: str
) -> Finding:
    """A finding about one layer. `statistic`: what the evidence shows; it is what was found, and recorded."""
    return Finding(
        step="scaling", outcome="cause",
        sentence=f"One layer is bad, {module}: {what}.",
        cause="bad_layer", onset=onset, tensors=_names(positions, rows),
        suggestion="Compute this layer in BF16, and check its weights and its scaling state.",
        links=_tensor_links(positions, rows, statistic),
        observation=f"The layer {module} stands out: {what}.",
    )  # fmt: skip


def _clear(
    rows: TensorSeries,
    scalings: Mapping[str, Scaling],
    factor: CommonFactor | None,
    saturated: Sequence[Leaving],
    training: Training,
) -> Finding:
    """Return what was looked at without a fault. It covers only the tensors and steps that were observed."""
    seen = np.isfinite(rows.scale) & (rows.scale > 0) & np.isfinite(rows.amax)
    enough = seen.sum(axis=1) >= MIN_ROWS
    if not enough.any():
        sentence = f"No scale was observed in {MIN_ROWS} steps or more, so that nothing can be said of them."
        return Finding(step="scaling", outcome="unknown", sentence=sentence)
    stated = np.array([scalings[tensor.role].kind in ("delayed", "current") for tensor in rows.tensors])
    stated &= rows.calls <= SEVERAL
    steps = rows.steps[seen.any(axis=0)]
    where = (
        f"{int(enough.sum())} of {count(len(rows.tensors), 'tensor')} in {count(len(steps), 'step')} "
        f"({int(steps[0]):,} to {int(steps[-1]):,}"
    )
    where += f" of {training.last_step:,})" if training.last_step is not None else ")"
    follow = int((enough & stated).sum())
    if follow == int(enough.sum()):
        what = f"All scales that were observed follow their amax: {where}."
    elif follow:
        what = f"{follow} scales follow their amax, and no other one is frozen: {where}."
    else:
        what = f"No scale is frozen: {where}. The recipe states no formula to compare them with."
    note = "" if factor is None else f" A loss scale of 2^{factor.bits:.0f} does no harm."
    if not np.isfinite(rows.saturated).any():
        range_use = " Whether tensors leave their range was not recorded."
    elif not saturated:
        range_use = " None leaves its range."
    else:
        share = max(leaving.share for leaving in saturated)
        tensors = _counted([leaving.tensor for leaving in saturated], rows)
        range_use = (
            f" Up to {share:.1%} of the elements of {tensors} saturate, {_first(saturated[0], rows)}; "
            "nothing shows that this does harm."
        )
    return Finding(step="scaling", outcome="clear", sentence=f"{what}{range_use}{note}")


def _only_module(positions: Sequence[int], rows: TensorSeries) -> str:
    """The layer that all these tensors belong to; empty if they are several, or the model has few layers."""
    modules = {rows.tensors[position].module for position in positions}
    return modules.pop() if len(modules) == 1 and _modules(rows) >= MIN_MODULES else ""


def _modules(rows: TensorSeries) -> int:
    return len(set(rows.modules.tolist()))


def _counted(positions: Sequence[int], rows: TensorSeries) -> str:
    roles = {rows.tensors[position].role for position in positions}
    role = f"{roles.pop()} " if len(roles) == 1 else ""
    return f"{count(len(positions), f'{role}tensor')} of {len(rows.tensors)}"


def _first(leaving: Leaving, rows: TensorSeries) -> str:
    return f"first {rows.tensors[leaving.tensor].name} from step {leaving.since}"


def _names(positions: Sequence[int], rows: TensorSeries) -> tuple[str, ...]:
    return tuple(rows.tensors[position].name for position in positions[:NAMED])


def _tensor_links(positions: Sequence[int], rows: TensorSeries, statistic: str) -> tuple[EvidenceLink, ...]:
    names = [rows.tensors[position].name for position in positions[:SHOWN]]
    return tuple(EvidenceLink("tensor", name, {"tensor": name, "statistic": statistic}) for name in names)
