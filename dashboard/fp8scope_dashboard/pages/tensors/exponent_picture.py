"""The picture of one tensor: its exponents in the zones of a format, now and as proposed.

The server computes the shares of every margin at once, with the functions of analysis.what_if. The browser
only looks them up while the slider moves, so that there is one definition of each share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, log2
from typing import Any, Final

import numpy as np

from fp8scope_dashboard.analysis.what_if.distribution import MIN_EXPONENT, Bounds, Distribution
from fp8scope_dashboard.analysis.what_if.formats import NumberFormat, format_named
from fp8scope_dashboard.analysis.what_if.margins import (
    MARGINS,
    Current,
    MarginOutcomes,
    advise,
    base_scale,
    outcomes_of_margins,
    outcomes_of_parts,
    outcomes_of_scales,
)
from fp8scope_dashboard.analysis.what_if.readiness import judge
from fp8scope_dashboard.analysis.what_if.targets import MAX_MARGIN, Target, Tensors, make_target
from fp8scope_dashboard.pages.formatting import NOTHING
from fp8scope_dashboard.pages.formatting import percent as page_percent
from fp8scope_dashboard.pages.tensors.recipe_code import recipe_code
from fp8scope_dashboard.runs.models import Run, Tensor
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.queries import MergedHistogram
from fp8scope_dashboard.text.numbers import percent

# Elements that share a scale: the whole tensor, a row, or a part of a row.
PARTS: Final[Mapping[str, str]] = {
    "tensor": "The whole tensor",
    "row": "Each row",
    "128": "Blocks of 128",
    "32": "Blocks of 32",
    "16": "Blocks of 16",
}
# The steps of the form: sampled ones, newest first.
MAX_STEPS: Final = 50
MAX_RANKS: Final = 16


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The stored values of one tensor in one sampled step.

    Attributes:
        step: the sampled step.
        ranks: the histogram of each rank.
        histogram: of all ranks.
        tensors: the tensor, as what_if takes it.
        current: its format and scale; None if it is not quantised, or each block has its own scale.
        in_blocks: whether each block has its own scale; `current` then has their median.
    """

    step: int
    ranks: Mapping[int, MergedHistogram]
    histogram: MergedHistogram
    tensors: Tensors
    current: Current | None
    in_blocks: bool


def sample_of(run: Run, tensor: Tensor, step: int | None = None) -> Sample | None:
    """The last sampled step of a tensor, at or before `step` if given; None without histograms."""
    ranks = queries.rank_histograms(run.pk, tensor.index, step)
    parts = list(ranks.values())
    if not parts or not any(part.total for part in parts):
        return None
    at = parts[0].step
    counts = np.sum([[part.zeros, *part.counts, part.nonfinite] for part in parts], axis=0)
    histogram = MergedHistogram(at, float(counts[0]), counts[1:-1], float(counts[-1]))
    amax = _value(run, tensor, "amax", at) if at >= queries.raw_from(run.pk) else float("nan")
    tensors = Tensors(
        [tensor.name],
        [tensor.role],
        Distribution.of(counts[None, :], np.array([amax])),
        np.array([float(tensor.shape[-1]) if tensor.shape and isinstance(tensor.shape[-1], int) else 0.0]),
        np.array([np.nan]),
    )
    format = format_named(tensor.format)
    in_blocks = isfinite(_value(run, tensor, "blocks", at))
    scale = _value(run, tensor, "scale_median" if in_blocks else "scale", at)
    if in_blocks and not isfinite(scale):
        scale = _value(run, tensor, "scale", at)
    current = None
    if format is not None and isfinite(scale) and scale > 0:
        current = Current(format, scale, 0 if in_blocks else margin_of(run.recipe))
    return Sample(
        step=at, ranks=ranks, histogram=histogram, tensors=tensors, current=current, in_blocks=in_blocks
    )


def margin_of(recipe: Any) -> int:
    """The margin of a recipe as the agent describes it; 0 if it has none."""
    margin = recipe.get("margin", 0) if isinstance(recipe, Mapping) else 0
    return margin if isinstance(margin, int) and abs(margin) <= MAX_MARGIN else 0


