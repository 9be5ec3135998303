"""The knowledge of the other steps of the diagnosis about the training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fp8scope_dashboard.analysis.onset_search import TensorOnset
from fp8scope_dashboard.statistics.arrays import Floats


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
