"""Arms of simulated runs for certificates."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from fp8scope_dashboard.analysis.loss_coverage import RunStanding
from fp8scope_dashboard.analysis.losses.alignment import LossCurve
from fp8scope_dashboard.certificates.claim import Terms
from fp8scope_dashboard.certificates.document import make
from fp8scope_dashboard.certificates.members import Member
from fp8scope_dashboard.certificates.signing import key_from_seed

KEY = key_from_seed(bytes(range(32)))
POINTS = 600


def member(seed: int, harm: float = 0.0, *, points: int = POINTS, **facts: Any) -> Member:
    """A finished run whose loss is above that of the others by the share `harm`."""
    steps = np.arange(1, points + 1)
    batches = 0.03 * np.random.default_rng(99).normal(size=points)
    own = np.random.default_rng(seed)
    level = 2.0 + 2.0 * np.exp(-steps / (0.1 * points))
    noise = 0.002 * own.normal(size=points) + 0.0003 * own.normal()
    curve = LossCurve(
        steps=steps, losses=level * (1.0 + batches + noise + harm), planned=points, name=f"run {seed}"
    )
    return Member(
        curve=curve, standing=RunStanding(state="finished", reached=points, planned=points), facts=facts
    )


def arms(harm: float = 0.0, *, seeds: int = 3, points: int = POINTS) -> tuple[list[Member], list[Member]]:
    """A judged arm and its baseline."""
    return (
        [member(seed, harm, points=points) for seed in range(seeds)],
        [member(seed, points=points) for seed in range(10, 10 + seeds)],
    )


@cache
def certificate(harm: float = 0.0) -> dict[str, Any]:
    """A certificate of three seeds against three; do not change it."""
    return make(*arms(harm), Terms(), KEY, names=("fp8", "bf16"), server="https://fp8scope.example")