def default_format(tensor: Tensor) -> str:
    """The target format that a tensor has now; HYBRID for one that is not quantised."""
    format = format_named(tensor.format)
    return format.name.lower() if format is not None and format.name.lower() in ("e4m3", "e5m2") else "hybrid"


def target_of(format: str, part: str) -> Target:
    """The target of the form's choices; unknown ones become the defaults."""
    scaling, block = ("block", int(part)) if part in ("128", "32", "16") else ("current", 0)
    try:
        target = make_target(format, "row" if part == "row" else scaling, block=block)
    except ValueError:
        return make_target()
    return target


def picture(sample: Sample, tensor: Tensor, target: Target, recipe: Any) -> dict[str, Any]:
    """The document that the browser draws: exponents, zones and shares, now and for every margin.

    A zone is four numbers, log2 |x| of the largest, the smallest normal, the smallest subnormal and the
    largest flushed value. A share is [low, estimate, high].
    """
    format = target.format.of(tensor.role)
    # The scale behind blocks is no scale of the whole tensor, so a proposal begins at this step's amax.
    base = base_scale(sample.tensors, format, None if sample.in_blocks else sample.current)
    if target.per_tensor:
        margins: Sequence[int] = MARGINS
        outcomes = outcomes_of_margins(sample.tensors, format, base, margins)
        reference = None if sample.in_blocks else sample.current
        advice = advise(sample.tensors, target, base, reference, margins)
        chosen, sentence, enough = advice.margin, advice.text, advice.is_enough
        zones = [_zone(format, float(scale)) for scale in outcomes.scales]
    else:
        margins, chosen = [0], 0
        outcomes = outcomes_of_parts(sample.tensors, target)
        sentence, enough = _sentence_of_parts(sample.tensors, target)
        zones = [_zone(format, typical_scale(sample.tensors, target, format))]
    return {
        "tensor": tensor.name,
        "step": sample.step,
        "numel": sample.histogram.total,
        "first": MIN_EXPONENT,
        "zeros": sample.histogram.zeros,
        "nonfinite": sample.histogram.nonfinite,
        "bins": _bins(sample.histogram),
        "ranks": _ranks(sample.ranks),
        "current": _current(sample),
        "proposed": {
            "format": format.name,
            "name": target.format.name,
            "perTensor": target.per_tensor,
            "how": target.title,
            "margins": list(margins),
            "chosen": chosen,
            "zones": zones,
            **_shares(outcomes),
        },
        "advice": {"text": sentence, "enough": enough, "margin": chosen},
        "code": [recipe_code(tensor.module, tensor.role, target, recipe, margin) for margin in margins],
    }


