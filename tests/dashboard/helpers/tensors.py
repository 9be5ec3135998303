"""Running a detector of tensors over made rows, in any division into batches."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.detection.streams import TENSOR_DETECTORS
from fp8scope_dashboard.alerts.detectors import ConditionChange, State, TensorFacts, tensor_rows

Floats = NDArray[np.float64]


def detected(
    kind: str,
    statistics: Mapping[str, Floats],
    *,
    facts: TensorFacts | None = None,
    cuts: Sequence[int] = (),
    **parameters: Any,
) -> list[ConditionChange]:
    """The findings of a kind of rule in rows that begin with step 0. Numel is 1,000 if not given."""
    rows, n = next(iter(statistics.values())).shape
    facts = facts or TensorFacts.unknown([f"blocks.{i}.mlp.input" for i in range(n)])
    columns = {"numel": np.full((rows, n), 1_000.0), **statistics}
    shared: State = {}
    state: State = {}
    findings: list[ConditionChange] = []
    edges = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    for first, last in zip(edges, edges[1:], strict=False):
        shared, state = (json.loads(json.dumps(each, allow_nan=False)) for each in (shared, state))
        part = {name: matrix[first:last] for name, matrix in columns.items()}
        shared, chunk = tensor_rows(shared, np.arange(first, last), part, facts)
        if len(chunk.steps):
            state, new = TENSOR_DETECTORS[kind].detect(state, chunk, rules.validate(kind, parameters))
            findings += new
    return findings
