"""Step (d): one matrix product. Reads the latest bisection that the agent reported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fp8scope_dashboard.diagnosis.findings import EvidenceLink, Finding

# The worst layer's error over that of every other layer; a healthy ranking is flat: benchmarks/bisection.py.
APART: Final = 4.0
# Relative error of the gradient by one product in FP8; a working product is at about 1 %.
LARGE: Final = 0.1
HOW_TO: Final = "Call run.bisect, or start the training script with fp8scope bisect."


@dataclass(frozen=True)
class ProductRanking:
    """A bisection: the step before it, and (layer, product, relative error), worst first."""

    step: int
    products: Sequence[tuple[str, str, float]]

    @classmethod
    def of(cls, step: int, document: Mapping[str, Any]) -> ProductRanking:
        """Read the agent's report."""
        rows = [
            (str(row["layer"]), str(row["product"]), float(row["relative_error"]))
            for row in document["products"]
        ]
        return cls(step, rows)


def examine(ranking: ProductRanking | None) -> Finding:
    """The finding of this step."""
    if ranking is None or not ranking.products:
        return Finding(
            step="product",
            outcome="unknown",
            sentence="No bisection of the matrix products was made.",
            suggestion=HOW_TO,
        )
    links = (EvidenceLink("reports", f"Bisection after step {ranking.step:,}"),)
    layer, product, error = ranking.products[0]
    others = [value for name, _, value in ranking.products if name != layer and math.isfinite(value)]
    rest = max(others, default=0.0)
    worst = math.inf if math.isnan(error) else error
    if worst > LARGE and worst > APART * rest:
        size = "is not finite" if math.isinf(worst) else f"is {error:.0%}"
        sentence = (
            f"One layer is bad, {layer}: the error of the gradient with only its {product} in FP8 {size}, "
            "and at "
            f"most {rest:.1%} with any other layer."
        )
        # It was measured, whatever the training does.
        return Finding(
            step="product",
            outcome="cause",
            sentence=sentence,
            cause="bad_layer",
            onset=ranking.step,
            tensors=(layer,),
            links=links,
            is_proven=True,
        )
    sentence = f"No product stands out: the worst is {product} of {layer} with an error of {worst:.1%}."
    return Finding(step="product", outcome="clear", sentence=sentence, links=links)
