"""What each rank stored of one step: the only question that does not merge them."""

from __future__ import annotations

from uuid import UUID

import numpy as np

from fp8scope_dashboard.telemetry.codec import Float64s, Int64s
from fp8scope_dashboard.telemetry.rows import tensor_parts


def by_rank(run_id: UUID, statistic: str, tensors: Int64s, step: int) -> dict[int, Float64s]:
    """A stored statistic of some tensors (by index) at one step: float64[T] by rank, NaN where not observed.

    Of several writers of a rank the most authoritative counts. Ranks without the step are left out.
    """
    found: dict[int, tuple[int, Float64s]] = {}
    for part in tensor_parts(run_id, (statistic,), tensors, (step, step)):
        values = part.values[statistic]
        if values.shape[1] and (part.rank not in found or part.order < found[part.rank][0]):
            found[part.rank] = part.order, np.asarray(values[:, -1], np.float64)
    return {rank: values for rank, (_, values) in sorted(found.items())}
