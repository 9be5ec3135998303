"""Rows of a short training with a fault that one kind of rule reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts.models import Rule
from fp8scope_dashboard.alerts.rules import KINDS

Floats = NDArray[np.float64]
Columns = tuple[dict[str, Floats], dict[str, Floats]]

# Steps of a part, and those from which on it is at fault.
LENGTH: Final = 240
FAULTY_FROM: Final = 150
TENSORS: Final = ("blocks.0.mlp.input", "blocks.1.mlp.input")
# With it, a scale must follow its amax within 4 + 64 steps.
RECIPE: Final = {"recipe": "DelayedScaling", "history_length": 1}
# Shorter than by default, so that every kind can be sure within a part.
SHORTER: Final = {
    "window": 40, "warmup": 20, "span": 10, "points": 5, "blocks": 3, "settle": 50,
}  # fmt: skip


def shorten_rules(project: Project) -> None:
    """Let the project's rules learn their past within a part."""
    for rule in Rule.objects.filter(project=project):
        known = KINDS[rule.kind].parameters
        rule.parameters |= {
            name: min(value, rule.parameters[name]) for name, value in SHORTER.items() if name in known
        }
        rule.save()


def part(kind: str) -> Columns:
    """The scalars, float64[LENGTH], and the statistics, float64[LENGTH, 2], of a part at fault.

    Args:
        kind: the kind of rule whose condition holds from FAULTY_FROM on; "" for a healthy part.
    """
    generator = np.random.default_rng(0)

    def noisy(level: float, relative: float = 0.01) -> Floats:
        return level * (1.0 + relative * generator.standard_normal(LENGTH))

    def tensors(level: float) -> Floats:
        return np.stack([noisy(level), noisy(level)], axis=1)

    scalars = {"loss": noisy(2.0, 0.005), "grad_norm": noisy(1.0), "step_seconds": noisy(0.2)}
    scalars |= {"memory_rss": noisy(1e9, 1e-5), "time_data": noisy(0.01), "time_forward": noisy(0.06)}
    scalars |= {name: noisy(0.04) for name in ("time_backward", "time_optimizer", "time_other")}
    counts = {name: np.zeros((LENGTH, 2)) for name in ("saturated", "underflow", "nonfinite")}
    statistics = counts | {
        "numel": np.full((LENGTH, 2), 1e5),
        "amax": tensors(4.0),
        "sq_signal": tensors(1.0),
    }
    # A power of two below 448 / amax, as if the recipe rounded.
    statistics |= {"scale": np.exp2(np.floor(np.log2(100.0 / statistics["amax"]))), "sq_error": tensors(1e-3)}
    statistics |= {"kurtosis": tensors(3.0), "logit_bound": tensors(5.0), "update_ratio": tensors(1e-3)}
    statistics |= {"load_imbalance": tensors(0.1)}
    if kind:
        FAULTS[kind](scalars, statistics)
    return scalars, statistics


Fault = Callable[[dict[str, Floats], dict[str, Floats]], None]
FAULTY: Final = slice(FAULTY_FROM, LENGTH)
RAMP: Final = np.linspace(0.0, 1.0, LENGTH - FAULTY_FROM)


def _scalar(name: str, factor: object) -> Fault:
    def inject(scalars: dict[str, Floats], statistics: dict[str, Floats]) -> None:
        scalars[name][FAULTY] *= np.asarray(factor, np.float64)

    return inject


def _statistic(name: str, value: float | None = None, factor: object = 1.0) -> Fault:
    """Set, or multiply, the statistic of the second tensor."""

    def inject(scalars: dict[str, Floats], statistics: dict[str, Floats]) -> None:
        column = statistics[name][:, 1]
        column[FAULTY] = column[FAULTY] * np.asarray(factor, np.float64) if value is None else value

    return inject


def _frozen(scalars: dict[str, Floats], statistics: dict[str, Floats]) -> None:
    """The amax grows above what the scale was made for, and the scale stays."""
    statistics["amax"][FAULTY, 1] = 100.0 * np.exp2(3.0 * RAMP)


def _jump(scalars: dict[str, Floats], statistics: dict[str, Floats]) -> None:
    statistics["scale"][FAULTY_FROM::2, 1] *= 2.0**10


FAULTS: Final[Mapping[str, Fault]] = {
    "loss_not_finite": _scalar("loss", np.nan),
    "loss_spike": _scalar("loss", np.where(np.arange(LENGTH - FAULTY_FROM) < 8, 1.6, 1.0)),
    "loss_divergence": _scalar("loss", 1.0 + 2.0 * RAMP),
    "tensor_not_finite": _statistic("nonfinite", 5.0),
    "saturation_rate": _statistic("saturated", 2_000.0),
    "saturation_rise": _statistic("saturated", 80.0),
    "underflow_rate": _statistic("underflow", 7e4),
    "underflow_rise": _statistic("underflow", 3e4),
    "scale_frozen": _frozen,
    "scale_stale": _statistic("amax", 4.0 / 2.0**9),
    "scale_jump": _jump,
    "amax_growth": _statistic("amax", factor=np.exp2(4.2 * np.sqrt(RAMP))),
    "noise_growth": _statistic("sq_error", factor=8.0),
    "kurtosis_growth": _statistic("kurtosis", factor=8.0),
    "logit_growth": _statistic("logit_bound", factor=8.0),
    "router_collapse": _statistic("load_imbalance", 0.9),
    "update_growth": _statistic("update_ratio", factor=8.0),
    "grad_norm": _scalar("grad_norm", 10.0),
    "throughput_drop": _scalar("step_seconds", 3.0),
    "data_wait": _scalar("time_data", 40.0),
    "memory_creep": _scalar("memory_rss", 1.0 + RAMP),
}