def shown_shares(document: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The shares of a picture as text, by outcome: (now, with the margin of the advice).

    A page shows them until its script moves the slider, and without scripts.
    """
    proposed = document["proposed"]
    i = proposed["margins"].index(proposed["chosen"])
    now, then = _texts(document, document["current"], 0), _texts(document, proposed, i)
    return {key: (now[key], then[key]) for key in now}


def _texts(document: Mapping[str, Any], side: Mapping[str, Any] | None, i: int) -> dict[str, str]:
    if side is None or "saturated" not in side:
        return dict.fromkeys(("saturated", "normal", "subnormal", "flushed", "error"), NOTHING)
    saturated, flushed, subnormal = side["saturated"][i], side["flushed"][i], side["subnormal"][i]
    whole = 1.0 - (document["zeros"] + document["nonfinite"]) / document["numel"]
    parts = (saturated[1], flushed[1], subnormal)
    normal = None if None in parts else max(0.0, whole - sum(parts))
    estimate_only = not side.get("perTensor", True)
    return {
        "saturated": _range(saturated, estimate_only),
        "normal": page_percent(normal),
        "subnormal": page_percent(subnormal),
        "flushed": _range(flushed, estimate_only),
        "error": _range(side["error"][i], True),
    }


def _range(triple: Sequence[float | None], estimate_only: bool) -> str:
    """An estimate, with its bounds if they differ: `0.001 % (0–0.002 %)`."""
    low, estimate, high = (page_percent(value) for value in triple)
    return estimate if estimate_only or low == high else f"{estimate} ({low.rstrip('%').rstrip()}–{high})"


def typical_scale(tensors: Tensors, target: Target, format: NumberFormat, i: int = 0) -> float:
    """The scale of the median row or block of tensor `i`, if its elements are in random order."""
    distribution = tensors.distribution
    numel = max(float(distribution.numel[i]), 1.0)
    size = target.block_size or float(tensors.columns[i]) or numel
    below = distribution.zeros[i] + distribution.nonfinite[i] + np.cumsum(distribution.counts[i])
    middle = distribution.first + int(np.argmax((below / numel) ** size >= 0.5))
    return float(format.largest * 2.0 ** -(middle + 0.5))


def _value(run: Run, tensor: Tensor, statistic: str, step: int) -> float:
    """A statistic of the tensor in one step; NaN without it."""
    if statistic not in queries.statistic_names(run.pk):
        return float("nan")
    series = queries.tensor_series(run.pk, tensor.index, statistic, first=step, last=step)
    return float(series.values[0]) if len(series) else float("nan")


def _current(sample: Sample) -> dict[str, Any] | None:
    if sample.current is None:
        return None
    current = sample.current
    described = {
        "format": current.format.name,
        "scale": current.scale,
        "margin": current.margin,
        "inBlocks": sample.in_blocks,
        "zones": [_zone(current.format, current.scale)],
    }
    if sample.in_blocks:
        return described
    return described | _shares(outcomes_of_scales(sample.tensors, current.format, [current.scale]))


def _zone(format: NumberFormat, scale: float) -> list[float]:
    limits = (format.largest, format.smallest_normal, format.smallest_subnormal, format.flushed)
    return [round(log2(limit) - log2(scale), 4) for limit in limits]


def _shares(outcomes: MarginOutcomes) -> dict[str, Any]:
    return {
        "scales": [scale if isfinite(scale) else None for scale in outcomes.scales.tolist()],
        "saturated": _triples(outcomes.saturated),
        "flushed": _triples(outcomes.flushed),
        "subnormal": [share if isfinite(share) else None for share in outcomes.subnormal.tolist()],
        "error": _triples(outcomes.error),
    }


def _triples(bounds: Bounds) -> list[list[float | None]]:
    rows = zip(bounds.low.tolist(), bounds.estimate.tolist(), bounds.high.tolist(), strict=True)
    return [[value if isfinite(value) else None for value in row] for row in rows]


def _bins(histogram: MergedHistogram) -> list[list[float]]:
    """The occurring exponents with their counts."""
    return [[int(i) + MIN_EXPONENT, float(histogram.counts[i])] for i in np.flatnonzero(histogram.counts)]


def _ranks(ranks: Mapping[int, MergedHistogram]) -> list[dict[str, Any]]:
    """Each rank's share of its own elements by exponent; empty with a single rank."""
    if len(ranks) < 2:
        return []
    shown = list(ranks.items())[:MAX_RANKS]
    return [
        {"rank": rank, "total": part.total, "bins": _bins(part), "top": _top(part)} for rank, part in shown
    ]


def _top(histogram: MergedHistogram) -> int | None:
    occurring = np.flatnonzero(histogram.counts)
    return int(occurring[-1]) + MIN_EXPONENT if len(occurring) else None


def _sentence_of_parts(tensors: Tensors, target: Target) -> tuple[str, bool]:
    """The advice on scales for rows or blocks: what they would lose, and whether that is enough."""
    verdict = judge(tensors, target).tensors[0]
    outcomes = outcomes_of_parts(tensors, target)
    format = target.format.of(tensors.roles[0])
    enough = verdict.verdict == "ready"
    lost = f"an estimated {percent(float(outcomes.flushed.estimate[0]))} flush to zero"
    sentence = f"{format.name} with {target.title}: {lost}."
    if not enough:
        sentence += f" That is not enough: {verdict.reason}." if verdict.reason else ""
    return sentence, enough
