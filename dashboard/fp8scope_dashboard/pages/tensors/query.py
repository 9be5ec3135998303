"""The choices of tensors in the address of a run's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose, log2
from typing import Any, Final, cast
from uuid import UUID

from django.contrib.postgres.aggregates import ArrayAgg
from django.db.models import Count
from django.http import QueryDict

from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.analysis.tensor_onsets import default_limit, is_rate
from fp8scope_dashboard.pages import glossary
from fp8scope_dashboard.pages.address_values import uuid_in, whole_number
from fp8scope_dashboard.pages.glossary.tensors import STATISTICS
from fp8scope_dashboard.pages.tensors.grouping import FOLDS, OPEN_LENGTH, Fold
from fp8scope_dashboard.pages.tensors.modes import MODES, Mode
from fp8scope_dashboard.pages.tensors.ranking import SORTS
from fp8scope_dashboard.runs.models import Run, Tensor
from fp8scope_dashboard.telemetry import queries

FILTER_LENGTH: Final = 200
NAME_LENGTH: Final = 512
MAX_PAGES: Final = 10_000
# Runs that the page offers to compare with.
MAX_OTHERS: Final = 30
# Statistics that a sentence names.
MAX_NAMED: Final = 12
# The most tensors of a map.
MAX_TENSORS: Final = 20_000

MODE_TITLES: Final[Mapping[Mode, str]] = {
    "value": "The value",
    "change": "Change since its start (log₂)",
    "difference": "Difference to another run",
}
FOLD_TITLES: Final[Mapping[Fold, str]] = {
    "layer": "By layer, then role",
    "role": "By role, then layer",
    "kind": "By kind of layer",
}


@dataclass(frozen=True, kw_only=True)
class TensorQuery:
    """The choices of the card of tensors; invalid ones become the defaults.

    Attributes:
        open: the field `open` as it is in the address; empty if the page chooses.
        limit: the value above which a tensor is out of range; None for the default of the statistic.
        everything: whether the ranking lists tensors whose rate is always 0.
    """

    statistic: str
    mode: Mode
    against: UUID | None
    fold: Fold
    role: str
    filter: str
    open: str
    sort: str
    limit: float | None
    page: int
    everything: bool = False

    @classmethod
    def of(cls, query: QueryDict | Mapping[str, str], statistics: Sequence[str]) -> TensorQuery:
        """Read the address of a run with these statistics.

        `limit_of` is the statistic that the limit was written for: a limit of another one does not apply.
        """
        statistic = query.get("statistic", "")
        if statistic not in statistics:
            preferred = (queries.overflow_name(statistics), *STATISTICS, *statistics)
            statistic = next((name for name in preferred if name in statistics), None) or "overflow_rate"
        return cls(
            statistic=statistic,
            mode=cast("Mode", _one_of(query.get("mode", ""), MODES)),
            against=uuid_in(query.get("against", "")),
            fold=cast("Fold", _one_of(query.get("fold", ""), FOLDS)),
            role=query.get("role", "")[:FILTER_LENGTH],
            filter=query.get("filter", "").strip()[:FILTER_LENGTH],
            open=query.get("open", "")[:OPEN_LENGTH],
            sort=_one_of(query.get("sort", ""), tuple(SORTS)),
            limit=_limit(query.get("limit", ""), statistic)
            if query.get("limit_of", statistic) == statistic
            else None,
            page=_page(query.get("page", "")),
            everything=query.get("everything") == "1",
        )

    @property
    def threshold(self) -> float:
        """The limit of the address, or the default of the statistic."""
        return default_limit(self.statistic) if self.limit is None else self.limit

    @property
    def has_own_limit(self) -> bool:
        """Return whether the limit is not the default of the statistic."""
        return not isclose(self.threshold, default_limit(self.statistic), rel_tol=1e-5)

    @property
    def limit_text(self) -> str:
        """The limit as its field shows it: per cent for rates, a factor for other statistics."""
        value = 100.0 * self.threshold if is_rate(self.statistic) else 2.0**self.threshold
        return f"{value:.6g}"


def no_values_of(statistic: str, statistics: Sequence[str]) -> str:
    """The sentence where a run with these statistics has nothing to draw."""
    if not statistics:
        return "No tensor telemetry yet. Convert the model and call run.watch(model)."
    named = ", ".join(glossary.title(name).lower() for name in statistics[:MAX_NAMED])
    return f"The run has no {glossary.title(statistic).lower()}. It has: {named}."


def tensors_context(run: Run, query: QueryDict) -> dict[str, Any]:
    """Return what the map, the ranking and the drawer need on the page of a run."""
    recorded = queries.available_statistics(run.statistics)
    statistics = [name for name in STATISTICS if name in recorded]
    tensors = Tensor.objects.filter(run=run).order_by()
    summary = tensors.aggregate(
        count=Count("id"), roles=ArrayAgg("role", distinct=True, order_by="role", default=[])
    )
    return {
        "statistics": statistics,
        "tensor_count": summary["count"],
        "roles": summary["roles"],
        "modes": MODE_TITLES,
        "folds": FOLD_TITLES,
        "tensor_others": others(run) if statistics else [],
        "chosen_tensor": tensor_named(run, query.get("tensor", "")),
    }


def tensor_named(run: Run, text: str) -> Tensor | None:
    """The tensor whose name or index is in an address."""
    tensors = Tensor.objects.filter(run=run)
    if (index := whole_number(text, 8)) is not None:
        return tensors.filter(index=index).first()
    return tensors.filter(name=text[:NAME_LENGTH]).first() if text else None


def chosen_tensors(run: Run, question: TensorQuery) -> list[Tensor]:
    """The tensors with the role and the text of the address, in the order of the model."""
    tensors = Tensor.objects.filter(run=run).order_by("index").only("index", "name", "role", "run")
    if question.role:
        tensors = tensors.filter(role=question.role)
    if question.filter:
        tensors = tensors.filter(name__icontains=question.filter)
    return list(tensors[:MAX_TENSORS])


def others(run: Run) -> list[Run]:
    """Runs to compare with: the baselines, then the newest of the project with tensors."""
    baselines = [baseline for baseline in comparison_runs.baseline_runs(run) if baseline.pk != run.pk]
    readable = {baseline.pk for baseline in baselines} | {run.pk}
    rest = Run.objects.filter(project=run.project).exclude(pk__in=readable).exclude(statistics=[])
    narrow = rest.defer("config", "environment", "summary", "error", "last_scalars")
    return [*baselines, *narrow.order_by("-created_at")[:MAX_OTHERS]][:MAX_OTHERS]


def other_run(run: Run, question: TensorQuery) -> Run | None:
    """The run of the address, if it is in the same project; else the first of `others`."""
    if question.against is not None:
        chosen = Run.objects.filter(project=run.project, pk=question.against).exclude(pk=run.pk).first()
        if chosen is not None:
            return chosen
    return next(iter(others(run)), None)


def _one_of(text: str, recorded: Sequence[str]) -> str:
    return text if text in recorded else recorded[0]


def _limit(text: str, statistic: str) -> float | None:
    """The limit in the unit of `TensorQuery.threshold`."""
    try:
        value = float(text[:32])
    except ValueError:
        return None
    if is_rate(statistic):
        return value / 100.0 if 0.0 <= value <= 100.0 else None
    # NaN compares false.
    return log2(value) if 1.0 < value <= 2.0**64 else None


def _page(text: str) -> int:
    return min(max(whole_number(text, 8) or 1, 1), MAX_PAGES)
