"""The readiness of a run for FP8 and FP4, prepared for its page from the address."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlencode
from uuid import UUID

import numpy as np

from fp8scope_dashboard.analysis.run_readiness import Sampled
from fp8scope_dashboard.analysis.what_if.distribution import MIN_EXPONENT, Bounds
from fp8scope_dashboard.analysis.what_if.readiness import (
    Readiness,
    TensorReadiness,
    default_budget,
    judge,
    smallest_set,
    worst_first,
)
from fp8scope_dashboard.analysis.what_if.sentences import headline, kept_sentence
from fp8scope_dashboard.analysis.what_if.targets import TARGET_FORMATS, Target, make_target
from fp8scope_dashboard.diagnosis.healthy_stretch import tensors_to_judge
from fp8scope_dashboard.pages.badges import Badge
from fp8scope_dashboard.pages.charts.exponents import Exponents
from fp8scope_dashboard.pages.formatting import percent
from fp8scope_dashboard.pages.tensors.exponent_picture import typical_scale

SEARCH_LENGTH = 200
MAX_STEP = 2**62

BADGES: Final[Mapping[str, Badge]] = {
    "ready": Badge("Ready", "good", "check"),
    "finer": Badge("Needs finer scaling", "warning", "alert"),
    "bf16": Badge("Keep BF16", "danger", "cross"),
    "unknown": Badge("Not judged", "neutral", "minus"),
}
SCALING_TITLES: Final[Mapping[str, str]] = {
    "current": "Per tensor, current amax",
    "delayed": "Per tensor, delayed",
    "row": "Per row",
    "block": "Per block",
    "fixed": "Fixed scale",
}
FORMAT_TITLES: Final = {name: target.title for name, target in TARGET_FORMATS.items()}


@dataclass(frozen=True, kw_only=True)
class ReadinessQuery:
    """The choices of the address. `problems` says which parts of it were not valid and are ignored."""

    target: Target
    step: int | None
    error: float | None
    search: str
    tensor: str
    problems: list[str]

    @classmethod
    def of(cls, query: Mapping[str, str]) -> ReadinessQuery:
        """Read the address. Invalid parts become the defaults."""
        problems: list[str] = []
        margin = _number(query.get("margin", ""), "margin", problems) or 0
        block = _number(query.get("block", ""), "block", problems) or 0
        step = _number(query.get("step", ""), "step", problems)
        try:
            target = make_target(
                query.get("format") or "hybrid",
                query.get("scaling") or "current",
                query.get("scale") or "1",
                margin,
                block,
            )
        except ValueError as problem:
            problems.append(str(problem))
            target = make_target()
        error = _error(query.get("error", ""), problems)
        return cls(
            target=target,
            step=None if step is None or not 0 <= step <= MAX_STEP else step,
            error=error,
            search=query.get("q", "").strip()[:SEARCH_LENGTH],
            tensor=query.get("tensor", "")[:SEARCH_LENGTH],
            problems=problems,
        )

    def address(self, **changes: str) -> str:
        """The query of the same question, with changes; defaults are left out."""
        target = self.target
        values = {
            "format": target.format.name if target.format.name != "hybrid" else "",
            "scaling": target.scaling if target.scaling != "current" else "",
            "scale": f"{target.scale!r}" if target.scaling == "fixed" else "",
            "margin": str(target.margin or ""),
            "block": str(target.block or ""),
            "step": "" if self.step is None else str(self.step),
            "error": "" if self.error is None else f"{100.0 * self.error:.10g}",
            "q": self.search,
            "tensor": self.tensor,
            **changes,
        }
        return urlencode({name: value for name, value in values.items() if value})


@dataclass(frozen=True, kw_only=True)
class ReadinessRow:
    """One tensor of the table."""

    name: str
    badge: Badge
    reason: str
    finer: str
    saturated: str
    flushed: str
    error: str
    address: str
    is_chosen: bool


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The readiness of a run under a question."""

    question: ReadinessQuery
    sampled: Sampled
    readiness: Readiness
    rows: list[TensorReadiness]
    budget: float
    in_bf16: list[str]
    # About the step that is judged; empty if there is nothing to say.
    note: str = ""

    @property
    def headline(self) -> str:
        return headline(self.readiness)

    @property
    def kept_sentence(self) -> str:
        judged = int(np.isfinite(self.readiness.effect.error.estimate).sum())
        return kept_sentence(self.in_bf16, judged, self.budget)

    @property
    def counts(self) -> list[tuple[Badge, int]]:
        """The verdicts that occur, with their numbers."""
        numbers = [(badge, len(self.readiness.having(verdict))) for verdict, badge in BADGES.items()]  # type: ignore[arg-type]
        return [(badge, number) for badge, number in numbers if number]

    @property
    def chosen(self) -> TensorReadiness | None:
        """The tensor of the address, or the worst."""
        named = [tensor for tensor in self.rows if tensor.name == self.question.tensor]
        return next(iter([*named, *self.rows]), None)

    def row(self, tensor: TensorReadiness) -> ReadinessRow:
        """A tensor prepared for the table."""
        effect, i = self.readiness.effect, tensor.index
        return ReadinessRow(
            name=tensor.name,
            badge=BADGES[tensor.verdict],
            reason=tensor.reason,
            finer=tensor.finer,
            # The bounds of blocks are as wide as can be; the API has them.
            saturated=share(effect.saturated, i, exact=self.question.target.per_tensor),
            flushed=share(effect.flushed, i),
            error=share(effect.error, i, exact=False),
            address=self.question.address(tensor=tensor.name),
            is_chosen=self.chosen is tensor,
        )


