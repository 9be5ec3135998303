"""What came late of tensors, in steps whose raw values retention has deleted: added to their roll-ups. Pure
functions of arrays.
"""

from __future__ import annotations

import numpy as np

from fp8scope_dashboard.telemetry.aggregates import Parts


def united(known: Parts, found: Parts) -> Parts:
    """Buckets that hold the values of both, each float64[K, B] by part (see aggregates).

    Exact in `max`, `min`, their places and `undefined`, of values that were aggregated each for itself; again
    and again the same. `last`, `sum` and `count` of a bucket that has had values stay theirs: which of the
    rows found now were counted in them already is not known.
    """
    result = {}
    for name, extreme in (("max", np.fmax), ("min", np.fmin)):
        best = extreme(known[name], found[name])
        places = [np.where(each[name] == best, each[f"arg{name}"], np.nan) for each in (known, found)]
        result[name], result[f"arg{name}"] = best, np.fmin(*places)
    result["undefined"] = np.fmin(known["undefined"], found["undefined"])
    had = known["count"] > 0
    for name in ("last", "sum", "count"):
        result[name] = np.where(had, known[name], found[name])
    return result
