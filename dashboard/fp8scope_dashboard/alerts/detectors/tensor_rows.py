"""The rows of many tensors that a detector reads, and what is known of the tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors.base import State
from fp8scope_dashboard.statistics.arrays import Floats

Int64s = NDArray[np.int64]

# Observations after which any usual history of a delayed scale has forgotten an amax: Transformer Engine's
# default is 1,024 steps.
UNKNOWN_PATIENCE = 1_100


@dataclass(frozen=True)
class TensorFacts:
    """The constants of the training, for n tensors.

    Attributes:
        names: `<module path>.<role>`.
        largest: float64[n], the largest finite value of the format; NaN if it is unknown.
        margin: float64[n], powers of two that the recipe keeps free above the amax.
        patience: int64[n], observations after which the scale must have followed its amax.
        per_tensor: bool[n], whether the tensor has one scale. Of a scale per row or block only the median is
            recorded, which need not fit the amax.
    """

    names: Sequence[str]
    largest: Floats
    margin: Floats
    patience: Int64s
    per_tensor: NDArray[np.bool_]

    @classmethod
    def unknown(cls, names: Sequence[str], largest: float = 448.0) -> TensorFacts:
        """Tensors of which only the format is known."""
        n = len(names)
        patience = np.full(n, UNKNOWN_PATIENCE)
        return cls(names, np.full(n, largest), np.zeros(n), patience, np.ones(n, bool))

    @property
    def roles(self) -> NDArray[np.str_]:
        return np.array([name.rpartition(".")[2] for name in self.names], dtype=str)


@dataclass(frozen=True)
class TensorRows:
    """Rows of one writer in which the steps ascend.

    Attributes:
        steps: int64[R].
        statistics: float64[R, n] per name; NaN where not observed.
        first_step: the first step of the generation.
    """

    steps: Int64s
    statistics: Mapping[str, Floats]
    facts: TensorFacts
    first_step: int

    def has(self, *names: str) -> bool:
        return all(name in self.statistics for name in names)

    def after(self, warmup: float) -> NDArray[np.bool_]:
        """bool[R], the rows after the first `warmup` steps."""
        return self.steps - self.first_step >= warmup


def tensor_rows(
    state: State, steps: Int64s, statistics: Mapping[str, Floats], facts: TensorFacts
) -> tuple[State, TensorRows]:
    """Leave out the rows whose step is not above all earlier ones, and fill in missing columns with NaN.

    Args:
        state: where the earlier rows of the generation ended; empty at first.
        steps: int64[R].
        statistics: float64[R, m] with m <= n, or larger: further columns are left out.
    """
    n = len(facts.names)
    furthest = state.get("last_step", -1)
    before = np.maximum.accumulate(np.concatenate([[furthest], steps]))[:-1]
    new = steps > before
    widened = {name: _wide(matrix[new], n) for name, matrix in statistics.items()}
    rows = steps[new]
    first = state.get("first_step", int(rows[0]) if len(rows) else None)
    after: State = {"last_step": furthest, **({} if first is None else {"first_step": first})}
    if len(rows):
        after["last_step"] = int(rows[-1])
    return after, TensorRows(rows, widened, facts, first or 0)


def _wide(matrix: Floats, n: int) -> Floats:
    if matrix.shape[1] == n:
        return matrix
    wide = np.full((len(matrix), n), np.nan)
    shared = min(n, matrix.shape[1])
    wide[:, :shared] = matrix[:, :shared]
    return wide