def answer(run_id: UUID, question: ReadinessQuery) -> Answer | None:
    """Judge the tensors of a sampled step; None if the run has no histograms up to this step."""
    judged = tensors_to_judge(run_id, question.step)
    if judged is None:
        return None
    sampled = judged.sampled
    readiness = judge(sampled.tensors, question.target)
    budget = default_budget(readiness.effect) if question.error is None else question.error
    in_bf16 = smallest_set(readiness.effect.error.estimate, budget)
    search = question.search.lower()
    return Answer(
        question=question,
        sampled=sampled,
        readiness=readiness,
        rows=[tensor for tensor in worst_first(readiness) if search in tensor.name.lower()],
        budget=budget,
        in_bf16=[sampled.tensors.names[i] for i in in_bf16],
        note=judged.note,
    )


def share(bounds: Bounds, i: int, *, exact: bool = True) -> str:
    """A share: one number if it is determined or `exact` is False, else the range."""
    low, estimate, high = (float(part[i]) for part in (bounds.low, bounds.estimate, bounds.high))
    if not np.isfinite([low, estimate, high]).all():
        return "–"
    shown = [percent(value) for value in (low, high)]
    if not exact or shown[0] == shown[1]:
        return percent(estimate)
    return f"{percent(estimate)} ({shown[0].removesuffix('%').rstrip()}–{shown[1]})"


def exponents_of(answer: Answer, tensor: TensorReadiness) -> Exponents:
    """The histogram of a tensor, with the zones of the format at the scale of the question."""
    tensors, i = answer.sampled.tensors, tensor.index
    distribution, target = tensors.distribution, answer.question.target
    format = target.format.of(tensors.roles[i])
    counts = np.zeros(-MIN_EXPONENT + 128)
    first = distribution.first - MIN_EXPONENT
    counts[first : first + distribution.counts.shape[1]] = distribution.counts[i]
    scale = float(answer.readiness.effect.scale[i])
    if not np.isfinite(scale):
        scale = typical_scale(tensors, target, format, i)
    return Exponents(
        first=MIN_EXPONENT,
        counts=counts,
        zeros=float(distribution.zeros[i]),
        nonfinite=float(distribution.nonfinite[i]),
        scale=scale,
        format=format,
        in_blocks=not target.per_tensor,
        amax=float(distribution.amax[i]),
    )


def _number(text: str, name: str, problems: list[str]) -> int | None:
    if not text.strip():
        return None
    digits = text.strip().removeprefix("-")
    if digits.isascii() and digits.isdigit() and len(digits) < 19:
        return int(text)
    problems.append(f"{name} must be a whole number.")
    return None


def _error(text: str, problems: list[str]) -> float | None:
    """The error of the address, which is in per cent."""
    if not text.strip():
        return None
    try:
        value = float(text) / 100.0
    except ValueError:
        value = np.nan
    if 0.0 < value <= 1.0:
        return value
    problems.append("The error must be a number above 0 and at most 100 per cent.")
    return None
