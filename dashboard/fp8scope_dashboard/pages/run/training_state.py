"""The card of gradients that are averaged in FP8, and of what the optimizer stores, by kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from fp8scope_dashboard.pages.formatting import number, percent, size
from fp8scope_dashboard.runs.models import Run, Tensor

GRADIENTS: Final = "fp8_gradients/"
STATE: Final = "optimizer_state/"
KINDS: Final = {
    "exp_avg": "First moment",
    "exp_avg_sq": "Second moment",
    "master": "Master weights",
    "momentum_buffer": "Momentum",
    "max_exp_avg_sq": "Largest second moment",
    "scales": "Scales",
}
ORDER: Final = {kind: index for index, kind in enumerate(KINDS, 1)}
ADAMW: Final = 8.0
"""Bytes a parameter of AdamW in float32: two moments."""


@dataclass(frozen=True, kw_only=True)
class StateRow:
    """One kind of stored tensors."""

    name: str
    format: str
    bytes: str
    per_parameter: str


@dataclass(frozen=True, kw_only=True)
class StoredState:
    """The content of the card. A part that the run does not have is empty."""

    traffic: str = ""
    sentence: str = ""
    rows: list[StateRow] = field(default_factory=list)

    @property
    def reduces(self) -> bool:
        """Return whether gradients are averaged in FP8."""
        return bool(self.traffic)


def training_state_of(run: Run) -> StoredState | None:
    """Return the content of the card; None for a run whose agent has sent nothing of it."""
    scalars = run.last_scalars
    traffic, parameters = _traffic(scalars), _value(scalars, f"{STATE}parameters")
    if not parameters:
        return StoredState(traffic=traffic) if traffic else None
    sizes = {
        name.removeprefix(STATE).removesuffix("_bytes"): value
        for name in scalars
        if name.startswith(STATE) and name.endswith("_bytes") and (value := _value(scalars, name))
    }
    formats = dict(
        Tensor.objects.filter(run=run, role__in=list(KINDS)).exclude(format="").values_list("role", "format")
    )
    rows = [
        StateRow(
            name=KINDS.get(kind, kind),
            format=formats.get(kind, "").upper(),
            bytes=size(stored),
            per_parameter=number(stored / parameters, 3),
        )
        for kind, stored in sorted(sizes.items(), key=lambda item: (ORDER.get(item[0], 0), item[0]))
    ]
    per_parameter = sum(sizes.values()) / parameters
    return StoredState(
        traffic=traffic, sentence=_stored(per_parameter, _value(scalars, f"{STATE}level")), rows=rows
    )


def _traffic(scalars: Mapping[str, Any]) -> str:
    """The bytes of a step in words; empty where no gradient is averaged in FP8, or by one process."""
    sent, bf16, float32 = (
        _value(scalars, GRADIENTS + name) for name in ("bytes", "bytes_bf16", "bytes_float32")
    )
    if not (sent and bf16 and float32):
        return ""
    return (
        f"A rank sends {size(sent)} for its gradients in a step: {_saved(sent, bf16)} an all-reduce in BF16, "
        f"{_saved(sent, float32)} one in float32."
    )


def _saved(sent: float, other: float) -> str:
    saved = 1 - sent / other
    return f"{percent(abs(saved))} {'less' if saved >= 0 else 'more'} than"


def _stored(per_parameter: float, level: float | None) -> str:
    at = f" at level O{level:.0f}" if level else ""
    against = f" AdamW in float32 stores {ADAMW:.0f}." if level else ""
    return f"The optimizer stores {number(per_parameter, 3)} bytes a parameter on a rank{at}.{against}"


def _value(scalars: Mapping[str, Any], name: str) -> float | None:
    value = scalars.get(name)
    return float(value) if isinstance(value, int | float) and bool(np.isfinite(value)) else None
