"""One fault, one onset: ranking, diagnosis, alerts and verdict name the same step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from dashboard.helpers.tensors import detected
from numpy.typing import NDArray

from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.detectors import divergence, not_finite, spike
from fp8scope_dashboard.analysis.losses.alignment import LossCurve
from fp8scope_dashboard.analysis.losses.verdict import compare_losses
from fp8scope_dashboard.analysis.tensor_onsets import default_limit, ranked
from fp8scope_dashboard.diagnosis.curves import troubles
from fp8scope_dashboard.diagnosis.scaling.range_use import flushing, saturating
from fp8scope_dashboard.diagnosis.tensors import CataloguedTensor, TensorSeries

Floats = NDArray[np.float64]
STEPS = np.arange(1000)
NUMEL = 100_000.0
CHANCE = np.random.default_rng(5)


def noisy(rates: Floats) -> Floats:
    """Counted shares with the scatter of NUMEL elements and of batches."""
    scattered = np.clip(rates, 0.0, 1.0) * np.exp(CHANCE.normal(0.0, 0.15, len(rates)))
    return np.asarray(CHANCE.binomial(int(NUMEL), np.clip(scattered, 0.0, 1.0)) / NUMEL)


def after(onset: int, value: float, before: float = 0.0) -> Floats:
    return np.where(onset <= STEPS, value, before)


def slope(onset: int, end: float, before: float = 0.0) -> Floats:
    return before + end * np.clip((STEPS - onset) / (len(STEPS) - onset), 0.0, 1.0)


# An alert judges while the run goes on, and a slow rise of underflow against the tensor's own past.
ALERT_SLACK = 100
# Name, statistic, rates, the earliest and the latest step that is right.
TENSOR_FAULTS: list[tuple[str, str, Floats, int, int]] = [
    ("saturation at once", "saturation", after(400, 0.02), 400, 400),
    ("a little saturation at once", "saturation", after(400, 0.003, 1e-5), 400, 400),
    ("saturation that grows", "saturation", slope(300, 0.2), 300, 310),
    ("underflow at once", "underflow", after(500, 0.8, 0.004), 500, 500),
    ("underflow beside a usual share", "underflow", after(500, 0.8, 0.04), 500, 500),
    ("underflow that grows", "underflow", slope(400, 0.9, 0.002), 400, 420),
    ("underflow that grows from a usual share", "underflow", slope(400, 0.9, 0.03), 400, 450),
]


@pytest.mark.parametrize(("name", "kind", "rates", "low", "high"), TENSOR_FAULTS)
def test_tensors(name: str, kind: str, rates: Floats, low: int, high: int) -> None:
    observed = noisy(rates)
    statistic = f"{kind}_rate"
    ranking = int(ranked(observed[None, :], statistic, default_limit(statistic)).onset[0])
    columns = observed[None, :] * NUMEL
    none = np.zeros_like(columns)
    table = TensorSeries(
        tensors=(
            CataloguedTensor(
                index=0, name="a.grad_output", module="a", role="grad_output", largest=448.0, numel=int(NUMEL)
            ),
        ),
        steps=STEPS,
        amax=none + 1.0,
        scale=none + 448.0,
        saturated=columns if kind == "saturation" else none,
        underflow=columns if kind == "underflow" else none,
        nonfinite=none,
        numel=none + NUMEL,
        error=none * np.nan,
    )
    (leaving,) = saturating(table) if kind == "saturation" else flushing(table)
    counted = {"saturated" if kind == "saturation" else "underflow": columns.T}
    alerts = [
        finding.onset_step
        for rule in (statistic, f"{kind}_rise")
        for finding in detected(rule, {"numel": np.full((len(STEPS), 1), NUMEL), **counted})
        if finding.opened
    ]
    assert ranking == leaving.onset, "the ranking and the diagnosis"
    assert low <= ranking <= high
    assert -3 <= min(alerts) - ranking <= (3 if high - low < 20 else ALERT_SLACK), "the alert"


def loss(seed: int = 0) -> Floats:
    chance = np.random.default_rng(seed)
    return np.asarray((2.0 + 2.0 * np.exp(-STEPS / 150.0)) * (1.0 + chance.normal(0.0, 0.01, len(STEPS))))


def lasting_jump(losses: Floats) -> Floats:
    return np.where(STEPS >= 500, losses * 1.5, losses)


def diverging(losses: Floats) -> Floats:
    return losses * (1.0 + slope(500, 0.5))


def broken(losses: Floats) -> Floats:
    return np.where(STEPS >= 500, np.nan, losses)


LOSS_FAULTS: list[tuple[Callable[[Floats], Floats], str, int]] = [
    (lasting_jump, "jump", 1),
    (diverging, "rise", 60),
    (broken, "not_finite", 0),
]


@pytest.mark.parametrize(("fault", "kind", "slack"), LOSS_FAULTS)
def test_losses(fault: Callable[[Floats], Floats], kind: str, slack: int) -> None:
    losses, healthy = fault(loss(1)), loss(2)
    first = troubles(STEPS, losses)[0]
    onsets = {"diagnosis": first.onset}
    assert first.kind == kind
    for name, detector in (
        ("loss_not_finite", not_finite), ("loss_spike", spike), ("loss_divergence", divergence)
    ):  # fmt: skip
        _, findings = detector({}, STEPS, losses, rules.validate(name, {}))
        if findings and findings[0].opened:
            onsets[name] = findings[0].onset_step
    if kind != "not_finite":
        curves = [LossCurve(steps=STEPS, losses=each, planned=999) for each in (losses, healthy)]
        verdict = compare_losses(curves[:1], curves[1:], margin=0.0025, alpha=0.05)
        if verdict.onset is not None:
            onsets["verdict"] = verdict.onset.since_step
    assert len(onsets) >= 2
    assert {name: onset for name, onset in onsets.items() if abs(onset - 500) > slack} == {}
