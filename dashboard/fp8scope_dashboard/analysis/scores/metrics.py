"""The properties of a metric by its name and kind: its range, and the default margin of a comparison."""

from __future__ import annotations

import math
import re
from typing import Final

from fp8scope_dashboard.analysis.scores.intervals import UNLIMITED, Interval
from fp8scope_dashboard.statistics.arrays import Floats

# Largest difference of a score in [0, 1] that counts as none: one point of a hundred.
MARGIN_OF_SHARES: Final = 0.01
# The same, relative to the baseline's score, for other metrics that are not a loss.
RELATIVE_MARGIN: Final = 0.01

UNIT: Final = Interval(0.0, 1.0)
_SHARES: Final = frozenset(
    ("acc", "accuracy", "accnorm", "em", "exactmatch", "f1", "precision", "recall", "passat1", "winrate")
    + ("mrr", "ndcg", "auc", "auroc", "bleu", "rouge", "rouge1", "rouge2", "rougel", "mc1", "mc2")
)
_PERPLEXITIES: Final = frozenset(("perplexity", "ppl", "wordperplexity", "byteperplexity", "tokenperplexity"))
_LOSSES: Final = _PERPLEXITIES | frozenset(
    ("nll", "loss", "crossentropy", "ce", "bpb", "bitsperbyte", "bitspercharacter", "bpc", "logloss")
)


def _key(metric: str) -> str:
    """A metric's name without separators, the name of the data (`eval_loss`), and the filter that lm-eval
    appends (`exact_match,strict-match`).
    """
    name = re.sub(
        r"^(eval|val|valid|validation|test|held_?out)[-_/ ]", "", metric.split(",")[0].strip().lower()
    )
    return re.sub(r"[^a-z0-9]", "", name.replace("@", "at"))


def is_loss(metric: str) -> bool:
    """Return whether the project's margin of the loss applies: the metric is a loss, or a function of it."""
    return _key(metric) in _LOSSES


def is_perplexity(metric: str) -> bool:
    """Return whether a metric is the exponential of a loss."""
    return _key(metric) in _PERPLEXITIES


def limits_of(kind: str, metric: str, *items: Floats) -> Interval:
    """The range of a metric: [0, 1] of shares, above 0 of losses, else unlimited.

    A metric of kind `mean` counts as a share by its name, if no item contradicts it.
    """
    if kind == "proportion":
        return UNIT
    present = [values for values in items if values.size]
    low = min((float(values.min()) for values in present), default=0.0)
    high = max((float(values.max()) for values in present), default=0.0)
    if _key(metric) in _SHARES and low >= 0.0 and high <= 1.0:
        return UNIT
    if is_loss(metric) and low >= 0.0:
        return Interval(0.0, math.inf)
    return UNLIMITED


def default_margin(kind: str, metric: str, baseline: float, limits: Interval, loss_margin: float) -> float:
    """The largest difference of the score that counts as none, in the unit of the score.

    One point of a hundred for scores in [0, 1]; the project's relative margin of the loss for losses; else
    1 % of the baseline's score.
    """
    if kind == "proportion" or limits == UNIT:
        return MARGIN_OF_SHARES
    return (loss_margin if is_loss(metric) else RELATIVE_MARGIN) * abs(baseline)
