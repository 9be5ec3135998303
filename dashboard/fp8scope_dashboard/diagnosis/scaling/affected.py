"""The tensors and layers that a finding about the scaling names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from fp8scope_dashboard.diagnosis.findings import EvidenceLink, Finding
from fp8scope_dashboard.diagnosis.scaling.range_use import Leaving
from fp8scope_dashboard.diagnosis.tensors import TensorSeries
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.text.numbers import count

# A fault is one layer's if the model has at least so many layers, and no other layer has it.
MIN_MODULES: Final = 4
# The tensors of a finding that are named, and that are linked.
NAMED: Final = 10
SHOWN: Final = 3


def bad_layer(
    module: str, onset: int, what: str, positions: Sequence[int], rows: TensorSeries, statistic: str
) -> Finding:
    """A finding about one layer. `statistic`: what the evidence shows; it is what was found, and recorded."""
    return Finding(
        step="scaling", outcome="cause",
        sentence=f"One layer is bad, {module}: {what}.",
        cause="bad_layer", onset=onset, tensors=names_of(positions, rows),
        suggestion="Compute this layer in BF16, and check its weights and its scaling state.",
        links=tensor_links(positions, rows, statistic),
        observation=f"The layer {module} stands out: {what}.",
    )  # fmt: skip


def only_module(positions: Sequence[int], rows: TensorSeries) -> str:
    """The layer that all these tensors belong to; empty if they are several, or the model has few layers."""
    modules = {rows.tensors[position].module for position in positions}
    return modules.pop() if len(modules) == 1 and layers(rows) >= MIN_MODULES else ""


def layers(rows: TensorSeries) -> int:
    """The number of layers with tensors."""
    return len(set(rows.modules.tolist()))


def counted(positions: Sequence[int], rows: TensorSeries) -> str:
    """The number of tensors in words, with their role if they share it: 3 input tensors of 48."""
    roles = {rows.tensors[position].role for position in positions}
    role = f"{roles.pop()} " if len(roles) == 1 else ""
    return f"{count(len(positions), f'{role}tensor')} of {len(rows.tensors)}"


def first_leaving(leaving: Leaving, rows: TensorSeries) -> str:
    """The tensor that leaves its range first, and since when, in words."""
    return f"first {rows.tensors[leaving.tensor].name} from step {leaving.since}"


def names_of(positions: Sequence[int], rows: TensorSeries) -> tuple[str, ...]:
    """The names of the first NAMED tensors."""
    return tuple(rows.tensors[position].name for position in positions[:NAMED])


def tensor_links(positions: Sequence[int], rows: TensorSeries, statistic: str) -> tuple[EvidenceLink, ...]:
    """Links to a statistic of the first SHOWN tensors."""
    names = [rows.tensors[position].name for position in positions[:SHOWN]]
    return tuple(EvidenceLink("tensor", name, {"tensor": name, "statistic": statistic}) for name in names)


def observed_before(values: Floats, step: int, rows: TensorSeries) -> int:
    """The last step before `step` with an observation; without one, the step before it, when it began."""
    earlier = rows.steps[np.isfinite(values) & (rows.steps < step)]
    return int(earlier[-1]) if len(earlier) else step - 1
