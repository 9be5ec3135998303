"""The scalars of a run in groups of their names: `train/loss` is in the group `train`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from fp8scope_dashboard.pages.glossary.steps import STEP_TERMS

# What most people look for first, and what is an axis rather than a chart.
FIRST: Final = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu")
PLAIN, RECORDED = "Metrics", "Recorded by fp8scope"
# Measurements of the agent, by the beginning of their names.
PREFIXES: Final = ("time_", "memory_", "step_", "gpu_", "model_flops", "measured_", "plain_tensors_", "token")


@dataclass(frozen=True)
class ScalarGroup:
    """Scalars whose names begin alike, in their order."""

    name: str
    metrics: list[str]


def groups_of(names: Iterable[str]) -> list[ScalarGroup]:
    """All scalars in groups: those without one, then the groups by name, then what the agent measures."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names, key=_place):
        groups.setdefault(_group(name), []).append(name)
    last = groups.pop(RECORDED, [])
    plain = groups.pop(PLAIN, [])
    ordered = [(PLAIN, plain), *sorted(groups.items()), (RECORDED, last)]
    return [ScalarGroup(name, metrics) for name, metrics in ordered if metrics]


def _group(name: str) -> str:
    head, slash, _ = name.partition("/")
    if slash and head and head not in STEP_TERMS:
        return head
    is_measured = name not in FIRST and (name in STEP_TERMS or name.startswith(PREFIXES))
    return RECORDED if is_measured else PLAIN


def _place(name: str) -> tuple[int, str]:
    return (FIRST.index(name) if name in FIRST else len(FIRST), name)
